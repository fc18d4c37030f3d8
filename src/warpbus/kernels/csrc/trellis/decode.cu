// out [m, n] = epilogue(norm(x) [m, k] weight [n, k]^T) for up to TOKENS rows of x, the weight a trellis of 2 or 3 bits.
//
// Macros
//   ELEMENT  __half or __nv_bfloat16: the type of x, norm, bias, residual and out
//   BITS     2 or 3: of a weight; kernels/ops/trellis_packed.py describes the layout
//   TOKENS   8 or 16: the maximum number of rows of x
//   WARPS    that multiply; two more for each 8 rows of x add their sums
//   DEPTH    stages of each warp's ring
//   SPAN     blocks of 128 columns in a stage
//   OTHER_BYTES  of shared memory that the host requests beside x
//
// The weight is W = scale * Q R^T, where Q are the numbers of the trellis and R rotates columns (qtensor/trellis.py), so that
// W x = scale * Q (R^T x). Each block computes R^T x for the columns that it multiplies, in fp32; where `norm` is given, x is
// multiplied by it first, and the factor of RMSNorm joins the scales. R^T x is rounded to float16, in which Q is exact, whatever
// ELEMENT is: each row is multiplied by a power of two, so that its elements fit, and the sums by its inverse. Epilogue, in
// fp32: scale, bias; if `gate_tiles` > 0, silu(gate) * up, where the first half of the weight's rows gives the gate; `residual`.
//
// n is a multiple of 16, k of 32; x, norm and out are contiguous, and x and norm begin at multiples of 16 bytes. With several
// slices there is no norm. A slice has up to 2 kHeld WARPS blocks of columns.
//
// A block has the columns of one of `slices` slices and takes the tiles of 16 rows (with a gate, pairs of them) in turns with
// the other blocks of the slice. Its warps have disjoint blocks of 128 columns. Each copies the codes of a block of columns
// to its own ring in shared memory and computes the numbers in registers (decode.cuh); no warp waits for another. More warps
// add their sums in a fixed order while they multiply the next tile; without a gate two of these take turns, because of the
// latency of what they read and write. Where there are several slices, the sums of each go to `partial`, and the warp that
// finishes a tile last adds them in the order of the slices.
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "trellis/decode.cuh"

constexpr int kThreads = 32 * WARPS;  // that multiply
constexpr int kTokenTiles = TOKENS / 8;
constexpr int kStage = SPAN * kVectors;  // of 16 bytes
constexpr int kFinishers = 2 * kTokenTiles;  // warps that add sums
constexpr int kHeld = 4;  // vectors of rotated x that a thread holds until the largest element is known
constexpr int kSums = WARPS * kTokenTiles * 32;  // float4, of one of two buffers

struct Problem {
    int m, n, k;
    int blocks;      // of 128 columns, in a row of the weight
    int levels;      // the rotation covers 2^levels columns
    int slices;
    int gate_tiles;  // tiles of rows of the gate, or 0
    float eps;
};

struct Others {
    float4 sums[2][kSums];
    float squares[WARPS][TOKENS];   // of x, summed by warp and row
    ptx::uint32 largest[TOKENS];    // the bits of a row's largest magnitude, rotated
    float down[TOKENS];             // what the sums of a row are multiplied with
    ptx::uint64 full[2], empty[2];
    Constants code;
};
constexpr int kRingBytes = WARPS * DEPTH * SPAN * kVectors * 16;
static_assert(WARPS * TOKENS <= kThreads, "a thread clears one sum of squares");
static_assert(kRingBytes + sizeof(Others) == OTHER_BYTES, "the host asks for other room beside x");

using Vector = Vector16<ELEMENT>;

// Elements from one row of x in shared memory to the next: with it, no two rows of an 8x8 matrix share a bank.
__device__ __forceinline__ int stride_of(int blocks) { return blocks * kBlock + 8; }

// The part of this block: a slice of the columns, and every stride-th tile or pair of tiles.
struct Share {
    int slice, begin, end, first, stride, items, halves;

    __device__ __forceinline__ explicit Share(const Problem& p)
        : slice(blockIdx.x % p.slices),
          begin(static_cast<int>(static_cast<long long>(p.blocks) * slice / p.slices)),
          end(static_cast<int>(static_cast<long long>(p.blocks) * (slice + 1) / p.slices)),
          first(blockIdx.x / p.slices),
          stride(gridDim.x / p.slices),
          items(p.gate_tiles > 0 ? p.gate_tiles : p.n / 16),
          halves(p.gate_tiles > 0 ? 2 : 1) {}
};

// The blocks of columns of a warp, tile after tile.
struct Cursor {
    int item, half = 0, block;

    __device__ __forceinline__ Cursor(const Share& share, int warp) : item(share.first), block(share.begin + warp * SPAN) {
        if (block >= share.end) item = share.items;
    }
    __device__ __forceinline__ bool there(const Share& share) const { return item < share.items; }
    __device__ __forceinline__ void advance(const Share& share, int warp) {
        block += WARPS * SPAN;
        if (block < share.end) return;
        block = share.begin + warp * SPAN;
        if (++half < share.halves) return;
        half = 0;
        item += share.stride;
    }
};

__device__ __forceinline__ void wait_for(ptx::uint32 barrier, int parity) {
#if __CUDA_ARCH__ >= 900
    ptx::mbarrier_wait(barrier, parity);
#else
    while (!ptx::mbarrier_test(barrier, parity)) __nanosleep(32);
#endif
}

// Copies what the cursor points at, if anything, and closes the group of copies.
__device__ __forceinline__ void load(uint4* stage, const uint4* codes, const Cursor& at, const Share& share, const Problem& p) {
    const int lane = threadIdx.x % 32;
    if (at.there(share)) {
        const long long tile = at.item + at.half * p.gate_tiles;
        const uint4* from = codes + (tile * p.blocks + at.block) * kVectors + lane;
        const ptx::uint32 to = ptx::shared_address(stage + lane);
        const int count = (SPAN == 1 ? 1 : min(SPAN, share.end - at.block)) * kVectors - lane;
#pragma unroll
        for (int v = 0; v < SPAN * kVectors; v += 32) {
            if ((v + 32 <= kVectors) || v < count) ptx::cp_async_16(to + 16 * v, from + v);
        }
    }
    ptx::cp_async_commit();
}

__device__ __forceinline__ Vector load_vector(const ELEMENT* from, bool there) {
    return there ? *reinterpret_cast<const Vector*>(from) : Vector{};
}

// The biased exponent of the power of two by which a row is multiplied: its largest magnitude becomes 2^13 to 2^14.
__device__ __forceinline__ unsigned power(ptx::uint32 largest) {
    return min(max(267 - static_cast<int>(largest >> 23), 1), 253);
}

// Multiplies 2^levels neighbouring columns by signs and a Hadamard matrix; half a warp has 128 columns.
__device__ __forceinline__ void rotate(float (&v)[8], unsigned sign, int levels) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = sign >> e & 1 ? -v[e] : v[e];
#pragma unroll
    for (int width = 1; width < 8; width *= 2) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            if (e & width) continue;
            const float low = v[e], high = v[e + width];
            v[e] = low + high;
            v[e + width] = low - high;
        }
    }
#pragma unroll
    for (int level = 3; level < 7; ++level) {
        if (level >= levels) break;
        const int distance = 1 << (level - 3);
        const float own = lane & distance ? -1.0f : 1.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = fmaf(own, v[e], __shfl_xor_sync(0xffffffff, v[e], distance));
    }
}

// Writes R^T x to shared memory, some rows at a time, and what the sums of a row are multiplied with. Called by all threads;
// they have synchronized since `largest` and `squares` became zeros, and do so again at the end.
__device__ __forceinline__ void prepare(__half* rotated, Others& others, const ELEMENT* x, const ELEMENT* norm,
                                        const unsigned char* signs, const Share& share, const Problem& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int count = share.end - share.begin, pairs = (count + 1) / 2, at_once = max(1, kHeld * WARPS / pairs);
    for (int first = 0; first < p.m; first += at_once) {
        const int pieces = min(at_once, p.m - first) * pairs;
        float v[kHeld][8];
        if (warp < WARPS) {
            Vector loaded[kHeld];
#pragma unroll
            for (int j = 0; j < kHeld; ++j) {
                const int i = warp + j * WARPS, row = first + i / pairs, block = i % pairs * 2 + lane / 16;
                const int at = (share.begin + block) * kBlock + lane % 16 * 8;
                loaded[j] = load_vector(x + static_cast<long long>(row) * p.k + at, i < pieces && block < count && at < p.k);
            }
#pragma unroll
            for (int j = 0; j < kHeld; ++j) {
                const int i = warp + j * WARPS, row = first + i / pairs, block = i % pairs * 2 + lane / 16;
                if (i >= pieces) break;
                const int at = (share.begin + block) * kBlock + lane % 16 * 8;
                const bool there = block < count && at < p.k;
#pragma unroll
                for (int e = 0; e < 8; ++e) v[j][e] = to_float(loaded[j].element[e]);
                if (norm != nullptr) {
                    const Vector weight = load_vector(norm + at, there);
                    float squares = 0.0f;
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        squares = fmaf(v[j][e], v[j][e], squares);
                        v[j][e] *= to_float(weight.element[e]);
                    }
#pragma unroll
                    for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffff, squares, offset);
                    if (lane == 0) others.squares[warp][row] += squares;
                }
                rotate(v[j], there ? signs[at / 8] : 0, p.levels);
                float largest = 0.0f;
#pragma unroll
                for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(v[j][e]));
                const ptx::uint32 bits = __reduce_max_sync(0xffffffff, __float_as_uint(largest));
                if (lane == 0) atomicMax(&others.largest[row], bits);
            }
        }
        __syncthreads();
        if (warp < WARPS) {
#pragma unroll
            for (int j = 0; j < kHeld; ++j) {
                const int i = warp + j * WARPS, row = first + i / pairs, block = i % pairs * 2 + lane / 16;
                if (i >= pieces) break;
                const float up = __uint_as_float(power(others.largest[row]) << 23);
                if (block >= count) continue;
                uint4 packed;
                packed.x = pack_pair<__half>(v[j][0] * up, v[j][1] * up);
                packed.y = pack_pair<__half>(v[j][2] * up, v[j][3] * up);
                packed.z = pack_pair<__half>(v[j][4] * up, v[j][5] * up);
                packed.w = pack_pair<__half>(v[j][6] * up, v[j][7] * up);
                *reinterpret_cast<uint4*>(rotated + row * stride_of(count) + block * kBlock + lane % 16 * 8) = packed;
            }
        } else if (warp == WARPS && first + lane < min(first + at_once, p.m)) {
            const int row = first + lane;
            float factor = exp2f(-0.5f * p.levels);
            if (norm != nullptr) {
                float squares = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) squares += others.squares[w][row];
                factor *= rsqrtf(squares / p.k + p.eps);
            }
            others.down[row] = factor * __uint_as_float((254 - power(others.largest[row])) << 23);
        }
    }
    __syncthreads();
}

// Adds the product of 16 rows by 128 columns. `x` are the shared-memory addresses of this lane's rows of the fragments.
__device__ __forceinline__ void multiply(float (&sum)[kTokenTiles][4], const uint4* stage, const ptx::uint32 (&x)[kTokenTiles],
                                         const Window& window, const Code& code) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const uint4 first = stage[u * kWords + window.first], second = stage[u * kWords + window.second];
        const ptx::uint32 low[kTiles] = {first.x, first.y, first.z, first.w};
        const ptx::uint32 high[kTiles] = {second.x, second.y, second.z, second.w};
#pragma unroll
        for (int c = 0; c < kTiles; c += 2) {
            ptx::uint32 b[kTokenTiles][4];
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t) ptx::ldmatrix_x4(b[t], x[t] + (u * kTiles + c) * 32);
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                ptx::uint32 a[4];
                code.numbers(a, __funnelshift_r(low[c + s], high[c + s], window.shift));
#pragma unroll
                for (int t = 0; t < kTokenTiles; ++t) ptx::mma_m16n8k16<__half>(sum[t], a, b[t][2 * s], b[t][2 * s + 1]);
            }
        }
    }
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// A warp that adds the sums of the others, and stores results. It has 8 rows of x, and without a gate every other tile. A lane
// has the rows g and g + 8 of a tile, and two neighbouring rows of x.
__device__ __forceinline__ void finish(int finisher, const Others& others, ptx::uint32 full, ptx::uint32 empty,
                                       const float* scales, const ELEMENT* bias, const ELEMENT* residual, ELEMENT* out,
                                       float4* partial, int* counters, const Share& share, const Problem& p) {
    const int lane = threadIdx.x % 32, width = p.gate_tiles > 0 ? p.n / 2 : p.n;
    const int t = finisher % kTokenTiles, begin = finisher / kTokenTiles, step = 3 - share.halves;
    if (begin >= step) return;
    const int tokens[2] = {8 * t + lane % 4 * 2, 8 * t + lane % 4 * 2 + 1};
    float down[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) down[e] = tokens[e] < p.m ? others.down[tokens[e]] : 0.0f;
    for (int index = begin;; index += step) {
        const int item = share.first + index * share.stride;
        if (item >= share.items) return;
        // All that is read from global memory is on its way before the sums are there.
        const int rows[2] = {16 * item + lane / 4, 16 * item + lane / 4 + 8};
        float scale[2][2], shift[2][2] = {}, rest[4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (half >= share.halves) continue;
                scale[half][h] = scales[rows[h] + half * width];
                if (bias != nullptr) shift[half][h] = to_float(bias[rows[h] + half * width]);
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (residual == nullptr || tokens[e % 2] >= p.m) continue;
            rest[e] = to_float(residual[static_cast<long long>(tokens[e % 2]) * width + rows[e / 2]]);
        }
        float total[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half >= share.halves) continue;
            const int turn = index * share.halves + half, buffer = turn % 2;
            wait_for(full + 8 * buffer, turn / 2 % 2);
            float4 sum = {};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum = plus(sum, others.sums[buffer][(w * kTokenTiles + t) * 32 + lane]);
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(empty + 8 * buffer);
            total[half][0] = sum.x * down[0];
            total[half][1] = sum.y * down[1];
            total[half][2] = sum.z * down[0];
            total[half][3] = sum.w * down[1];
        }
        if (p.slices > 1) {
            const int vectors = share.halves * kTokenTiles * 32;  // of an item
            float4* const all = partial + static_cast<long long>(item) * p.slices * vectors + t * 32 + lane;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (half >= share.halves) continue;
                __stcg(all + share.slice * vectors + half * kTokenTiles * 32,
                       make_float4(total[half][0], total[half][1], total[half][2], total[half][3]));
            }
            __threadfence();
            __syncwarp();
            int before = 0;
            if (lane == 0) before = ptx::add_acquire_release(counters + item * kTokenTiles + t, 1);
            if (__shfl_sync(0xffffffff, before, 0) != p.slices - 1) continue;
            __threadfence();
            if (lane == 0) counters[item * kTokenTiles + t] = 0;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (half >= share.halves) continue;
                float4 sum = {};
                for (int s = 0; s < p.slices; ++s) sum = plus(sum, __ldcg(all + s * vectors + half * kTokenTiles * 32));
                total[half][0] = sum.x;
                total[half][1] = sum.y;
                total[half][2] = sum.z;
                total[half][3] = sum.w;
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (tokens[e % 2] >= p.m) continue;
            float value = total[0][e] * scale[0][e / 2] + shift[0][e / 2];
            if (p.gate_tiles > 0) value = activate(kSilu, value) * (total[1][e] * scale[1][e / 2] + shift[1][e / 2]);
            out[static_cast<long long>(tokens[e % 2]) * width + rows[e / 2]] = from_float<ELEMENT>(value + rest[e]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads + 32 * kFinishers, 1)
    trellis_decode(const uint4* codes, const float* scales, const unsigned char* signs, const ELEMENT* x, const ELEMENT* norm,
                   const ELEMENT* bias, const ELEMENT* residual, ELEMENT* out, float* partial, int* counters,
                   const Problem p) {
    extern __shared__ __align__(128) unsigned char memory[];
    uint4* const rings = reinterpret_cast<uint4*>(memory);
    Others& others = *reinterpret_cast<Others*>(memory + kRingBytes);
    __half* const rotated = reinterpret_cast<__half*>(memory + OTHER_BYTES);
    const ptx::uint32 full = ptx::shared_address(others.full), empty = ptx::shared_address(others.empty);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Share share(p);

#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
#endif
    if (threadIdx.x == 0) {
        others.code = kCode;
        for (int i = 0; i < 2; ++i) {
            ptx::mbarrier_init(full + 8 * i, WARPS);
            ptx::mbarrier_init(empty + 8 * i, kTokenTiles);
        }
    }
    if (threadIdx.x < TOKENS) others.largest[threadIdx.x] = 0;
    if (threadIdx.x < WARPS * TOKENS) others.squares[0][threadIdx.x] = 0.0f;
    // No kernel writes weights: the first stages are loaded before the previous kernel has ended.
    uint4* const ring = rings + warp * DEPTH * kStage;
    Cursor ahead(share, warp);
    if (warp < WARPS) {
#pragma unroll
        for (int i = 0; i < DEPTH - 1; ++i) {
            load(ring + i * kStage, codes, ahead, share, p);
            if (ahead.there(share)) ahead.advance(share, warp);
        }
    }
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_wait();
#endif
    prepare(rotated, others, x, norm, signs, share, p);
    if (warp >= WARPS) {
        finish(warp - WARPS, others, full, empty, scales, bias, residual, out, reinterpret_cast<float4*>(partial), counters,
               share, p);
        return;
    }

    // Lanes 8 i to 8 i + 7 address the rows of matrix i of 8 columns. Rows beyond m repeat the last one and are not stored.
    ptx::uint32 rows[kTokenTiles];
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
        const int row = min(8 * t + lane % 8, p.m - 1);
        rows[t] = ptx::shared_address(rotated + row * stride_of(share.end - share.begin) + lane / 8 * 8);
    }
    const Window window(lane);
    const Code code(ptx::shared_address(&others.code));
    int slot = 0, behind = DEPTH - 1;  // the stage that is multiplied, and the one that is loaded
    for (int item = share.first, turn = 0; item < share.items; item += share.stride) {
        for (int half = 0; half < share.halves; ++half, ++turn) {
            float sum[kTokenTiles][4] = {};
            for (int block = share.begin + warp * SPAN; block < share.end; block += WARPS * SPAN) {
                ptx::cp_async_wait<DEPTH - 2>();
                __syncwarp();  // the copies of all lanes are there, and all lanes have read the stage before
                load(ring + behind * kStage, codes, ahead, share, p);
                if (ahead.there(share)) ahead.advance(share, warp);
                behind = behind + 1 == DEPTH ? 0 : behind + 1;
                ptx::uint32 at[kTokenTiles];
#pragma unroll
                for (int t = 0; t < kTokenTiles; ++t) at[t] = rows[t] + (block - share.begin) * kBlock * 2;
#pragma unroll
                for (int i = 0; i < SPAN; ++i) {
                    if (i > 0 && block + i >= share.end) break;
                    multiply(sum, ring + slot * kStage + i * kVectors, at, window, code);
#pragma unroll
                    for (int t = 0; t < kTokenTiles; ++t) at[t] += kBlock * 2;
                }
                slot = slot + 1 == DEPTH ? 0 : slot + 1;
            }
            const int buffer = turn % 2;
            wait_for(empty + 8 * buffer, turn / 2 % 2 ^ 1);
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t) {
                others.sums[buffer][(warp * kTokenTiles + t) * 32 + lane] =
                    make_float4(sum[t][0], sum[t][1], sum[t][2], sum[t][3]);
            }
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(full + 8 * buffer);
        }
    }
}

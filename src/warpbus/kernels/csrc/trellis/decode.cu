// out [m, n] = epilogue(norm(x) [m, k] weight [n, k]^T) for up to TOKENS rows of x, the weight a trellis of 2 or 3 bits.
//
// Macros
//   ELEMENT  __half or __nv_bfloat16: the type of x, norm, bias, residual and out
//   BITS     2 or 3: of a weight; kernels/ops/trellis_packed.py describes the layout
//   TOKENS   8 or 16: the maximum number of rows of x
//   WARPS    that multiply; one more adds their sums
//   DEPTH    stages of each warp's ring
//   SPAN     blocks of 128 columns in a stage
//   OTHER_BYTES  of shared memory that the host requests beside x
//
// The weight is W = scale * Q R^T, where Q are the numbers of the trellis and R rotates columns (qtensor/trellis.py), so that
// W x = scale * Q (R^T x). Each block computes R^T x for the columns that it multiplies, in fp32, after RMSNorm where `norm` is
// given. It is rounded to float16, in which Q is exact, whatever ELEMENT is: each row is multiplied by a power of two, so
// that its elements fit, and the sums by its inverse. Epilogue, in fp32: scale, bias; if `gate_tiles` > 0, silu(gate) * up,
// where the first half of the weight's rows gives the gate; `residual`.
//
// n is a multiple of 16, k of 32; x, norm and out are contiguous, and x and norm begin at multiples of 16 bytes.
//
// A block has the columns of one of `slices` slices and takes the tiles of 16 rows (with a gate, pairs of them) in turns with
// the other blocks of the slice. Its warps have disjoint blocks of 128 columns. Each copies the codes of a block of columns
// to its own ring in shared memory and computes the numbers in registers (decode.cuh); no warp waits for another. One
// more warp adds their sums in a fixed order while they multiply the next tile. Where there are several slices, the sums of
// each go to `partial`, and the block that finishes a tile last adds them in the order of the slices.
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "trellis/decode.cuh"

constexpr int kThreads = 32 * WARPS;  // that multiply
constexpr int kTokenTiles = TOKENS / 8;
constexpr int kStage = SPAN * kVectors;  // of 16 bytes
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
    float2 found[WARPS][TOKENS];      // by warp and row of x: the largest magnitude and the sum of squares
    float factor[TOKENS];             // of the norm
    float up[TOKENS], down[TOKENS];   // the power of two of a row of x, and its inverse
    ptx::uint64 full[2], empty[2];
    Constants code;
};
constexpr int kRingBytes = WARPS * DEPTH * SPAN * kVectors * 16;
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

// Finds for each row of x the factor of the norm and the power of two. Called by all threads.
__device__ __forceinline__ void measure(Others& others, const ELEMENT* x, const ELEMENT* norm, const Problem& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp < WARPS) {
        for (int row = 0; row < p.m; ++row) {
            float largest = 0.0f, squares = 0.0f;
            for (int at = 8 * threadIdx.x; at < p.k; at += 8 * kThreads) {
                const Vector values = load_vector(x + static_cast<long long>(row) * p.k + at, true);
                const Vector weight = load_vector(norm + at, norm != nullptr);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float value = to_float(values.element[i]);
                    squares = fmaf(value, value, squares);
                    largest = fmaxf(largest, fabsf(norm == nullptr ? value : value * to_float(weight.element[i])));
                }
            }
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, offset));
                squares += __shfl_xor_sync(0xffffffff, squares, offset);
            }
            if (lane == 0) others.found[warp][row] = make_float2(largest, squares);
        }
    }
    __syncthreads();
    if (threadIdx.x < p.m) {
        const int row = threadIdx.x;
        float largest = 0.0f, squares = 0.0f;
        for (int w = 0; w < WARPS; ++w) {
            largest = fmaxf(largest, others.found[w][row].x);
            squares += others.found[w][row].y;
        }
        const float factor = norm == nullptr ? 1.0f : rsqrtf(squares / p.k + p.eps);
        // A rotated element is at most the root of the block's size times the largest one. Its product is below 2^15.
        const float bound = largest * factor * exp2f(0.5f * p.levels);
        const unsigned exponent = min(max(267 - static_cast<int>(__float_as_uint(bound) >> 23), 1), 253);
        others.factor[row] = factor;
        others.up[row] = __uint_as_float(exponent << 23);
        others.down[row] = __uint_as_float((254 - exponent) << 23);
    }
    __syncthreads();
}

// Writes R^T norm(x) to shared memory: half a warp has 128 columns of a row.
__device__ __forceinline__ void rotate(__half* rotated, const Others& others, const ELEMENT* x, const ELEMENT* norm,
                                       const unsigned char* signs, const Share& share, const Problem& p) {
    const int lane = threadIdx.x % 32, count = share.end - share.begin, pairs = (count + 1) / 2;
    const float root = exp2f(-0.5f * p.levels);
    for (int i = threadIdx.x / 32; i < p.m * pairs; i += WARPS) {
        const int row = i / pairs, block = i % pairs * 2 + lane / 16, within = block * kBlock + lane % 16 * 8;
        const int at = share.begin * kBlock + within;
        const bool there = block < count && at < p.k;
        const Vector values = load_vector(x + static_cast<long long>(row) * p.k + at, there);
        const unsigned sign = there ? signs[at / 8] : 0;
        float v[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = to_float(values.element[e]);
        if (norm != nullptr) {
            const Vector weight = load_vector(norm + at, there);
            const float factor = others.factor[row];
#pragma unroll
            for (int e = 0; e < 8; ++e) {  // rounded as the layer defines it
                const float normed = to_float(from_float<ELEMENT>(v[e] * factor));
                v[e] = to_float(from_float<ELEMENT>(normed * to_float(weight.element[e])));
            }
        }
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
            if (level >= p.levels) break;
            const int distance = 1 << (level - 3);
            const float own = lane & distance ? -1.0f : 1.0f;
#pragma unroll
            for (int e = 0; e < 8; ++e) v[e] = fmaf(own, v[e], __shfl_xor_sync(0xffffffff, v[e], distance));
        }
        const float scale = root * others.up[row];
        if (block < count) {
            uint4 packed;
            packed.x = pack_pair<__half>(v[0] * scale, v[1] * scale);
            packed.y = pack_pair<__half>(v[2] * scale, v[3] * scale);
            packed.z = pack_pair<__half>(v[4] * scale, v[5] * scale);
            packed.w = pack_pair<__half>(v[6] * scale, v[7] * scale);
            *reinterpret_cast<uint4*>(rotated + row * stride_of(count) + within) = packed;
        }
    }
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

// The warp that adds the sums of the others, and stores results. A lane has the rows g and g + 8 of a tile and of each 8
// rows of x two neighbours.
__device__ __forceinline__ void finish(const Others& others, ptx::uint32 full, ptx::uint32 empty, const float* scales,
                                       const ELEMENT* bias, const ELEMENT* residual, ELEMENT* out, float4* partial,
                                       int* counters, const Share& share, const Problem& p) {
    const int lane = threadIdx.x % 32, width = p.gate_tiles > 0 ? p.n / 2 : p.n;
    for (int item = share.first, turn = 0; item < share.items; item += share.stride) {
        float4 total[2][kTokenTiles] = {};
        for (int half = 0; half < share.halves; ++half, ++turn) {
            const int buffer = turn % 2;
            wait_for(full + 8 * buffer, turn / 2 % 2);
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t) {
                float4 sum = {};
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    sum = plus(sum, others.sums[buffer][(w * kTokenTiles + t) * 32 + lane]);
                }
                if (half == 0) total[0][t] = sum;
                else total[1][t] = sum;
            }
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(empty + 8 * buffer);
        }
        if (p.slices > 1) {
            const int vectors = share.halves * kTokenTiles * 32;  // of an item
            float4* const mine = partial + (static_cast<long long>(item) * p.slices + share.slice) * vectors + lane;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int t = 0; t < kTokenTiles; ++t) {
                    if (half < share.halves) __stcg(mine + (half * kTokenTiles + t) * 32, total[half][t]);
                }
            }
            __threadfence();
            __syncwarp();
            int before = 0;
            if (lane == 0) before = ptx::add_acquire_release(counters + item, 1);
            if (__shfl_sync(0xffffffff, before, 0) != p.slices - 1) continue;
            __threadfence();
            if (lane == 0) counters[item] = 0;
            const float4* const all = mine - static_cast<long long>(share.slice) * vectors;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int t = 0; t < kTokenTiles; ++t) {
                    if (half >= share.halves) continue;
                    float4 sum = {};
                    for (int s = 0; s < p.slices; ++s) {
                        sum = plus(sum, __ldcg(all + s * vectors + (half * kTokenTiles + t) * 32));
                    }
                    total[half][t] = sum;
                }
            }
        }
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
            const float first[4] = {total[0][t].x, total[0][t].y, total[0][t].z, total[0][t].w};
            const float second[4] = {total[1][t].x, total[1][t].y, total[1][t].z, total[1][t].w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = 16 * item + lane / 4 + e / 2 * 8, token = 8 * t + lane % 4 * 2 + e % 2;
                if (token >= p.m) continue;
                float value = first[e] * scales[row] * others.down[token];
                if (bias != nullptr) value += to_float(bias[row]);
                if (p.gate_tiles > 0) {
                    float up = second[e] * scales[row + width] * others.down[token];
                    if (bias != nullptr) up += to_float(bias[row + width]);
                    value = activate(kSilu, value) * up;
                }
                const long long place = static_cast<long long>(token) * width + row;
                if (residual != nullptr) value += to_float(residual[place]);
                out[place] = from_float<ELEMENT>(value);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads + 32, 1)
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
            ptx::mbarrier_init(empty + 8 * i, 1);
        }
    }
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
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_wait();
#endif
    measure(others, x, norm, p);
    if (warp < WARPS) rotate(rotated, others, x, norm, signs, share, p);
    __syncthreads();
    if (warp == WARPS) {
        finish(others, full, empty, scales, bias, residual, out, reinterpret_cast<float4*>(partial), counters, share, p);
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

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
// W x = scale * Q (R^T x). Each warp computes R^T x for the columns that it multiplies (rotate.cuh); where `norm` is given, x is
// multiplied by it first, and the factor of RMSNorm joins the scales. x and R^T x are rounded to float16, in which Q is exact,
// whatever ELEMENT is: each row is multiplied by a power of two, so that its elements fit, and the sums by its inverse.
// Epilogue, in fp32: scale, bias; if `gate_tiles` > 0, silu(gate) * up, where the first half of the weight's rows gives the
// gate; `residual`.
//
// n is a multiple of 16, k of 32; x, norm and out are contiguous, and x and norm begin at multiples of 16 bytes. With several
// slices there is no norm.
//
// A block has the columns of one of `slices` slices and takes the tiles of 16 rows (with a gate, pairs of them) in turns with
// the other blocks of the slice. Its warps have disjoint blocks of 128 columns. Each copies the codes of SPAN blocks of columns
// to its own ring in shared memory and computes the numbers in registers (decode.cuh); no warp waits for another. More warps
// add their sums in a fixed order while they multiply the next tile; without a gate two of these take turns, because of the
// latency of what they read and write. Where there are several slices, the sums of each go to `partial`, and the warp that
// finishes a tile last adds them in the order of the slices.
//
// Up to 8 rows of x leave room for two blocks on a multiprocessor: that of the next product fills its rings while this one
// ends.
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "trellis/decode.cuh"
#include "trellis/rotate.cuh"

constexpr int kThreads = 32 * WARPS;  // that multiply
constexpr int kTokenTiles = TOKENS / 8;
constexpr int kStage = SPAN * kVectors;  // of 16 bytes
constexpr int kFinishers = 2 * kTokenTiles;  // warps that add sums
constexpr int kTogether = 2;  // vectors of x that a thread loads before it looks at the first
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
    float squares[WARPS][TOKENS];        // of x, summed by warp and row
    ptx::uint32 largest[WARPS][TOKENS];  // the bits of the largest magnitude of a row in the columns of a warp
    ptx::uint64 full[2], empty[2];
    ptx::uint64 filled[WARPS][DEPTH];
};
constexpr int kRingBytes = WARPS * DEPTH * SPAN * kVectors * 16;
static_assert(sizeof(ELEMENT) == sizeof(__half), "x and what it becomes take the same place");
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

// Copies what the cursor points at, if anything, to a stage of the warp, and advances. All lanes have read what was there.
__device__ __forceinline__ void load(uint4* stage, ptx::uint32 filled, const uint4* codes, Cursor& at, const Share& share,
                                     const Problem& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if __CUDA_ARCH__ >= 900
    if (lane != 0) return;
#endif
    if (at.there(share)) {
        const ptx::uint32 index = (at.item + at.half * p.gate_tiles) * p.blocks + at.block;
        const uint4* const from = codes + static_cast<ptx::uint64>(index) * kVectors;
        const int count = (SPAN == 1 ? 1 : min(SPAN, share.end - at.block)) * kVectors;
#if __CUDA_ARCH__ >= 900
        ptx::mbarrier_expect(filled, 16 * count);
        ptx::bulk_load(ptx::shared_address(stage), from, 16 * count, filled);
#else
#pragma unroll
        for (int v = 0; v < SPAN * kVectors; v += 32) {
            if (v + lane < count) ptx::cp_async_16(ptx::shared_address(stage + v + lane), from + v + lane);
        }
#endif
        at.advance(share, warp);
    }
#if __CUDA_ARCH__ < 900
    ptx::cp_async_commit();
#endif
}

__device__ __forceinline__ Vector load_vector(const ELEMENT* from, bool there) {
    return there ? *reinterpret_cast<const Vector*>(from) : Vector{};
}

// The biased exponent of the power of two by which a row is multiplied. Sums of 2^levels elements are then below 2^14.
__device__ __forceinline__ unsigned power(ptx::uint32 largest, int levels) {
    return min(max(267 - levels - static_cast<int>(largest >> 23), 1), 253);
}

// Where half a warp finds the blocks of columns, two at a time, that its warp multiplies, in all rows of x.
struct Piece {
    int row, block;      // of the slice
    int at;              // the first of a lane's 8 columns
    bool inside, there;  // the slice has that block, and x these columns

    __device__ __forceinline__ Piece(int i, int pairs, const Share& share, const Problem& p) : row(i / pairs) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = i % pairs * 2 + lane / 16;
        block = (own / SPAN * WARPS + warp) * SPAN + own % SPAN;
        at = (share.begin + block) * kBlock + lane % 16 * 8;
        inside = block < share.end - share.begin;
        there = inside && at < p.k;
    }
};

// Writes R^T x to shared memory, for the columns that this warp multiplies: x as it is, then, when the largest element of a row
// is known, x in float16, and at last R^T x, all in the same place.
__device__ __forceinline__ void prepare(__half* rotated, Others& others, const ELEMENT* x, const ELEMENT* norm,
                                        const unsigned char* signs, const Rotation& rotation, const Share& share,
                                        const Problem& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int count = share.end - share.begin, rest = count - warp * SPAN;  // blocks from the warp's first one on
    const int own = rest <= 0 ? 0 : rest / (WARPS * SPAN) * SPAN + min(rest % (WARPS * SPAN), SPAN);
    const int pairs = (own + 1) / 2, pieces = p.m * pairs;
    if (lane < TOKENS) others.largest[warp][lane] = 0, others.squares[warp][lane] = 0.0f;
    __syncwarp();
    for (int first = 0; first < pieces; first += kTogether) {
        Vector loaded[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const Piece piece(first + j, pairs, share, p);
            loaded[j] = load_vector(x + static_cast<long long>(piece.row) * p.k + piece.at, first + j < pieces && piece.there);
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            if (first + j >= pieces) break;
            const Piece piece(first + j, pairs, share, p);
            Vector weight;
            if (norm != nullptr) weight = load_vector(norm + piece.at, piece.there);
            float largest = 0.0f, squares = 0.0f;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float v = to_float(loaded[j].element[e]);
                squares = fmaf(v, v, squares);
                largest = fmaxf(largest, fabsf(norm == nullptr ? v : v * to_float(weight.element[e])));
            }
            const ptx::uint32 bits = __reduce_max_sync(0xffffffff, __float_as_uint(largest));
            if (lane == 0) others.largest[warp][piece.row] = max(others.largest[warp][piece.row], bits);
            if (norm != nullptr) {
#pragma unroll
                for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffff, squares, offset);
                if (lane == 0) others.squares[warp][piece.row] += squares;
            }
            __half* const place = rotated + piece.row * stride_of(count) + piece.block * kBlock + lane % 16 * 8;
            if (piece.inside) *reinterpret_cast<Vector*>(place) = loaded[j];
        }
    }
    __syncwarp();
    for (int i = 0; i < pieces; ++i) {
        const Piece piece(i, pairs, share, p);
        const float up = __uint_as_float(power(others.largest[warp][piece.row], p.levels) << 23);
        __half* const row = rotated + piece.row * stride_of(count);
        const int first = __shfl_sync(0xffffffff, piece.block, 0), second = __shfl_sync(0xffffffff, piece.block, 16);
        __half* const place = row + (piece.inside ? piece.block : first) * kBlock + lane % 16 * 8;
        if (piece.inside) {
            const Vector values = *reinterpret_cast<const Vector*>(place);
            const ptx::uint32 sign = piece.there ? signs[piece.at / 8] : 0;
            Vector weight;
            if (norm != nullptr) weight = load_vector(norm + piece.at, piece.there);
            ptx::uint32 packed[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float low = to_float(values.element[2 * e]), high = to_float(values.element[2 * e + 1]);
                if (norm != nullptr) low *= to_float(weight.element[2 * e]), high *= to_float(weight.element[2 * e + 1]);
                packed[e] = negated(pack_pair<__half>(low * up, high * up), sign, e);
            }
            *reinterpret_cast<uint4*>(place) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
        __syncwarp();
        ptx::uint32 b[4];  // lane l addresses the l-th row of 8 columns
        ptx::ldmatrix_x4_trans(b, ptx::shared_address(place));
        __syncwarp();
        const bool both = second < count;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (h > 0 && !both) break;
            float v[4];
            rotation.apply(v, b[2 * h], b[2 * h + 1]);
            ptx::uint32* const to = reinterpret_cast<ptx::uint32*>(row + (h == 0 ? first : second) * kBlock) + lane;
            to[0] = pack_pair<__half>(v[0], v[1]);
            to[32] = pack_pair<__half>(v[2], v[3]);
        }
    }
    __syncwarp();
}

// Adds the product of 16 rows by 128 columns, of even and odd tiles apart: a product waits for the one before it that has the
// same sum. `codes` is the address of this lane's first word in a tile, and `next` that of the second one from there, in
// bytes; `x` are the addresses of this lane's rows of the fragments.
__device__ __forceinline__ void multiply(float (&sum)[2][kTokenTiles][4], ptx::uint32 codes, int next, int shift,
                                         const ptx::uint32 (&x)[kTokenTiles]) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        ptx::uint32 low[kTiles], high[kTiles];
        ptx::load_shared_16(low, codes + u * kWords * 16);
        ptx::load_shared_16(high, codes + next + u * kWords * 16);
#pragma unroll
        for (int c = 0; c < kTiles; c += 2) {
            ptx::uint32 b[kTokenTiles][4];
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t) ptx::ldmatrix_x4(b[t], x[t] + (u * kTiles + c) * 32);
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                ptx::uint32 a[4];
                numbers_of(a, __funnelshift_r(low[c + s], high[c + s], shift));
#pragma unroll
                for (int t = 0; t < kTokenTiles; ++t) ptx::mma_m16n8k16<__half>(sum[s][t], a, b[t][2 * s], b[t][2 * s + 1]);
            }
        }
    }
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// A warp that adds the sums of the others, and stores results. It has 8 rows of x, and without a gate every other tile. A lane
// has the rows g and g + 8 of a tile, and two neighbouring rows of x.
__device__ __forceinline__ void finish(int finisher, const Others& others, ptx::uint32 full, ptx::uint32 empty, bool normed,
                                       const float* scales, const ELEMENT* bias, const ELEMENT* residual, ELEMENT* out,
                                       float4* partial, int* counters, const Share& share, const Problem& p) {
    const int lane = threadIdx.x % 32, width = p.gate_tiles > 0 ? p.n / 2 : p.n;
    const int t = finisher % kTokenTiles, begin = finisher / kTokenTiles, step = 3 - share.halves;
    if (begin >= step) return;
    const int tokens[2] = {8 * t + lane % 4 * 2, 8 * t + lane % 4 * 2 + 1};
    float factor[2] = {1.0f, 1.0f};  // of RMSNorm
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
            const unsigned turn = index * share.halves + half, buffer = turn % 2;
            wait_for(full + 8 * buffer, turn / 2 % 2);
            if (normed && index == begin && half == 0) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float squares = 0.0f;
#pragma unroll
                    for (int w = 0; w < WARPS; ++w) squares += others.squares[w][tokens[e]];
                    factor[e] = rsqrtf(squares / p.k + p.eps);
                }
            }
            float4 sum = {};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum = plus(sum, others.sums[buffer][(w * kTokenTiles + t) * 32 + lane]);
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(empty + 8 * buffer);
            total[half][0] = sum.x * factor[0];
            total[half][1] = sum.y * factor[1];
            total[half][2] = sum.z * factor[0];
            total[half][3] = sum.w * factor[1];
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

extern "C" __global__ void __launch_bounds__(kThreads + 32 * kFinishers, TOKENS == 8 ? 2 : 1)
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
        for (int i = 0; i < 2; ++i) {
            ptx::mbarrier_init(full + 8 * i, WARPS);
            ptx::mbarrier_init(empty + 8 * i, kTokenTiles);
        }
    }
    // No kernel writes weights: the first stages are loaded before the previous kernel has ended.
    uint4* const ring = rings + warp * DEPTH * kStage;
    const ptx::uint32 filled = ptx::shared_address(others.filled[warp]);
    Cursor ahead(share, warp);
    if (warp < WARPS) {
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            for (int i = 0; i < DEPTH; ++i) ptx::mbarrier_init(filled + 8 * i, 1);
            ptx::mbarrier_fence_init();
        }
        __syncwarp();
#endif
#pragma unroll 1
        for (int i = 0; i < DEPTH; ++i) load(ring + i * kStage, filled + 8 * i, codes, ahead, share, p);
    }
    const Rotation rotation(p.levels);
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_wait();
#endif
    if (warp >= WARPS) {
        finish(warp - WARPS, others, full, empty, norm != nullptr, scales, bias, residual, out,
               reinterpret_cast<float4*>(partial), counters, share, p);
        return;
    }
    prepare(rotated, others, x, norm, signs, rotation, share, p);

    // Lanes 8 i to 8 i + 7 address the rows of matrix i of 8 columns. Rows beyond m repeat the last one and are not stored.
    ptx::uint32 rows[kTokenTiles];
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
        const int row = min(8 * t + lane % 8, p.m - 1);
        rows[t] = ptx::shared_address(rotated + row * stride_of(share.end - share.begin) + lane / 8 * 8);
    }
    float down[kTokenTiles][2];  // of the rows of x in this lane's sums
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const unsigned inverse = 254 - power(others.largest[warp][8 * t + lane % 4 * 2 + e], p.levels);
            down[t][e] = exp2f(-0.5f * p.levels) / kUnit * __uint_as_float(inverse << 23);
        }
    }
    const Window window(lane);
    const ptx::uint32 first_codes = ptx::shared_address(ring + window.first);
    const int next = 16 * (window.second - window.first);
    const ptx::uint32 sums = ptx::shared_address(others.sums) + (warp * kTokenTiles * 32 + lane) * 16;
    int slot = 0, parity = 0;  // of the stage that is multiplied
    unsigned turn = 0;
    for (int item = share.first; item < share.items; item += share.stride) {
        for (int half = 0; half < share.halves; ++half, ++turn) {
            float sum[2][kTokenTiles][4] = {};
            for (int block = warp * SPAN; block < share.end - share.begin; block += WARPS * SPAN) {
#if __CUDA_ARCH__ >= 900
                ptx::mbarrier_wait(filled + 8 * slot, parity);
#else
                ptx::cp_async_wait<DEPTH - 1>();
                __syncwarp();  // the copies of all lanes are there
#endif
#pragma unroll
                for (int i = 0; i < SPAN; ++i) {
                    if (i > 0 && block + i >= share.end - share.begin) break;
                    ptx::uint32 at[kTokenTiles];
#pragma unroll
                    for (int t = 0; t < kTokenTiles; ++t) at[t] = rows[t] + (block + i) * kBlock * 2;
                    multiply(sum, first_codes + (slot * kStage + i * kVectors) * 16, next, window.shift, at);
                }
                __syncwarp();  // all lanes have read the stage
                load(ring + slot * kStage, filled + 8 * slot, codes, ahead, share, p);
                if (++slot == DEPTH) slot = 0, parity ^= 1;
            }
            const unsigned buffer = turn % 2;
            wait_for(empty + 8 * buffer, turn / 2 % 2 ^ 1);
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t) {
                ptx::store_shared_16(sums + (buffer * kSums + t * 32) * 16, (sum[0][t][0] + sum[1][t][0]) * down[t][0],
                                     (sum[0][t][1] + sum[1][t][1]) * down[t][1], (sum[0][t][2] + sum[1][t][2]) * down[t][0],
                                     (sum[0][t][3] + sum[1][t][3]) * down[t][1]);
            }
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(full + 8 * buffer);
        }
    }
}

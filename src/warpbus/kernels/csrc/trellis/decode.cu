// out [m, n] = epilogue(norm(x) [m, k] weight [n, k]^T) for up to TOKENS rows of x, the weight a trellis of 2 or 3 bits.
//
// Macros
//   ELEMENT  __half or __nv_bfloat16: the type of x, norm, bias, residual and out
//   BITS     2 or 3: of a weight; kernels/ops/trellis_packed.py describes the layout
//   TOKENS   4, 8 or 16: the maximum number of rows of x
//   TILES    of 16 rows of the weight that a block multiplies at a time: 1, or 2, which share the fragments of x
//   WARPS    that multiply; one more copies codes, and one or two add sums
//   OTHER_BYTES  of shared memory that the host requests beside stages and x
//
// The weight is W = scale * Q R^T, where Q are the numbers of the trellis and R rotates columns (qtensor/trellis.py), so that
// W x = scale * Q (R^T x). Each warp computes R^T x for the columns that it multiplies (rotate.cuh); where `norm` is given, x is
// multiplied by it first, and the factor of RMSNorm joins the scales. R^T x becomes integers of 16 bits, of the size of the
// largest in its row and in the columns of the warp, and is multiplied as two columns of bytes, with Q exactly. Epilogue, in
// fp32: scale, bias; if `gate_tiles` > 0, silu(gate) * up, where the first half of the weight's rows gives the gate; `residual`.
//
// n is a multiple of 16, k of 32; x, norm and out are contiguous, and x and norm begin at multiples of 16 bytes. With several
// slices there is no norm.
//
// A block has the columns of one of `slices` slices and takes items of TILES tiles of 16 rows (with a gate, one of the gate and
// one of up) in turns with the other blocks of the slice. Its warps have disjoint blocks of 128 columns. One warp copies the
// codes, a stage of WARPS blocks of columns at a time, to a ring in shared memory; those that multiply compute the numbers in
// registers (decode.cuh); and others add their sums in a fixed order while the next item is multiplied. Where there are several
// slices, the sums of each go to `partial`, and the warp that finishes an item last adds them in the order of the slices.
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "trellis/decode.cuh"
#include "trellis/rotate.cuh"

constexpr int kThreads = 32 * WARPS;  // that multiply
constexpr int kFours = TOKENS / 4;  // of rows of x: products of a tile
constexpr int kFinishers = kFours < 2 ? 1 : 2;  // warps that add sums; with a third, a thread would have fewer registers
constexpr int kTile = WARPS * kVectors;  // vectors of 16 bytes of a tile in a stage
constexpr int kStage = TILES * kTile;
constexpr int kMostStages = 8;
constexpr int kAtOnce = TILES * kFours > 4 ? 1 : kUnits;  // units, whose codes take registers
constexpr int kTogether = 4;  // vectors of x that a thread loads before it looks at the first
constexpr int kSums = WARPS * kFours * 32;  // float2, of one tile
constexpr float kLargest = 127 * 256;  // of the integers of R^T x, whose upper byte, rounded, is signed

struct Problem {
    int m, n, k;
    int blocks;      // of 128 columns, in a row of the weight
    int levels;      // the rotation covers 2^levels columns
    int slices;
    int gate_tiles;  // tiles of rows of the gate, or 0; with a gate TILES is 2
    int stages;      // of the ring, up to kMostStages
    float eps;
};

struct Others {
    float2 sums[TILES][kSums];
    float squares[WARPS][TOKENS];        // of x, summed by warp and row
    // The bits of the largest magnitude of a row in the columns of a warp: of x, and of R^T x as it is rounded to float16.
    ptx::uint32 largest[WARPS][TOKENS], rotated[WARPS][TOKENS];
    ptx::uint64 filled[kMostStages], free[kMostStages];  // stages: they have codes; they have been read
    ptx::uint64 full, empty;                             // sums, likewise
};
static_assert(sizeof(Others) == OTHER_BYTES, "the host asks for other room beside stages and x");
static_assert(sizeof(ELEMENT) == sizeof(__half), "x and what it becomes take the same place");

using Vector = Vector16<ELEMENT>;

// Elements from one row of x in shared memory to the next: with it, no two rows of an 8x8 matrix share a bank.
__device__ __forceinline__ int stride_of(int blocks) { return blocks * kBlock + 8; }

// The part of this block: a slice of the columns, and every stride-th item.
struct Share {
    int slice, begin, end, first, stride, items;

    __device__ __forceinline__ explicit Share(const Problem& p)
        : slice(blockIdx.x % p.slices),
          begin(static_cast<int>(static_cast<long long>(p.blocks) * slice / p.slices)),
          end(static_cast<int>(static_cast<long long>(p.blocks) * (slice + 1) / p.slices)),
          first(blockIdx.x / p.slices),
          stride(gridDim.x / p.slices),
          items(p.gate_tiles > 0 ? p.gate_tiles : (p.n / 16 + TILES - 1) / TILES) {}
};

// The tile of rows that is number `which` of an item. A last item that lacks one has that before it again, for nothing.
__device__ __forceinline__ int tile_of(int item, int which, const Problem& p) {
    return p.gate_tiles > 0 ? item + which * p.gate_tiles : min(TILES * item + which, p.n / 16 - 1);
}

// A position in the ring: the stage, and the parity of its barriers' current phase.
struct Ring {
    int slot = 0, parity = 0;

    __device__ __forceinline__ void advance(const Problem& p) {
        if (++slot == p.stages) slot = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void wait_for(ptx::uint32 barrier, int parity) {
#if __CUDA_ARCH__ >= 900
    ptx::mbarrier_wait(barrier, parity);
#else
    while (!ptx::mbarrier_test(barrier, parity)) __nanosleep(32);
#endif
}

// The warp that copies codes. No kernel writes weights: it begins before the previous kernel has ended.
__device__ __forceinline__ void produce(uint4* stages, ptx::uint32 filled, ptx::uint32 free, const uint4* codes,
                                        const Share& share, const Problem& p) {
    const int lane = threadIdx.x % 32;
    Ring ring;
#if __CUDA_ARCH__ >= 900
    if (lane != 0) return;
#endif
    for (int item = share.first; item < share.items; item += share.stride) {
        for (int block = share.begin; block < share.end; block += WARPS, ring.advance(p)) {
            const ptx::uint32 own = filled + 8 * ring.slot;
            const int count = min(WARPS, share.end - block) * kVectors;
            wait_for(free + 8 * ring.slot, ring.parity ^ 1);
#if __CUDA_ARCH__ >= 900
            ptx::mbarrier_expect(own, TILES * 16 * count);
#endif
#pragma unroll
            for (int r = 0; r < TILES; ++r) {
                const uint4* const from = codes + (static_cast<long long>(tile_of(item, r, p)) * p.blocks + block) * kVectors;
                const ptx::uint32 to = ptx::shared_address(stages + ring.slot * kStage + r * kTile);
#if __CUDA_ARCH__ >= 900
                ptx::bulk_load(to, from, 16 * count, own);
#else
                for (int v = lane; v < count; v += 32) ptx::cp_async_16(to + 16 * v, from + v);
#endif
            }
#if __CUDA_ARCH__ < 900
            ptx::cp_async_arrive(own);
#endif
        }
    }
#if __CUDA_ARCH__ < 900
    ptx::cp_async_wait<0>();
#endif
}

__device__ __forceinline__ Vector load_vector(const ELEMENT* from, bool there) {
    return there ? *reinterpret_cast<const Vector*>(from) : Vector{};
}

// The biased exponent of the power of two by which a row is multiplied. Sums of 2^levels elements are then below 2^14.
__device__ __forceinline__ unsigned power(ptx::uint32 largest, int levels) {
    return min(max(267 - levels - static_cast<int>(largest >> 23), 1), 253);
}

// What R^T x is multiplied with to become integers, from the bits of its largest magnitude: 0 if all are 0.
__device__ __forceinline__ float integers_per_unit(ptx::uint32 largest) {
    return largest == 0 ? 0.0f : kLargest / __uint_as_float(largest);
}

// The integers next to two float16 numbers times `up`, each as 256 times its upper byte and its lower one, both signed. Added to
// 1.5 * 2^23, an integer is in the lower bits of a float; 128 more rounds the upper byte, and flips the sign of the lower one.
__device__ __forceinline__ ptx::uint32 bytes_of_pair(ptx::uint32 halves, float up) {
    constexpr float kShift = 12582912.0f + 128.0f;
    const float2 v = unpack_pair<__half>(halves);
    return __byte_perm(__float_as_uint(fmaf(v.x, up, kShift)), __float_as_uint(fmaf(v.y, up, kShift)), 0x5410) ^ 0x00800080u;
}

// A place in the columns that a warp multiplies, in all rows of x: two blocks, one for each half of the warp.
struct Piece {
    int row = 0, pair = 0;
    int block;           // of the slice
    int at;              // the first of a lane's 8 columns
    bool inside, there;  // the slice has that block, and x these columns

    __device__ __forceinline__ Piece(const Share& share, const Problem& p) { find(share, p); }
    __device__ __forceinline__ void find(const Share& share, const Problem& p) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = 2 * pair + lane / 16;
        block = own * WARPS + warp;
        at = (share.begin + block) * kBlock + lane % 16 * 8;
        inside = block < share.end - share.begin;
        there = inside && at < p.k;
    }
    __device__ __forceinline__ void advance(int pairs, const Share& share, const Problem& p) {
        if (++pair == pairs) pair = 0, ++row;
        find(share, p);
    }
};

// Writes R^T x to shared memory, for the columns that this warp multiplies, all in the same place: x as it is; when the largest
// element of a row is known, x in float16, and R^T x; when the largest of these is known, integers of 16 bits as two signed
// bytes, the lower one first. `signs` are those of the slice, in shared memory.
__device__ __forceinline__ void prepare(__half* rotated, Others& others, const ELEMENT* x, const ELEMENT* norm,
                                        const unsigned char* signs, const Rotation& rotation, const Share& share,
                                        const Problem& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int count = share.end - share.begin, own = (count - warp + WARPS - 1) / WARPS;
    const int pairs = (own + 1) / 2, pieces = p.m * pairs;
    if (lane < TOKENS) others.largest[warp][lane] = others.rotated[warp][lane] = 0, others.squares[warp][lane] = 0.0f;
    __syncwarp();
    Piece ahead(share, p), piece(share, p);
    for (int first = 0; first < pieces; first += kTogether) {
        Vector loaded[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            loaded[j] = load_vector(x + static_cast<long long>(ahead.row) * p.k + ahead.at, first + j < pieces && ahead.there);
            ahead.advance(pairs, share, p);
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            if (first + j >= pieces) break;
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
            piece.advance(pairs, share, p);
        }
    }
    __syncwarp();
    piece = Piece(share, p);
    for (int i = 0; i < pieces; ++i, piece.advance(pairs, share, p)) {
        const float up = __uint_as_float(power(others.largest[warp][piece.row], p.levels) << 23);
        __half* const row = rotated + piece.row * stride_of(count);
        const int first = __shfl_sync(0xffffffff, piece.block, 0), second = __shfl_sync(0xffffffff, piece.block, 16);
        __half* const place = row + (piece.inside ? piece.block : first) * kBlock + lane % 16 * 8;
        if (piece.inside) {
            const Vector values = *reinterpret_cast<const Vector*>(place);
            const ptx::uint32 sign = signs[piece.block * (kBlock / 8) + lane % 16];
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
        float largest = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (h > 0 && second >= count) break;
            float v[4];
            rotation.apply(v, b[2 * h], b[2 * h + 1]);
            ptx::uint32* const to = reinterpret_cast<ptx::uint32*>(row + (h == 0 ? first : second) * kBlock) + lane;
            to[0] = pack_pair<__half>(v[0], v[1]);
            to[32] = pack_pair<__half>(v[2], v[3]);
#pragma unroll
            for (int e = 0; e < 4; ++e) largest = fmaxf(largest, fabsf(v[e]));
        }
        const ptx::uint32 bits = __reduce_max_sync(0xffffffff, __float_as_uint(largest));
        if (lane == 0) others.rotated[warp][piece.row] = max(others.rotated[warp][piece.row], bits);
    }
    __syncwarp();
    piece = Piece(share, p);
    for (int i = 0; i < pieces; ++i, piece.advance(pairs, share, p)) {
        const float up = integers_per_unit(others.rotated[warp][piece.row]);
        if (!piece.inside) continue;
        uint4* const place = reinterpret_cast<uint4*>(rotated + piece.row * stride_of(count) + piece.block * kBlock) + lane % 16;
        const uint4 halves = *place;
        *place = make_uint4(bytes_of_pair(halves.x, up), bytes_of_pair(halves.y, up), bytes_of_pair(halves.z, up),
                            bytes_of_pair(halves.w, up));
    }
    __syncwarp();
}

// Adds the products of 16 rows by 128 columns of each tile. `codes` is the address of this lane's first word in a tile, and
// `next` that of the second one from there, in bytes; `x` are the addresses of this lane's rows of the fragments, whose columns
// 2 i and 2 i + 1 are the upper and the lower bytes of a row of x; `chosen` selects this lane's.
__device__ __forceinline__ void multiply(int (&sum)[TILES][kFours][4], ptx::uint32 codes, int next, int shift,
                                         const ptx::uint32 (&x)[kFours], ptx::uint32 chosen) {
#pragma unroll kAtOnce
    for (int u = 0; u < kUnits; ++u) {
        ptx::uint32 low[TILES][kTiles], high[TILES][kTiles];
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
            ptx::load_shared_16(low[r], codes + (r * kTile + u * kWords) * 16);
            ptx::load_shared_16(high[r], codes + next + (r * kTile + u * kWords) * 16);
        }
#pragma unroll
        for (int c = 0; c < kTiles; c += 2) {
            ptx::uint32 b[kFours][4];
#pragma unroll
            for (int t = 0; t < kFours; ++t) {
                ptx::ldmatrix_x4(b[t], x[t] + (u * kTiles + c) * 32);
#pragma unroll
                for (int i = 0; i < 4; ++i) b[t][i] = __byte_perm(b[t][i], 0, chosen);
            }
#pragma unroll
            for (int s = 0; s < 2; ++s) {
#pragma unroll
                for (int r = 0; r < TILES; ++r) {
                    ptx::uint32 a[4];
                    bytes_of(a, __funnelshift_r(low[r][c + s], high[r][c + s], shift));
#pragma unroll
                    for (int t = 0; t < kFours; ++t) ptx::mma_m16n8k32(sum[r][t], a, b[t][2 * s], b[t][2 * s + 1]);
                }
            }
        }
    }
}

// Adds the sums of the warps for an item and 4 rows of x, and stores results. A lane has one of these, and the rows g and g + 8
// of each tile. `factor` is that of RMSNorm, which is computed if it is to be.
__device__ __forceinline__ void finish(int item, int parity, int four, float& factor, bool compute, const Others& others,
                                       ptx::uint32 full, ptx::uint32 empty, const float* scales, const ELEMENT* bias,
                                       const ELEMENT* residual, ELEMENT* out, float2* partial, int* counters,
                                       const Share& share, const Problem& p) {
    const int lane = threadIdx.x % 32, width = p.gate_tiles > 0 ? p.n / 2 : p.n, token = 4 * four + lane % 4;
    const bool there = token < p.m;
    // All that is read from global memory is on its way before the sums are there.
    int rows[TILES];  // of the weight: the first of this lane's two, which are 8 apart
    float scale[TILES][2], shift[TILES][2] = {}, rest[TILES][2] = {};
#pragma unroll
    for (int r = 0; r < TILES; ++r) {
        rows[r] = 16 * tile_of(item, r, p) + lane / 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            scale[r][h] = scales[rows[r] + 8 * h];
            if (bias != nullptr) shift[r][h] = to_float(bias[rows[r] + 8 * h]);
            if (residual == nullptr || !there || (r > 0 && p.gate_tiles > 0)) continue;
            rest[r][h] = to_float(residual[static_cast<long long>(token) * width + rows[r] + 8 * h]);
        }
    }
    wait_for(full, parity);
    if (compute) {
        float squares = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) squares += others.squares[w][token];
        factor = rsqrtf(squares / p.k + p.eps);
    }
    float2 total[TILES] = {};
#pragma unroll
    for (int r = 0; r < TILES; ++r) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float2 own = others.sums[r][(w * kFours + four) * 32 + lane];
            total[r].x += own.x;
            total[r].y += own.y;
        }
        total[r].x *= factor;
        total[r].y *= factor;
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(empty);
    if (p.slices > 1) {
        constexpr int kItem = TILES * kFours * 32;  // pairs
        float2* const all = partial + static_cast<long long>(item) * p.slices * kItem + four * 32 + lane;
#pragma unroll
        for (int r = 0; r < TILES; ++r) __stcg(all + share.slice * kItem + r * kFours * 32, total[r]);
        __threadfence();
        __syncwarp();
        int before = 0;
        if (lane == 0) before = ptx::add_acquire_release(counters + item * kFours + four, 1);
        if (__shfl_sync(0xffffffff, before, 0) != p.slices - 1) return;
        __threadfence();
        if (lane == 0) counters[item * kFours + four] = 0;
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
            total[r] = {};
            for (int s = 0; s < p.slices; ++s) {
                const float2 own = __ldcg(all + s * kItem + r * kFours * 32);
                total[r].x += own.x;
                total[r].y += own.y;
            }
        }
    }
    if (!there) return;
#pragma unroll
    for (int r = 0; r < TILES; ++r) {
        if (r > 0 && (p.gate_tiles > 0 || rows[r] == rows[0])) break;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float value = (h == 0 ? total[r].x : total[r].y) * scale[r][h] + shift[r][h];
            if (TILES > 1 && p.gate_tiles > 0) {
                constexpr int kUp = TILES - 1;
                value = activate(kSilu, value) * ((h == 0 ? total[kUp].x : total[kUp].y) * scale[kUp][h] + shift[kUp][h]);
            }
            out[static_cast<long long>(token) * width + rows[r] + 8 * h] = from_float<ELEMENT>(value + rest[r][h]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads + 32 * (1 + kFinishers), 1)
    trellis_decode(const uint4* codes, const float* scales, const unsigned char* signs, const ELEMENT* x, const ELEMENT* norm,
                   const ELEMENT* bias, const ELEMENT* residual, ELEMENT* out, float* partial, int* counters,
                   const Problem p) {
    // What is declared above, the stages, the rotated x, and the signs of its columns.
    extern __shared__ __align__(128) unsigned char memory[];
    Others& others = *reinterpret_cast<Others*>(memory);
    uint4* const stages = reinterpret_cast<uint4*>(memory + OTHER_BYTES);
    __half* const rotated = reinterpret_cast<__half*>(stages + p.stages * kStage);
    const ptx::uint32 filled = ptx::shared_address(others.filled), free = ptx::shared_address(others.free);
    const ptx::uint32 full = ptx::shared_address(&others.full), empty = ptx::shared_address(&others.empty);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Share share(p);
    const int count = share.end - share.begin, first_sign = share.begin * (kBlock / 8);
    unsigned char* const own_signs = reinterpret_cast<unsigned char*>(rotated + p.m * stride_of(count));

#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
#endif
    if (threadIdx.x == kThreads) {
        for (int i = 0; i < p.stages; ++i) {
#if __CUDA_ARCH__ >= 900
            ptx::mbarrier_init(filled + 8 * i, 1);
#else
            ptx::mbarrier_init(filled + 8 * i, 32);
#endif
            ptx::mbarrier_init(free + 8 * i, WARPS);
        }
        ptx::mbarrier_init(full, WARPS);
        ptx::mbarrier_init(empty, kFours);
#if __CUDA_ARCH__ >= 900
        ptx::mbarrier_fence_init();
#endif
    }
    __syncthreads();
    if (warp == WARPS) {
        produce(stages, filled, free, codes, share, p);
        return;
    }
    if (warp > WARPS) {
#if __CUDA_ARCH__ >= 900
        ptx::griddepcontrol_wait();
#endif
        float factors[kFours / kFinishers];
        for (float& factor : factors) factor = 1.0f;
        int parity = 0;
        for (int item = share.first; item < share.items; item += share.stride, parity ^= 1) {
#pragma unroll
            for (int i = 0; i < kFours / kFinishers; ++i) {
                finish(item, parity, i * kFinishers + warp - WARPS - 1, factors[i], norm != nullptr && item == share.first,
                       others, full, empty, scales, bias, residual, out, reinterpret_cast<float2*>(partial), counters, share, p);
            }
        }
        return;
    }
    // The signs of this warp's columns are read before x is there, to whose latency theirs would be added.
    for (int i = lane; i / 16 * WARPS + warp < count; i += 32) {
        const int at = (i / 16 * WARPS + warp) * (kBlock / 8) + i % 16;
        own_signs[at] = first_sign + at < p.k / 8 ? signs[first_sign + at] : 0;
    }
    const Rotation rotation(p.levels);
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_wait();
#endif
    prepare(rotated, others, x, norm, own_signs, rotation, share, p);

    // Lanes 8 i to 8 i + 7 address the rows of matrix i of 8 columns, of which a row of x has two. Rows beyond m repeat the last
    // one and are not stored.
    ptx::uint32 rows[kFours];
    float down[kFours];  // what this lane's sums of a row of x are multiplied with
#pragma unroll
    for (int t = 0; t < kFours; ++t) {
        const int row = min(4 * t + lane % 8 / 2, p.m - 1), own = 4 * t + lane % 4;
        rows[t] = ptx::shared_address(rotated + row * stride_of(count) + warp * kBlock + lane / 8 * 8);
        const float inverse = __uint_as_float((254 - power(others.largest[warp][own], p.levels)) << 23);
        down[t] = exp2f(-0.5f * p.levels) * kUnit / kLargest * __uint_as_float(others.rotated[warp][own]) * inverse;
    }
    const ptx::uint32 chosen = lane / 4 % 2 == 0 ? 0x3311 : 0x2200;
    const Window window(lane);
    const ptx::uint32 first_codes = ptx::shared_address(stages + warp * kVectors + window.first);
    const int next = 16 * (window.second - window.first);
    const ptx::uint32 sums = ptx::shared_address(others.sums[0] + warp * kFours * 32 + lane);
    Ring ring;
    int parity = 1;
    for (int item = share.first; item < share.items; item += share.stride, parity ^= 1) {
        int sum[TILES][kFours][4] = {};
        for (int first = 0; first < count; first += WARPS, ring.advance(p)) {
            wait_for(filled + 8 * ring.slot, ring.parity);
            if (first + warp < count) {
                ptx::uint32 at[kFours];
#pragma unroll
                for (int t = 0; t < kFours; ++t) at[t] = rows[t] + first * kBlock * 2;
                multiply(sum, first_codes + ring.slot * kStage * 16, next, window.shift, at, chosen);
            }
            __syncwarp();  // all lanes have read the stage
            if (lane == 0) ptx::mbarrier_arrive(free + 8 * ring.slot);
        }
        wait_for(empty, parity);
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
#pragma unroll
            for (int t = 0; t < kFours; ++t) {
                const int(&own)[4] = sum[r][t];
                ptx::store_shared_8(sums + (r * kSums + t * 32) * 8, fmaf(256.0f, own[0], own[1]) * down[t],
                                    fmaf(256.0f, own[2], own[3]) * down[t]);
            }
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(full);
    }
}

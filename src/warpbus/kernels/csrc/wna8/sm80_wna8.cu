// out [m, n] = x_scale [m] * (x [m, k] weight [n, k]^T) + bias [n] by mma.sync m16n8k32, fed by cp.async: 8-bit x, weights of few
// bits in groups, on the GPUs that have no wgmma.
//
// Macros
//   ELEMENT  __half or __nv_bfloat16: the type of scales, zero points, bias and out
//   SUM      int: x is int8 (sm_80), BITS = 2, 3, 4, or 8 with SYMMETRIC = 1; float: x is e4m3 (sm_89), BITS = 2, 3 or 4
//   BITS     of a packed code
//   COLUMNS  that are summed before a scale is applied: 64 for groups of 64, 128 for larger ones
//   SYMMETRIC  1: the zero point is the middle code, and `zeros` is not read
//   TILE_M, TILE_N, WARP_M, WARP_N  rows of x by rows of the weight that a block and a warp compute
//   TILE_K, STAGES  columns of a stage in shared memory, a multiple of COLUMNS; RESIDENT: blocks that share the registers of a
//            multiprocessor
// The weight is packed as for wna16 (kernels/ops/packed.py). x is that of wna8/quantize.cu, whose order of columns is that of
// the bytes of a packed word. Column c belongs to group c >> group_shift of `groups`. Any m, n >= 1; k is a multiple of 16. bias
// may be null; out is contiguous.
//
// The kernel computes out^T = weight x^T, so that codes are operand A and never move between lanes. Two masks turn a word, the
// codes of 16 columns, into two registers of it. A result is the sum over groups of scale * (sum of (code - zero) * x):
//
// - int8: sums of a group are exact. A symmetric code is moved to the upper bits of its byte, and its highest bit flipped:
//   2^(8 - BITS) times code - zero. Otherwise zero is subtracted from all bytes at once. Sums begin with the bits of the float
//   1.5 * 2^23, whose unit in the last place is 1; so they are read as floats, without a conversion.
// - e4m3: a byte 0000cccc is the number code * 2^-9, exactly. The zero points' terms, scale * zero * sum of x, are what the sums
//   begin with: a product in tf32 with `sums`, those of quantize.cu per COLUMNS columns. Tensor cores add e4m3 products with
//   about 14 bits, and here only those of COLUMNS columns.
//
// A warp multiplies 16 rows of the weight at a time with all its rows of x, and applies their scales, one fma per result, while
// the next 16 rows are multiplied; those of the last 16 rows in the next stage.
//
// A block sums k_per_split of k, a multiple of TILE_K. If that is less than k, gridDim.y blocks share a tile, and each stores
// float32 sums into partial [gridDim.y, m, n rounded up to 8] for gemm/split_k_reduce.cu.
//
// Launch: grid (tiles, splits), kThreads threads, STAGES * kStageBytes of dynamic shared memory, at most the 99 KB of sm_86 and
// sm_89. On sm_90 and later the kernel may start before the previous one has ended: it loads weights before it waits.
#include "common/byte_tiles.cuh"
#include "common/schedule.cuh"
#include "common/transposed_rows.cuh"
#include "gemm/epilogue.cuh"
#include "wna16/dequantize.cuh"

constexpr bool kInteger = static_cast<SUM>(0.5f) == 0;
constexpr int kWarpsM = TILE_M / WARP_M;
constexpr int kThreads = TILE_N / WARP_N * kWarpsM * 32;
constexpr int kBlocksN = WARP_N / 16, kBlocksM = WARP_M / 8;  // products along a warp's rows of the weight and of x
constexpr int kSteps = COLUMNS / 32;                          // products along the columns of a sum
constexpr int kUnits = TILE_K / COLUMNS;                      // sums along a stage
constexpr int kPairs = TILE_K / 2;
constexpr unsigned kGroup = 8;  // tiles of x before the next rows of the weight

constexpr int kRowTiles = TILE_N / 16;            // packed tiles down a stage
constexpr int kColumnTiles = TILE_K / 64;         // and along it
constexpr int kChunksOfTile = 8 * BITS;           // 16-byte chunks of codes per 16 rows and 64 columns
constexpr int kCodeChunks = kRowTiles * kColumnTiles * kChunksOfTile;
constexpr int kScaleChunks = kRowTiles * kUnits * 2;
constexpr bool kZeros = kInteger && !SYMMETRIC;  // in the stages

// Byte offsets of the parts of a stage.
constexpr int kCodesAt = TILE_M * TILE_K;
constexpr int kScalesAt = kCodesAt + kCodeChunks * 16;
constexpr int kZerosAt = kScalesAt + kScaleChunks * 16;
constexpr int kStageBytes = kZerosAt + (kZeros ? kScaleChunks * 16 : 0);

// What a unit of the products stands for: codes are multiples of it.
constexpr float kUnitOfCodes = !kInteger ? 0x1p-9f : SYMMETRIC ? 1 << (8 - BITS) : 1;
constexpr float kIntegers = 12582912.0f;  // 1.5 * 2^23
constexpr SUM kStart = kInteger ? 0x4b400000 : 0;

static_assert(TILE_K % COLUMNS == 0 && COLUMNS % 64 == 0, "a stage has whole sums of whole packed tiles");
static_assert(WARP_M % 16 == 0, "ldmatrix reads 16 rows of x");
static_assert(kBlocksN % 2 == 0, "two sets of sums take turns");
static_assert(BITS <= 4 || (kInteger && SYMMETRIC), "wider codes minus zero points do not fit into a byte");
static_assert(2 * kScaleChunks <= kThreads, "a thread copies one chunk of scales or of zero points");
static_assert(STAGES * kStageBytes == SHARED_BYTES, "the host asks for other shared memory");
static_assert(SHARED_BYTES <= 99 * 1024, "sm_86 and sm_89 give 99 KB to a block");
static_assert(kThreads / 32 * 8 * (WARP_N + 4) * 4 <= SHARED_BYTES, "the epilogue takes the place of the stages");

struct Weight {
    const uint4* codes;
    const ELEMENT* scales;
    const ELEMENT* zeros;
    int row_tiles, k_tiles, groups, group_shift;
};

// A thread's share of copying the codes, scales and zero points of a block's rows, stage by stage. Beyond the last tile of
// rows, it copies the last one again, whose results are not stored; beyond the last column codes are zeros, like x.
class WeightCopy {
    static constexpr int kChunksOfRow = kColumnTiles * kChunksOfTile;
    static constexpr int kPasses = (kCodeChunks + kThreads - 1) / kThreads;

public:
    // The first stage begins with `column`, a multiple of TILE_K.
    __device__ __forceinline__ WeightCopy(const Weight& weight, int row_tile0, int column) : weight_(weight), column_(column) {
        const int last = weight.row_tiles - 1;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int chunk = threadIdx.x + pass * kThreads;
            const int tile = min(row_tile0 + chunk / kChunksOfRow, last);
            codes_[pass] = (tile * weight.k_tiles + column / 64) * kChunksOfTile + chunk % kChunksOfRow;
        }
        const int chunk = threadIdx.x;
        const int tile = min(row_tile0 + chunk % kScaleChunks / (2 * kUnits), last);
        scales_ = (chunk < kScaleChunks ? weight.scales : weight.zeros) + static_cast<long long>(tile) * weight.groups * 16 +
                  chunk % 2 * kChunk;
    }

    // Starts copying into a stage, and advances to the next columns.
    __device__ __forceinline__ void next(unsigned char* stage) {
        const int tiles_left = weight_.k_tiles - column_ / 64;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int chunk = threadIdx.x + pass * kThreads;
            if (kCodeChunks % kThreads != 0 && chunk >= kCodeChunks) break;
            // cp.async needs a valid address even if it reads nothing.
            const bool inside = chunk % kChunksOfRow / kChunksOfTile < tiles_left;
            const uint4* source = weight_.codes + static_cast<unsigned>(inside ? codes_[pass] : 0);
            ptx::cp_async_16(ptx::shared_address(stage + kCodesAt + chunk * 16), source, inside ? 16 : 0);
            codes_[pass] += kChunksOfRow;
        }
        const int chunk = threadIdx.x;
        if (chunk < (kZeros ? 2 : 1) * kScaleChunks) {
            const int group = min((column_ + chunk / 2 % kUnits * COLUMNS) >> weight_.group_shift, weight_.groups - 1);
            ptx::cp_async_16(ptx::shared_address(stage + kScalesAt + chunk * 16), scales_ + group * 16);
        }
        column_ += TILE_K;
    }

private:
    const Weight& weight_;
    const ELEMENT* scales_;
    int codes_[kPasses];  // chunks from the beginning: a matrix has less than 32 GB of codes
    int column_;
};

// bits & mask ^ flipped in one instruction; see join_bits.
__device__ __forceinline__ ptx::uint32 flip_bits(ptx::uint32 bits, ptx::uint32 mask, ptx::uint32 flipped) {
    ptx::uint32 joined;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(joined) : "r"(bits), "r"(mask), "r"(flipped));
    return joined;
}

// 128 minus the zero point of a row, in each byte.
__device__ __forceinline__ ptx::uint32 spread_zero(float zero) {
    return 0x80808080u - __byte_perm(__float_as_uint(zero + 0x1p23f), 0, 0);
}

// Operand A of the columns of a sum for the 16 rows of a packed tile, from the codes at `source`; `zeros` are those of the
// lane's rows.
__device__ __forceinline__ void read_operand(ptx::uint32 (&a)[kSteps][4], const unsigned char* source, ptx::uint32 zeros) {
    constexpr ptx::uint32 kBytes = 0x01010101u, kHighest = 0x80u * kBytes;
    const int lane = threadIdx.x % 32;
    [[maybe_unused]] ptx::uint32 upper_zero = 0, lower_zero = 0;
    if constexpr (kZeros) {
        const float2 zero = unpack_pair<ELEMENT>(zeros);
        upper_zero = spread_zero(zero.x), lower_zero = spread_zero(zero.y);
    }
#pragma unroll
    for (int i = 0; i < COLUMNS / 64; ++i) {
        const ptx::uint32* load = reinterpret_cast<const ptx::uint32*>(source) + i * (kChunksOfTile * 4);
        ptx::uint32 words[BITS];
        if constexpr (BITS == 8) {
            const uint4 first = reinterpret_cast<const uint4*>(load)[lane];
            const uint4 second = reinterpret_cast<const uint4*>(load)[32 + lane];
            words[0] = first.x, words[1] = first.y, words[2] = first.z, words[3] = first.w;
            words[4] = second.x, words[5] = second.y, words[6] = second.z, words[7] = second.w;
        } else {
            read_codes(words, load, lane);
        }
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            ptx::uint32& upper = a[2 * i + s / 2][s % 2 * 2];
            ptx::uint32& lower = a[2 * i + s / 2][s % 2 * 2 + 1];
            if constexpr (BITS == 8) {
                upper = __byte_perm(words[2 * s], words[2 * s + 1], 0x6240) ^ kHighest;
                lower = __byte_perm(words[2 * s], words[2 * s + 1], 0x7351) ^ kHighest;
            } else {
                constexpr ptx::uint32 kMask = ((1 << BITS) - 1) * kBytes;
                constexpr int kToUpper = 8 - BITS;  // bits of the byte
                const ptx::uint32 word = word_of_step(words, s);
                if constexpr (kInteger && SYMMETRIC) {
                    upper = flip_bits(word << kToUpper, kMask << kToUpper, kHighest);
                    lower = flip_bits(word << (BITS <= 4 ? kToUpper - BITS : 0), kMask << kToUpper, kHighest);
                } else if constexpr (kInteger) {
                    upper = ((word & kMask) + upper_zero) ^ kHighest;
                    lower = ((word >> BITS & kMask) + lower_zero) ^ kHighest;
                } else {
                    upper = word & kMask;
                    lower = word >> BITS & kMask;
                }
            }
        }
    }
}

using Totals = float[kBlocksN][kBlocksM][4];

__device__ __forceinline__ float value_of(float sum) { return sum; }
__device__ __forceinline__ float value_of(int sum) { return __int_as_float(sum) - kIntegers; }

__device__ __forceinline__ void add(float (&totals)[kBlocksM][4], const SUM (&sums)[kBlocksM][4], ptx::uint32 scales) {
    const float2 scale = unpack_pair<ELEMENT>(scales);
#pragma unroll
    for (int i = 0; i < kBlocksM * 4; ++i) {
        float& total = totals[i / 4][i % 4];
        total = fmaf(value_of(sums[i / 4][i % 4]), i & 2 ? scale.y : scale.x, total);
    }
}

// Sums of 16 rows of the weight that have no scale yet: two sets take turns.
struct Unscaled {
    SUM sums[2][kBlocksM][4];
    ptx::uint32 scales[2];
};

// Multiplies sum number `unit` of a stage for a warp's part of the tile, and adds all but the last rows' sums, which stay in
// the second set of `unscaled`; those that were there are added first.
__device__ __forceinline__ void multiply_unit(Totals& totals, Unscaled& unscaled, const unsigned char* stage, int warp_row,
                                              int warp_tile, int unit) {
    ptx::uint32 x[kSteps][kBlocksM / 2][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int j = 0; j < kBlocksM / 2; ++j) {
            load_block<kPairs, Second::right, false>(x[step][j], reinterpret_cast<const Pair*>(stage), warp_row + j * 16,
                                                     unit * (COLUMNS / 2) + step * 16);
        }
    }
    auto& [sums, scales] = unscaled;
#pragma unroll
    for (int i = 0; i < kBlocksN; ++i) {
        const int tile = warp_tile + i;
        const int pair = (tile * kUnits + unit) * 32 + threadIdx.x % 32 / 4 * 4;
        const int codes = (tile * kColumnTiles + unit * (COLUMNS / 64)) * (kChunksOfTile * 16);
        ptx::uint32 a[kSteps][4], zeros = 0;
        if constexpr (kZeros) zeros = *reinterpret_cast<const ptx::uint32*>(stage + kZerosAt + pair);
        read_operand(a, stage + kCodesAt + codes, zeros);
        scales[i % 2] = *reinterpret_cast<const ptx::uint32*>(stage + kScalesAt + pair);
#pragma unroll
        for (int j = 0; j < kBlocksM * 4; ++j) sums[i % 2][j / 4][j % 4] = kStart;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int j = 0; j < kBlocksM; ++j) {
                const ptx::uint32(&b)[4] = x[step][j / 2];
                ptx::mma_m16n8k32(sums[i % 2][j], a[step], b[j % 2 * 2], b[j % 2 * 2 + 1]);
            }
        }
        add(totals[(i + kBlocksN - 1) % kBlocksN], sums[(i + 1) % 2], scales[(i + 1) % 2]);
    }
}

// What the zero points add, for the sums of x from `first` to `end`: scale * zero * sum. `sums` has the sign and, in a symmetric
// scheme, the zero point. `row` and `row_tile` are the warp's first row of x and first packed tile.
__device__ __forceinline__ void add_zero_points(Totals& totals, const Weight& weight, const float* sums, int stride, int m,
                                                int row, int row_tile, int first, int end) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (; first < end; first += 8) {
        ptx::uint32 b[kBlocksM][2];
#pragma unroll
        for (int j = 0; j < kBlocksM; ++j) {
            const float* of_row = sums + static_cast<long long>(min(row + j * 8 + lane / 4, m - 1)) * stride;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int sum = first + lane % 4 + 4 * half;
                b[j][half] = sum < end ? __float_as_uint(of_row[sum]) : 0;
            }
        }
#pragma unroll
        for (int i = 0; i < kBlocksN; ++i) {
            const long long tile = min(row_tile + i, weight.row_tiles - 1);
            ptx::uint32 a[4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int sum = first + lane % 4 + 4 * half;
                float2 value = make_float2(0.0f, 0.0f);
                if (sum < end) {
                    const int group = sum * COLUMNS >> weight.group_shift;
                    const long long pair = (tile * weight.groups + group) * 8 + lane / 4;
                    value = unpack_pair<ELEMENT>(reinterpret_cast<const ptx::uint32*>(weight.scales)[pair]);
                    if (!SYMMETRIC) {
                        const float2 zero = unpack_pair<ELEMENT>(reinterpret_cast<const ptx::uint32*>(weight.zeros)[pair]);
                        value.x *= zero.x, value.y *= zero.y;
                    }
                }
                a[2 * half] = ptx::round_tf32(value.x);
                a[2 * half + 1] = ptx::round_tf32(value.y);
            }
#pragma unroll
            for (int j = 0; j < kBlocksM; ++j) ptx::mma_m16n8k8(totals[i][j], a, b[j][0], b[j][1]);
        }
    }
}

// The previous kernel may write x, its scales and sums, and bias: no __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT)
    sm80_wna8(const unsigned char* x, const float* x_scale, const float* sums, const uint4* __restrict__ codes,
              const ELEMENT* __restrict__ scales, const ELEMENT* __restrict__ zeros, const ELEMENT* bias,
              ELEMENT* __restrict__ out, float* __restrict__ partial, int m, int n, int k, int groups, int group_shift,
              int sums_stride, int k_per_split) {
    alignas(128) extern __shared__ unsigned char shared[];

    const auto place = tile_place(blockIdx.x, (m + TILE_M - 1u) / TILE_M, (n + TILE_N - 1u) / TILE_N, kGroup);
    const Weight weight = {codes, scales, zeros, (n + 15) / 16, (k + 63) / 64, groups, group_shift};
    const int row0 = place.row * TILE_M;
    const int column0 = place.column * TILE_N;
    const int warp = threadIdx.x / 32;
    const int warp_row = warp % kWarpsM * WARP_M;
    const int warp_column = warp / kWarpsM * WARP_N;

    const int begin = blockIdx.y * k_per_split;
    const int end = min(k - begin, k_per_split) + begin;
    const int tiles = (end - begin + TILE_K - 1) / TILE_K;
    TileCopy<TILE_M, TILE_K, kThreads> copy_x(x, k, m, row0, begin, end);
    WeightCopy copy_weight(weight, column0 / 16, begin);

#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
#endif
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; ++tile) {
        if (tile < tiles) copy_weight.next(shared + tile * kStageBytes);
    }
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_wait();
#endif
    // One group of copies per tile, an empty one beyond the end, so that "all but the last STAGES - 2 groups" always means "the
    // next tile has arrived". The first group also has the codes of the other stages.
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; ++tile) {
        if (tile < tiles) copy_x.next(reinterpret_cast<Pair*>(shared + tile * kStageBytes));
        ptx::cp_async_commit();
    }

    Totals totals = {};
    if constexpr (!kInteger) {
        add_zero_points(totals, weight, sums, sums_stride, m, row0 + warp_row, (column0 + warp_column) / 16, begin / COLUMNS,
                        (end + COLUMNS - 1) / COLUMNS);
    }
    Unscaled unscaled = {};
#pragma unroll
    for (int i = 0; i < kBlocksM * 4; ++i) unscaled.sums[1][i / 4][i % 4] = kStart;
    int current = 0, to_fill = STAGES - 1;
    const auto fill = [&](int tile) {
        if (tile + STAGES - 1 < tiles) {
            unsigned char* filled = shared + to_fill * kStageBytes;
            copy_weight.next(filled);
            copy_x.next(reinterpret_cast<Pair*>(filled));
            to_fill = to_fill + 1 == STAGES ? 0 : to_fill + 1;
        }
        ptx::cp_async_commit();
    };
    // Two warps share a scheduler, where a block has eight: while one issues copies, the other one multiplies.
    const bool fills_first = warp / 4 % 2 == 0;
    for (int tile = 0; tile < tiles; ++tile) {
        ptx::cp_async_wait<STAGES - 2>();
        __syncthreads();  // this tile is complete, and the one before it has been read by all
        if (fills_first) fill(tile);
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            multiply_unit(totals, unscaled, shared + current * kStageBytes, warp_row, warp_column / 16, unit);
        }
        if (!fills_first) fill(tile);
        current = current + 1 == STAGES ? 0 : current + 1;
    }
    add(totals[kBlocksN - 1], unscaled.sums[1], unscaled.scales[1]);
    __syncthreads();  // all threads have read the stages; the epilogue reuses them

    float* patch = reinterpret_cast<float*>(shared) + warp * 8 * (WARP_N + 4);
    const int first_row = row0 + warp_row;
    const int lane_column = column0 + warp_column + threadIdx.x % (WARP_N / 8) * 8;
    const auto scaled = [&](float(&values)[8], int row) {
        const float scale = x_scale[row] * (1 / kUnitOfCodes);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] *= scale;
    };
    if (gridDim.y > 1) {
        const long long stride = (n + 7) / 8 * 8;
        float* slice = partial + blockIdx.y * (m * stride) + lane_column;
        finish_rows(totals, patch, [&](float(&values)[8], int row) {
            if (first_row + row >= m || lane_column >= n) return;
            scaled(values, first_row + row);
            float4* target = reinterpret_cast<float4*>(slice + (first_row + row) * stride);
            target[0] = make_float4(values[0], values[1], values[2], values[3]);
            target[1] = make_float4(values[4], values[5], values[6], values[7]);
        });
    } else {
        const Epilogue<ELEMENT> epilogue(bias, kNone, out, n, n, lane_column);
        finish_rows(totals, patch, [&](float(&values)[8], int row) {
            if (first_row + row >= m || lane_column >= n) return;
            scaled(values, first_row + row);
            epilogue.store(values, first_row + row);
        });
    }
}

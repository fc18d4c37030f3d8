// out [m, n] = x [m, k] weight [n, k]^T + bias [n] for many rows of x: quantized weights, 16-bit activations, on the tensor
// cores of sm_80 and later by mma.sync.
//
// Shapes: any m, n >= 1 and k >= 0. ELEMENT = __half or __nv_bfloat16: the type of x, of scales, zero points, bias and out.
// Rows of x are x_stride elements apart, those of out out_stride; columns are contiguous. x and its rows start at multiples
// of 16 bytes; out is stored in units of 16 bytes if its alignment allows, otherwise element by element. `codes`, `scales`
// and `zeros` have the layout of kernels/ops/packed.py, with codes of BITS = 2, 3, 4 or 8 bits; zeros is null if all zero
// points are `middle`. Column c belongs to group c >> group_shift of `groups`; a group has 32 columns or more. bias may be
// null.
//
// Each weight becomes (code - zero) * scale, rounded to ELEMENT as QTensor.dequantize does; products are summed in float32.
// The kernel computes out^T = weight x^T: a dequantized register is a fragment of operand A, whose rows are rows of the
// weight, and ldmatrix reads the rows of x as fragments of B.
//
// Variants: TILE_N rows of the weight by TILE_M rows of x per block, of which a warp computes WARP_N by WARP_M; RESIDENT
// blocks share the registers of a multiprocessor. A stage in shared memory has 64 columns of both operands; kStages - 1
// stages are in flight while one is multiplied. A block sums k_per_split of k (a multiple of 64). If that is less than k,
// gridDim.y blocks share a tile, and each stores float32 sums into partial [gridDim.y, m, n rounded up to 8], which
// gemm/split_k_reduce.cu adds up in a fixed order.
//
// EXPERTS = 1 is a mixture of experts: rows of x are sorted by expert and multiplied by the expert's weights, which are
// contiguous, from number `resident` on in pinned host memory (wna16/experts.cuh). tiles[i] = {expert, first row, rows, 0}
// has up to TILE_M rows; there are tiles[-1].x tiles. Blocks without a tile end at once; k is not split and there is no bias.
//
// Launch: grid (tiles, splits), kThreads threads, kStages * kStageBytes of dynamic shared memory; no configuration needs more
// than the 99 KB per block of sm_86 and sm_89. On sm_90 and later the kernel may start before the previous one has ended: it
// loads weights before it waits.
#include "common/schedule.cuh"
#include "common/tile.cuh"
#include "common/transposed_rows.cuh"
#include "gemm/epilogue.cuh"
#include "wna16/dequantize.cuh"

using Packed = Codes<ELEMENT, BITS>;

constexpr int kTileM = TILE_M, kTileN = TILE_N, kTileK = 64;
constexpr int kWarpM = WARP_M, kWarpN = WARP_N;
constexpr int kStages = 3;
[[maybe_unused]] constexpr unsigned kGroup = 8;  // tiles of x before the next rows of the weight

constexpr int kWarpsM = kTileM / kWarpM;
constexpr int kThreads = kTileN / kWarpN * kWarpsM * 32;
constexpr int kBlocksN = kWarpN / 16;  // mma products along a warp's rows of the weight
constexpr int kBlocksM = kWarpM / 8;   // mma products along its rows of x
constexpr int kSteps = kTileK / 16;    // mma products along the columns of a stage

constexpr int kRowTiles = kTileN / 16;          // packed tiles per stage
constexpr int kLoads = Packed::kLoads, kLoadWords = Packed::kLoadWords, kStepsOfLoad = Packed::kLoadSteps;
constexpr int kChunksOfTile = 8 * BITS;  // 16-byte chunks of codes per 16 rows and 64 columns
constexpr int kCodeChunks = kRowTiles * kChunksOfTile;  // per stage
// A stage has a scale for every 32 columns, the smallest group: two per row.
constexpr int kHalves = 2;
constexpr int kStepsOfHalf = kSteps / kHalves;
constexpr int kScaleChunks = kRowTiles * kHalves * 2;

// Byte offsets of the parts of a stage.
constexpr int kCodesAt = kTileM * kTileK * 2;
constexpr int kScalesAt = kCodesAt + kCodeChunks * 16;
constexpr int kZerosAt = kScalesAt + kScaleChunks * 16;
constexpr int kStageBytes = kZerosAt + kScaleChunks * 16;

static_assert(kSteps % 2 == 0 && kBlocksN % 2 == 0, "two sets of fragments take turns");
static_assert(kWarpM % 16 == 0 && (kWarpN == 32 || kWarpN == 64), "the epilogue gives a row of out to 4 or 8 lanes");
static_assert(2 * kScaleChunks <= kThreads, "a thread copies one chunk of scales or of zero points");
static_assert(kStages * kStageBytes == SHARED_BYTES, "the host asks for other shared memory");
static_assert(kStages * kStageBytes <= 99 * 1024, "sm_86 and sm_89 give 99 KB to a block");

struct Weight {
    const uint4* codes;
    const ELEMENT* scales;
    const ELEMENT* zeros;  // or null
    int row_tiles, k_tiles, groups, group_shift;
};

// Starts copying the codes, scales and zero points of a block's rows and of one tile of columns into a stage. Beyond the last
// tile of rows, it copies the last one again; the results are not stored.
__device__ __forceinline__ void copy_weight(unsigned char* stage, const Weight& weight, int row_tile0, int k_tile) {
    const int last = weight.row_tiles - 1;
#pragma unroll
    for (int pass = 0; pass < (kCodeChunks + kThreads - 1) / kThreads; ++pass) {
        const int chunk = threadIdx.x + pass * kThreads;
        if (kCodeChunks % kThreads != 0 && chunk >= kCodeChunks) break;
        const int tile = min(row_tile0 + chunk / kChunksOfTile, last);
        const long long place = static_cast<long long>(tile) * weight.k_tiles + k_tile;
        const uint4* source = weight.codes + place * kChunksOfTile + chunk % kChunksOfTile;
        ptx::cp_async_16(ptx::shared_address(stage + kCodesAt + chunk * 16), source);
    }
    const int chunk = threadIdx.x;
    const ELEMENT* values = chunk < kScaleChunks ? weight.scales : weight.zeros;
    if (chunk < 2 * kScaleChunks && values != nullptr) {
        const int tile = min(row_tile0 + chunk % kScaleChunks / 4, last);
        const int group = (k_tile * kTileK + chunk / 2 % 2 * (kTileK / kHalves)) >> weight.group_shift;
        const long long place = static_cast<long long>(tile) * weight.groups + group;
        const ELEMENT* source = values + place * 16 + chunk % 2 * kChunk;
        ptx::cp_async_16(ptx::shared_address(stage + kScalesAt + chunk * 16), source);
    }
}

// A thread's share of copying tiles of x: one column of chunks, every kRowStep-th row. Beyond the last row, it copies the
// last one again; the results are not stored.
class InputCopy {
    static constexpr int kChunks = kTileK / kChunk;
    static constexpr int kRowStep = kThreads / kChunks;
    static_assert(kTileM % kRowStep == 0 && kRowStep % 8 == 0, "a thread has one chunk_key");

public:
    __device__ InputCopy(const ELEMENT* x, int stride, int m, int k, int row0, int column0) : x_(x), stride_(stride) {
        const int row = threadIdx.x / kChunks;
        const int chunk = threadIdx.x % kChunks;
        const int first = min(row0 + row, m - 1);
        source_ = x + static_cast<long long>(first) * stride + column0 + chunk * kChunk;
        rows_below_ = m - 1 - first;
        columns_left_ = k - column0 - chunk * kChunk;
        target_ = chunk_offset<kTileK>(row, chunk);
    }

    // Starts copying a tile into a stage, with zeros beyond the columns of x, and advances to the next columns.
    __device__ __forceinline__ void next(unsigned char* stage) {
        ELEMENT* target = reinterpret_cast<ELEMENT*>(stage) + target_;
        const int valid = max(0, min(columns_left_, kChunk)) * static_cast<int>(sizeof(ELEMENT));
        // cp.async needs a valid address even if it reads nothing.
        const ELEMENT* source = valid > 0 ? source_ : x_;
        const int stride = valid > 0 ? stride_ : 0;
#pragma unroll
        for (int pass = 0; pass < kTileM / kRowStep; ++pass) {
            const long long down = static_cast<long long>(min(pass * kRowStep, rows_below_)) * stride;
            ptx::cp_async_16(ptx::shared_address(target + pass * kRowStep * kTileK), source + down, valid);
        }
        source_ += kTileK;
        columns_left_ -= kTileK;
    }

private:
    const ELEMENT* x_;
    const ELEMENT* source_;
    int stride_, rows_below_, columns_left_;
    int target_;
};

// A warp's rows of the weight in one step of 16 columns. Codes are loaded for several steps at once and scales for half a
// stage: `load` loads what the next step needs, and `advance` moves to that step.
class WeightFragments {
public:
    // `stage` and `step` are those of the next step; `tile` is the warp's first packed tile in a stage.
    __device__ __forceinline__ void load(const unsigned char* stage, int tile, int step, bool symmetric) {
        const int lane = threadIdx.x % 32;
        if (step % kStepsOfLoad == 0) {
#pragma unroll
            for (int i = 0; i < kBlocksN; ++i) {
                const int at = ((tile + i) * kLoads + step / kStepsOfLoad) * (128 * kLoadWords);
                read_codes(loaded_[i], reinterpret_cast<const ptx::uint32*>(stage + kCodesAt + at), lane);
            }
        }
        if (step % kStepsOfHalf == 0) {
#pragma unroll
            for (int i = 0; i < kBlocksN; ++i) {
                const int pair = ((tile + i) * kHalves + step / kStepsOfHalf) * 32 + lane / 4 * 4;
                scale_pairs_[i] = *reinterpret_cast<const ptx::uint32*>(stage + kScalesAt + pair);
                if (!symmetric) zero_pairs_[i] = *reinterpret_cast<const ptx::uint32*>(stage + kZerosAt + pair);
            }
        }
    }

    // `middle`: the zero point of a symmetric weight, in both halves of a register.
    __device__ __forceinline__ void advance(int step, bool symmetric, ptx::uint32 middle) {
#pragma unroll
        for (int i = 0; i < kBlocksN; ++i) {
            if (step % kStepsOfLoad == 0) {
#pragma unroll
                for (int word = 0; word < kLoadWords; ++word) words_[i][word] = loaded_[i][word];
            }
            if (step % kStepsOfHalf == 0) {
                scales_[i] = Packed::scales(scale_pairs_[i]);
                zeros_[i] = Packed::zeros(symmetric ? middle : zero_pairs_[i]);
            }
        }
    }

    // The fragment of 16 rows for ptx::mma_m16n8k16.
    __device__ __forceinline__ void dequantize(ptx::uint32 (&a)[4], int i, int step) const {
        Packed::integers(a, words_[i], step % kStepsOfLoad, zeros_[i]);
        scale_fragment<ELEMENT>(a, scales_[i]);
    }

private:
    ptx::uint32 loaded_[kBlocksN][kLoadWords], words_[kBlocksN][kLoadWords];
    ptx::uint32 scale_pairs_[kBlocksN], zero_pairs_[kBlocksN];
    RowPairs scales_[kBlocksN];
    typename Packed::Zeros zeros_[kBlocksN];
};

// A warp's rows of x in one step of 16 columns; each register block has 16 rows.
struct InputFragments {
    ptx::uint32 b[kBlocksM / 2][4];

    __device__ __forceinline__ void load(const unsigned char* stage, int warp_row, int step) {
#pragma unroll
        for (int j = 0; j < kBlocksM / 2; ++j) {
            load_block<kTileK, Second::right, false>(b[j], reinterpret_cast<const ELEMENT*>(stage), warp_row + j * 16,
                                                     step * 16);
        }
    }
};

using Sums = float[kBlocksN][kBlocksM][4];

// The previous kernel may write x and bias: no __restrict__ (see ptx::griddepcontrol_wait).
__device__ __forceinline__ void compute(
    const ELEMENT* x, const Weight& weight, const ELEMENT* bias, ELEMENT* __restrict__ out, float* __restrict__ partial, int m,
    int n, int k, int middle, int x_stride, long long out_stride, int k_per_split, TilePlace<unsigned> place) {
    alignas(128) extern __shared__ unsigned char shared[];

    const int row0 = place.row * kTileM;
    const int column0 = place.column * kTileN;
    const int warp = threadIdx.x / 32;
    const int warp_row = warp % kWarpsM * kWarpM;
    const int warp_column = warp / kWarpsM * kWarpN;

    const int first_tile = blockIdx.y * (k_per_split / kTileK);
    const int tiles = min(k_per_split / kTileK, weight.k_tiles - first_tile);
    InputCopy input(x, x_stride, m, k, row0, first_tile * kTileK);

#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
#endif
#pragma unroll
    for (int tile = 0; tile < kStages - 1; ++tile) {
        if (tile < tiles) copy_weight(shared + tile * kStageBytes, weight, column0 / 16, first_tile + tile);
    }
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_wait();
#endif
    // One group of copies per tile, an empty one beyond the end, so that "all but the last kStages - 2 groups" always means
    // "the next tile has arrived". The first group also has the codes of the other stages.
#pragma unroll
    for (int tile = 0; tile < kStages - 1; ++tile) {
        if (tile < tiles) input.next(shared + tile * kStageBytes);
        ptx::cp_async_commit();
    }
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();  // the first tile is complete: every thread has waited for its own copies

    const bool symmetric = weight.zeros == nullptr;
    const ptx::uint32 middle_pair = pack_pair<ELEMENT>(middle, middle);
    Sums sums = {};
    InputFragments inputs[2];
    WeightFragments weights;
    const unsigned char* stage = shared;
    ptx::uint32 a[2][4];
    const int warp_tile = warp_column / 16;
    inputs[0].load(stage, warp_row, 0);
    weights.load(stage, warp_tile, 0, symmetric);
    weights.advance(0, symmetric, middle_pair);
    weights.dequantize(a[0], 0, 0);
    int current = 0, to_fill = kStages - 1;
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int next = (step + 1) % kSteps;
            if (next == 0) {
                // All fragments of this stage are in registers. After the barrier the next tile is complete, and this stage,
                // which is not read any more, may be filled again.
                ptx::cp_async_wait<kStages - 2>();
                __syncthreads();
                current = current + 1 == kStages ? 0 : current + 1;
                stage = shared + current * kStageBytes;
            }
            inputs[(step + 1) % 2].load(stage, warp_row, next);
            weights.load(stage, warp_tile, next, symmetric);
            if (step == 0) {
                if (tile + kStages - 1 < tiles) {
                    unsigned char* filled = shared + to_fill * kStageBytes;
                    copy_weight(filled, weight, column0 / 16, first_tile + tile + kStages - 1);
                    input.next(filled);
                    to_fill = to_fill + 1 == kStages ? 0 : to_fill + 1;
                }
                ptx::cp_async_commit();
            }
            // Each fragment is dequantized while the previous one is multiplied.
#pragma unroll
            for (int i = 0; i < kBlocksN; ++i) {
                if (i + 1 < kBlocksN) {
                    weights.dequantize(a[(i + 1) % 2], i + 1, step);
                } else {
                    weights.advance(next, symmetric, middle_pair);
                    weights.dequantize(a[0], 0, next);
                }
#pragma unroll
                for (int j = 0; j < kBlocksM; ++j) {
                    const ptx::uint32(&b)[4] = inputs[step % 2].b[j / 2];
                    ptx::mma_m16n8k16<ELEMENT>(sums[i][j], a[i % 2], b[j % 2 * 2], b[j % 2 * 2 + 1]);
                }
            }
        }
    }
    __syncthreads();  // all threads have read the stages, even beyond the last tile; the epilogue reuses them

    float* patch = reinterpret_cast<float*>(shared) + warp * 8 * (kWarpN + 4);
    const int first_row = row0 + warp_row;
    const int lane_column = column0 + warp_column + threadIdx.x % (kWarpN / 8) * 8;
    if (gridDim.y > 1) {
        const long long stride = (n + 7) / 8 * 8;
        float* slice = partial + blockIdx.y * (m * stride) + lane_column;
        finish_rows(sums, patch, [&](const float(&values)[8], int row) {
            if (first_row + row >= m || lane_column >= n) return;
            float4* target = reinterpret_cast<float4*>(slice + (first_row + row) * stride);
            target[0] = make_float4(values[0], values[1], values[2], values[3]);
            target[1] = make_float4(values[4], values[5], values[6], values[7]);
        });
    } else {
        const Epilogue<ELEMENT> epilogue(bias, kNone, out, out_stride, n, lane_column);
        finish_rows(sums, patch, [&](float(&values)[8], int row) {
            if (first_row + row < m && lane_column < n) epilogue.store(values, first_row + row);
        });
    }
}

#if EXPERTS
extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT) sm80_wna16_experts(
    const ELEMENT* x, const uint4* __restrict__ codes, const ELEMENT* __restrict__ scales,
    const ELEMENT* __restrict__ zeros, const uint4* __restrict__ host_codes, const ELEMENT* __restrict__ host_scales,
    const ELEMENT* __restrict__ host_zeros, ELEMENT* __restrict__ out, const int4* tiles, int n, int k, int groups,
    int group_shift, int middle, int resident) {
    __shared__ Weight weight;  // there are not enough registers for pointers that are selected here
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_wait();
#endif
    const unsigned columns = (n + kTileN - 1u) / kTileN;
    const unsigned index = blockIdx.x / columns;
    if (index >= tiles[-1].x) return;
    const int4 tile = tiles[index];  // expert, first row, rows
    const int row_tiles = (n + 15) / 16, k_tiles = (k + kTileK - 1) / kTileK;
    if (threadIdx.x == 0) {
        const bool offloaded = tile.x >= resident;
        if (offloaded) codes = host_codes, scales = host_scales, zeros = host_zeros;
        const long long rows_before = static_cast<long long>(tile.x - (offloaded ? resident : 0)) * row_tiles;
        const long long groups_before = rows_before * groups * 16;
        weight = {codes + rows_before * k_tiles * kChunksOfTile, scales + groups_before,
                  zeros == nullptr ? nullptr : zeros + groups_before, row_tiles, k_tiles, groups, group_shift};
    }
    __syncthreads();
    compute(x + static_cast<long long>(tile.y) * k, weight, nullptr, out + static_cast<long long>(tile.y) * n, nullptr, tile.z,
            n, k, middle, k, n, k_tiles * kTileK, {0, blockIdx.x % columns});
}
#else
extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT) sm80_wna16(
    const ELEMENT* x, const uint4* __restrict__ codes, const ELEMENT* __restrict__ scales,
    const ELEMENT* __restrict__ zeros, const ELEMENT* bias, ELEMENT* __restrict__ out,
    float* __restrict__ partial, int m, int n, int k, int groups, int group_shift, int middle, int x_stride,
    long long out_stride, int k_per_split) {
    const auto place = tile_place(blockIdx.x, (m + kTileM - 1u) / kTileM, (n + kTileN - 1u) / kTileN, kGroup);
    const Weight weight = {codes, scales, zeros, (n + 15) / 16, (k + kTileK - 1) / kTileK, groups, group_shift};
    compute(x, weight, bias, out, partial, m, n, k, middle, x_stride, out_stride, k_per_split, place);
}
#endif

// out = activation(a b + bias) on the tensor cores of sm_80 and later: mma.sync m16n8k16, fed by cp.async in several
// stages.
//
// Shapes: a [m, k], b [k, n], bias [n] or null, out [m, n]; any m, n >= 1 and k >= 0. ELEMENT = __half or
// __nv_bfloat16, summed in float32. out is row-major with rows out_stride elements apart; a and b are row- or
// column-major (A_LAYOUT, B_LAYOUT = row, column), a_stride and b_stride being the elements from one row, or column, to
// the next.
//
// Alignment: ALIGN=8: pointers and strides of a and b are multiples of 16 bytes, and tiles are copied 16 bytes a
// cp.async. ALIGN=1: no condition; tiles are copied element by element, synchronously, into the same places, several
// times slower. The output is stored 16 bytes a store where its pointer and stride allow, else element by element.
//
// Versions: TILE_M x TILE_N elements of the product per block, of which a warp owns WARP_M x WARP_N; TILE_K of k per
// stage; STAGES tiles of a and b in shared memory, STAGES - 1 of which are on their way while one is multiplied.
// BLOCK_SWIZZLE: blocks that run at one time should share what they read, so tiles are numbered down groups of
// BLOCK_SWIZZLE rows of tiles; 1 numbers them row by row. A block sums k_per_split of k (a multiple of TILE_K); where
// that is less than k, gridDim.y blocks share a tile and each stores float32 sums into partial [gridDim.y, m, n rounded
// up to 8] for split_k_reduce.cu, which finishes them in fixed order.
//
// EXPERTS=1: the products of a mixture of experts. b holds the weights of all experts, [experts, n, k], and a and out have
// rows that are sorted by expert. list[i] = {expert, first row, rows, 0} says which rows a row of tiles has; list[-1].x is
// the number of entries (moe/sort.cu). The grid has a row of tiles for each entry that there may be; gridDim.y is 1, no
// bias, a is row-major and b column-major. m is not used.
//
// Launch: grid (tiles, splits), kThreads threads, kStages * (TILE_M + TILE_N) * TILE_K * 2 bytes of dynamic shared
// memory; no configuration takes more than the 99 KB that sm_86 and sm_89 give to a block.
#include "common/schedule.cuh"
#include "common/tile.cuh"
#include "gemm/epilogue.cuh"

enum class Layout { row, column };

constexpr int kTileM = TILE_M, kTileN = TILE_N, kTileK = TILE_K;
constexpr int kWarpM = WARP_M, kWarpN = WARP_N;
constexpr int kStages = STAGES;
constexpr unsigned kGroup = BLOCK_SWIZZLE;
constexpr bool kAligned = ALIGN == 8;
constexpr bool kExperts = EXPERTS == 1;
constexpr Layout kLayoutA = Layout::A_LAYOUT;
constexpr Layout kLayoutB = Layout::B_LAYOUT;

constexpr int kWarpsN = kTileN / kWarpN;
constexpr int kThreads = kTileM / kWarpM * kWarpsN * 32;
constexpr int kBlocksM = kWarpM / 16;  // mma products down and along a warp's tile
constexpr int kBlocksN = kWarpN / 8;
constexpr int kSteps = kTileK / 16;  // mma products through a stage
constexpr int kLanesOfRow = kWarpN / 8;  // in the epilogue: 8 columns a lane
constexpr int kSizeA = kTileM * kTileK;
constexpr int kSizeB = kTileN * kTileK;
// Two small blocks on a multiprocessor hide each other's waiting; a block of 256 threads takes all registers for
// itself.
constexpr int kBlocksPerMultiprocessor = kThreads <= 128 ? 2 : 1;

static_assert(ALIGN == 8 || ALIGN == 1, "16-byte copies or single elements");
static_assert(kStages >= 2 && kSteps % 2 == 0, "two sets of fragments take turns, also from stage to stage");
static_assert(kWarpM % 16 == 0 && (kWarpN == 32 || kWarpN == 64), "the epilogue gives a row of a warp to 4 or 8 lanes");
static_assert(kStages * (kSizeA + kSizeB) * 2 == SHARED_BYTES, "the host asks for other shared memory");
static_assert(kStages * (kSizeA + kSizeB) * 2 <= 99 * 1024, "sm_86 and sm_89 give 99 KB to a block");

// How an operand lies in shared memory: as in global memory, its contiguous direction along the rows. That is k for a
// row-major a and a column-major b, which ldmatrix reads as they are; of the others it transposes 8 x 8 elements at a
// time.
template <int Tile, bool AlongK>
struct Operand {
    static constexpr bool kAlongK = AlongK;
    static constexpr int kRows = AlongK ? Tile : kTileK;
    static constexpr int kColumns = AlongK ? kTileK : Tile;
};
using OperandA = Operand<kTileM, kLayoutA == Layout::row>;
using OperandB = Operand<kTileN, kLayoutB == Layout::column>;

// A thread's share in copying an operand's tiles: one column of chunks, every kRowStep-th row.
template <typename Shape>
class TileCopy {
    static constexpr int kChunks = Shape::kColumns / kChunk;
    static constexpr int kRowStep = kThreads / kChunks;
    static constexpr int kPasses = Shape::kRows / kRowStep;
    static_assert(kPasses * kRowStep == Shape::kRows && kRowStep % 8 == 0, "a thread has one chunk_key");

public:
    // The tiles begin at (row0, column0) of a matrix with `rows` rows, `stride` elements apart, of `columns` elements.
    __device__ TileCopy(
        const ELEMENT* matrix, long long stride, long long rows, long long columns, long long row0, long long column0)
        : matrix_(matrix), stride_(stride) {
        const int row = threadIdx.x / kChunks;
        const int chunk = threadIdx.x % kChunks;
        source_ = matrix + (row0 + row) * stride + column0 + chunk * kChunk;
        rows_left_ = static_cast<int>(rows - row0 - row);
        columns_left_ = static_cast<int>(columns - column0 - chunk * kChunk);
        target_ = chunk_offset<Shape::kColumns>(row, chunk);
    }

    // Starts copying the tile into a stage, zeros where the matrix ends, and goes on to the tile after it along k.
    __device__ __forceinline__ void next(ELEMENT* stage) {
        const int inside = max(0, min(columns_left_, kChunk));
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int valid = pass * kRowStep < rows_left_ ? inside : 0;
            // cp.async wants a legal address even where it reads nothing.
            const ELEMENT* source = valid > 0 ? source_ + pass * kRowStep * stride_ : matrix_;
            ELEMENT* target = stage + target_ + pass * kRowStep * Shape::kColumns;
            if constexpr (kAligned) {
                ptx::cp_async_16(ptx::shared_address(target), source, valid * static_cast<int>(sizeof(ELEMENT)));
            } else {
                *reinterpret_cast<Vector16<ELEMENT>*>(target) = load_chunk(source, valid, false);
            }
        }
        if constexpr (Shape::kAlongK) {
            source_ += kTileK;
            columns_left_ -= kTileK;
        } else {
            source_ += kTileK * stride_;
            rows_left_ -= kTileK;
        }
    }

private:
    const ELEMENT* matrix_;
    const ELEMENT* source_;
    long long stride_;
    int rows_left_, columns_left_;
    int target_;
};

// The fragments that a warp multiplies in one step of 16 along k.
struct Fragments {
    ptx::uint32 a[kBlocksM][4];
    ptx::uint32 b[kBlocksN / 2][4];  // each for 16 columns

    __device__ __forceinline__ void load(const ELEMENT* stage, int warp_row, int warp_column, int step) {
        const ELEMENT* tile_b = stage + kSizeA;
#pragma unroll
        for (int i = 0; i < kBlocksM; ++i) {
            const int row = warp_row + i * 16;
            if constexpr (OperandA::kAlongK) {
                load_block<OperandA::kColumns, Second::below, false>(a[i], stage, row, step * 16);
            } else {
                load_block<OperandA::kColumns, Second::right, true>(a[i], stage, step * 16, row);
            }
        }
#pragma unroll
        for (int j = 0; j < kBlocksN / 2; ++j) {
            const int column = warp_column + j * 16;
            if constexpr (OperandB::kAlongK) {
                load_block<OperandB::kColumns, Second::right, false>(b[j], tile_b, column, step * 16);
            } else {
                load_block<OperandB::kColumns, Second::below, true>(b[j], tile_b, step * 16, column);
            }
        }
    }
};

using Sums = float[kBlocksM][kBlocksN][4];

__device__ __forceinline__ void multiply(Sums& sums, const Fragments& fragments) {
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
            const ptx::uint32(&b)[4] = fragments.b[j / 2];
            ptx::mma_m16n8k16<ELEMENT>(sums[i][j], fragments.a[i], b[j % 2 * 2], b[j % 2 * 2 + 1]);
        }
    }
}

// Gives the rows of a warp's sums to `finish(sums, row)`, 8 columns a lane: those from lane % kLanesOfRow * 8 on. The
// sums pass through shared memory 16 rows at a time, since a lane has only 2 neighbours of a row. Rows lie 32 bytes
// further apart than they are long: the 4 rows that half a warp stores at a time then lie in different banks. 4
// neighbouring lanes load their first 16 bytes while the next 4 load their second, for the same reason.
template <typename Finish>
__device__ __forceinline__ void finish_rows(const Sums& sums, float* patch, Finish finish) {
    constexpr int kPitch = kWarpN + 8;
    const int lane = threadIdx.x % 32;
    const int column = lane % kLanesOfRow * 8;
    const int half = lane / 4 % 2;
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
        __syncwarp();  // the patch has been read
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
            float* target = patch + lane / 4 * kPitch + j * 8 + lane % 4 * 2;
            *reinterpret_cast<float2*>(target) = make_float2(sums[i][j][0], sums[i][j][1]);
            *reinterpret_cast<float2*>(target + 8 * kPitch) = make_float2(sums[i][j][2], sums[i][j][3]);
        }
        __syncwarp();  // the patch is complete
#pragma unroll 1
        for (int row = lane / kLanesOfRow; row < 16; row += 32 / kLanesOfRow) {
            const float* source = patch + row * kPitch + column;
            const float4 first = *reinterpret_cast<const float4*>(source + half * 4);
            const float4 second = *reinterpret_cast<const float4*>(source + (1 - half) * 4);
            const float4 low = half ? second : first;
            const float4 high = half ? first : second;
            float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            finish(values, i * 16 + row);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) sm80_hgemm(
    const ELEMENT* __restrict__ a, const ELEMENT* __restrict__ b, const ELEMENT* __restrict__ bias,
    ELEMENT* __restrict__ out, float* __restrict__ partial, int m, int n, int k, long long a_stride, long long b_stride,
    long long out_stride, int k_per_split, int activation, const int4* list) {
    alignas(128) extern __shared__ unsigned char shared[];
    ELEMENT* stages = reinterpret_cast<ELEMENT*>(shared);

    int row0, column0;
    if constexpr (kExperts) {
        const unsigned tile_columns = (n + kTileN - 1u) / kTileN;
        const int index = blockIdx.x / tile_columns;
        if (index >= list[-1].x) return;
        const int4 entry = list[index];
        row0 = entry.y;
        column0 = blockIdx.x % tile_columns * kTileN;
        m = entry.y + entry.z;
        b += static_cast<long long>(entry.x) * n * b_stride;
    } else {
        const auto place = tile_place(blockIdx.x, (m + kTileM - 1u) / kTileM, (n + kTileN - 1u) / kTileN, kGroup);
        row0 = place.row * kTileM;
        column0 = place.column * kTileN;
    }
    const int warp = threadIdx.x / 32;
    const int warp_row = warp / kWarpsN * kWarpM;
    const int warp_column = warp % kWarpsN * kWarpN;

    const long long k_begin = static_cast<long long>(blockIdx.y) * k_per_split;
    const long long k_end = min(k_begin + k_per_split, static_cast<long long>(k));
    const int tiles = static_cast<int>((k_end - k_begin + kTileK - 1) / kTileK);
    auto copy_a = OperandA::kAlongK ? TileCopy<OperandA>(a, a_stride, m, k_end, row0, k_begin)
                                    : TileCopy<OperandA>(a, a_stride, k_end, m, k_begin, row0);
    auto copy_b = OperandB::kAlongK ? TileCopy<OperandB>(b, b_stride, n, k_end, column0, k_begin)
                                    : TileCopy<OperandB>(b, b_stride, k_end, n, k_begin, column0);

    // Every round commits one group of copies, an empty one at the end, so that "all but the last kStages - 2 groups"
    // always means "the tile that comes next has arrived".
    int to_fill = 0;
    const auto fill = [&](bool more) {
        if (more) {
            ELEMENT* stage = stages + to_fill * (kSizeA + kSizeB);
            copy_a.next(stage);
            copy_b.next(stage + kSizeA);
            to_fill = to_fill + 1 == kStages ? 0 : to_fill + 1;
        }
        ptx::cp_async_commit();
    };
#pragma unroll
    for (int tile = 0; tile < kStages - 1; ++tile) fill(tile < tiles);
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();  // the first tile is complete: every thread has waited for its own copies

    Sums sums = {};
    Fragments fragments[2];
    const ELEMENT* stage = stages;
    fragments[0].load(stage, warp_row, warp_column, 0);
    int current = 0;
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (step == kSteps - 1) {
                // The fragments of this stage are all in registers. Behind the barrier the next tile is complete, and
                // this stage, which nobody reads any more, may be filled again.
                ptx::cp_async_wait<kStages - 2>();
                __syncthreads();
                current = current + 1 == kStages ? 0 : current + 1;
                stage = stages + current * (kSizeA + kSizeB);
            }
            fragments[(step + 1) % 2].load(stage, warp_row, warp_column, (step + 1) % kSteps);
            if (step == 0) fill(tile + kStages - 1 < tiles);
            multiply(sums, fragments[step % 2]);
        }
    }
    __syncthreads();  // the stages have been read by all, even past the last tile; the epilogue takes their place

    float* patch = reinterpret_cast<float*>(shared) + warp * 16 * (kWarpN + 8);
    const int first_row = row0 + warp_row;
    const int first_column = column0 + warp_column;
    const int lane_column = first_column + threadIdx.x % kLanesOfRow * 8;
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
        const Epilogue<ELEMENT> epilogue(bias, activation, out, out_stride, n, lane_column);
        finish_rows(sums, patch, [&](float(&values)[8], int row) {
            if (first_row + row < m && lane_column < n) epilogue.store(values, first_row + row);
        });
    }
}

// out [m, n] = a_scale [m] * (a [m, k] b [n, k]^T) * b_scale [n] + bias [n] by mma.sync m16n8k32, fed by cp.async: 8-bit
// operands on sm_80 (int8) or sm_89 (e4m3) and later.
//
// Macros
//   ELEMENT  of bias and out: __half or __nv_bfloat16
//   SUM      int: a and b are int8; float: they are e4m3
//   TILE_M, TILE_N  the tile that a block computes, a warp TILE_M / 2 by 32 of it; TILE_K: bytes of k a stage, 64 or 128
//   STAGES   tiles of a and b in shared memory
// Rows of a and b begin at multiples of 16 bytes, a_stride and b_stride bytes apart; out is contiguous. The scales are
// float32, bias is null or [n]. Any m, n, k >= 1; int32 holds up to 131071 of k.
//
// A block sums k_per_split of k (a multiple of TILE_K). Where that is less than k, gridDim.y blocks share a tile and
// write scaled float32 sums into partial [gridDim.y, m, n rounded up to 8] for gemm/split_k_reduce.cu.
//
// EXPERTS=1: the products of a mixture of experts, as in gemm/sm80_hgemm.cu. b and b_scale hold the weights and scales of all
// experts, [experts, n, k] and [experts, n], and `list` says which rows of a and out a row of tiles has.
//
// Sums of e4m3 are carried over to float32 registers after each stage, since the tensor cores add them up with fewer bits.
//
// Launch: grid (tiles, splits), 2 * TILE_N threads, STAGES * (TILE_M + TILE_N) * TILE_K bytes of dynamic shared memory.
#include "common/byte_tiles.cuh"
#include "common/schedule.cuh"

constexpr int kWarpM = TILE_M / 2, kWarpN = 32;  // what a warp computes
constexpr int kWarpsN = TILE_N / kWarpN;
constexpr int kThreads = 2 * kWarpsN * 32;
constexpr int kPairs = TILE_K / 2;  // in a row of a tile
constexpr int kBlocksM = kWarpM / 16, kBlocksN = kWarpN / 8;  // products down and along a warp's tile
constexpr int kSteps = TILE_K / 32;
constexpr int kSizeA = TILE_M * kPairs, kSizeB = TILE_N * kPairs;
constexpr unsigned kGroup = 8;  // rows of tiles that blocks go down before they go on to the next column
constexpr bool kRounds = static_cast<SUM>(0.5f) != 0;  // float: sums are carried over

static_assert(STAGES * (kSizeA + kSizeB) * sizeof(Pair) == SHARED_BYTES, "the host asks for other shared memory");
static_assert(kWarpM % 16 == 0 && TILE_N % kWarpN == 0, "a warp has fragments of 16 rows, and 32 columns");

using Sums = SUM[kBlocksM][kBlocksN][4];

// The products of one step of 32 along k, for a warp.
__device__ __forceinline__ void multiply_step(Sums& sums, const Pair* stage, int warp_row, int warp_column, int step) {
    ptx::uint32 a[kBlocksM][4], b[kBlocksN / 2][4];
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
        load_block<kPairs, Second::below, false>(a[i], stage, warp_row + i * 16, step * 16);
    }
#pragma unroll
    for (int j = 0; j < kBlocksN / 2; ++j) {
        load_block<kPairs, Second::right, false>(b[j], stage + kSizeA, warp_column + j * 16, step * 16);
    }
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
            ptx::mma_m16n8k32(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
}

// Adds the sums of a stage to those before, and sets them to zero.
__device__ __forceinline__ void carry(float (&carried)[kBlocksM][kBlocksN][4], Sums& sums) {
#pragma unroll
    for (int i = 0; i < kBlocksM * kBlocksN * 4; ++i) {
        carried[i / 4 / kBlocksN][i / 4 % kBlocksN][i % 4] += sums[i / 4 / kBlocksN][i / 4 % kBlocksN][i % 4];
        sums[i / 4 / kBlocksN][i / 4 % kBlocksN][i % 4] = 0;
    }
}

// Two neighbouring elements of a row of `out`, of which the second may lie past its end.
__device__ __forceinline__ void store_pair(ELEMENT* row, int column, int n, float first, float second) {
    if (n % 2 == 0) {
        *reinterpret_cast<ptx::uint32*>(row + column) = pack_pair<ELEMENT>(first, second);
    } else {
        row[column] = from_float<ELEMENT>(first);
        if (column + 1 < n) row[column + 1] = from_float<ELEMENT>(second);
    }
}

// The previous kernel may write the operands, scales and bias: no __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(kThreads, kRounds ? 1 : 2)
    sm80_w8a8(const unsigned char* a, const unsigned char* b, const float* a_scale, const float* b_scale,
              const ELEMENT* bias, ELEMENT* __restrict__ out, float* __restrict__ partial, int m, int n, int k,
              long long a_stride, long long b_stride, int k_per_split, const int4* list) {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    alignas(128) extern __shared__ unsigned char shared[];
    Pair* stages = reinterpret_cast<Pair*>(shared);

    int row0, column0;
    if constexpr (EXPERTS == 1) {
        const unsigned tile_columns = (n + TILE_N - 1u) / TILE_N;
        const int index = blockIdx.x / tile_columns;
        if (index >= list[-1].x) return;
        const int4 entry = list[index];
        row0 = entry.y;
        column0 = blockIdx.x % tile_columns * TILE_N;
        m = entry.y + entry.z;
        b += static_cast<long long>(entry.x) * n * b_stride;
        b_scale += static_cast<long long>(entry.x) * n;
    } else {
        const auto place = tile_place(blockIdx.x, (m + TILE_M - 1u) / TILE_M, (n + TILE_N - 1u) / TILE_N, kGroup);
        row0 = place.row * TILE_M;
        column0 = place.column * TILE_N;
    }
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int warp_row = warp / kWarpsN * kWarpM;
    const int warp_column = warp % kWarpsN * kWarpN;

    const int begin = blockIdx.y * k_per_split;
    const int end = min(k - begin, k_per_split) + begin;
    const int tiles = (end - begin + TILE_K - 1) / TILE_K;
    TileCopy<TILE_M, TILE_K, kThreads> copy_a(a, a_stride, m, row0, begin, end);
    TileCopy<TILE_N, TILE_K, kThreads> copy_b(b, b_stride, n, column0, begin, end);

    // Each iteration commits one group of copies, an empty one at the end, so that "all but the last STAGES - 2 groups"
    // always means "the next tile has arrived".
    int to_fill = 0;
    const auto fill = [&](bool more) {
        if (more) {
            Pair* stage = stages + to_fill * (kSizeA + kSizeB);
            copy_a.next(stage);
            copy_b.next(stage + kSizeA);
            to_fill = to_fill + 1 == STAGES ? 0 : to_fill + 1;
        }
        ptx::cp_async_commit();
    };
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; ++tile) fill(tile < tiles);

    Sums sums = {};
    float carried[kBlocksM][kBlocksN][4] = {};
    int current = 0;
    for (int tile = 0; tile < tiles; ++tile) {
        ptx::cp_async_wait<STAGES - 2>();
        __syncthreads();  // this tile is complete, and the one before it has been read by all
        fill(tile + STAGES - 1 < tiles);
        const Pair* stage = stages + current * (kSizeA + kSizeB);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) multiply_step(sums, stage, warp_row, warp_column, step);
        if constexpr (kRounds) carry(carried, sums);
        current = current + 1 == STAGES ? 0 : current + 1;
    }

    const long long partial_stride = (n + 7) / 8 * 8;
    float* slice = partial + blockIdx.y * (m * partial_stride);
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row0 + warp_row + i * 16 + lane / 4 + 8 * half;
            if (row >= m) continue;
            const float scale = a_scale[row];
#pragma unroll
            for (int j = 0; j < kBlocksN; ++j) {
                const int column = column0 + warp_column + j * 8 + lane % 4 * 2;
                if (column >= n) continue;
                const bool pair = column + 1 < n;
                float value[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const float sum =
                        kRounds ? carried[i][j][2 * half + c] : static_cast<float>(sums[i][j][2 * half + c]);
                    value[c] = c == 0 || pair ? sum * scale * b_scale[column + c] : 0.0f;
                }
                if (gridDim.y > 1) {
                    *reinterpret_cast<float2*>(slice + row * partial_stride + column) = make_float2(value[0], value[1]);
                    continue;
                }
                if (bias != nullptr) {
                    value[0] += to_float(bias[column]);
                    if (pair) value[1] += to_float(bias[column + 1]);
                }
                store_pair(out + static_cast<long long>(row) * n, column, n, value[0], value[1]);
            }
        }
    }
}

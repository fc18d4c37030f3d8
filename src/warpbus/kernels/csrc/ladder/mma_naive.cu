// out = a b with mma.sync.m16n8k16 in PTX, from plain shared memory.
//
// Shapes and layout: a [m, k], b [k, n], out [m, n], all row-major and contiguous; any m, n >= 1 and k >= 0. ELEMENT =
// __half or __nv_bfloat16, summed in float32. `aligned` says that all rows of a and b begin at multiples of 16 bytes (k
// and n are multiples of 8 and so are the pointers): tiles are then read 16 bytes a load, otherwise element by element.
//
// A block of 4 warps computes 128 x 128 elements, 32 of k at a time through shared memory; a warp owns 64 x 64 of them,
// 4 x 8 products of 16 x 8. Against the WMMA rung the layout of the fragments is known here: each lane gathers its own
// elements and writes its own results, without a detour. Left to be gained: rows of the tiles lie exactly 64 and 256
// bytes apart, so that lanes which read one column wait for each other (bank conflicts), and b arrives in single
// elements. See mma_permuted.cu.
//
// The fragments, for lane = 4 g + t (PTX ISA, "Matrix fragments for mma.m16n8k16"): two elements a register,
//   a: rows g, g + 8 at k = 2t, 2t + 1; then the same rows at k = 2t + 8, 2t + 9
//   b: column g at k = 2t, 2t + 1; then at k = 2t + 8, 2t + 9
//   sums: row g at columns 2t, 2t + 1; then row g + 8
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "ladder/mma_tile.cuh"

__device__ __forceinline__ ptx::uint32 pair(ELEMENT low, ELEMENT high) {
    alignas(4) ELEMENT both[2] = {low, high};
    return *reinterpret_cast<ptx::uint32*>(both);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) mma_naive(
    const ELEMENT* __restrict__ a, const ELEMENT* __restrict__ b, ELEMENT* __restrict__ out, int m, int n, int k,
    int aligned) {
    alignas(16) __shared__ ELEMENT a_tile[kTileM][kTileK];
    alignas(16) __shared__ ELEMENT b_tile[kTileK][kTileN];

    const WarpTile place(n);
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;

    float sums[kBlocksM][kBlocksN][4] = {};
    for (int k0 = 0; k0 < k; k0 += kTileK) {
        load_tile<kTileM, kTileK>(a, m, k, place.row0, k0, aligned, [&](int row, int column) {
            return &a_tile[row][column];
        });
        load_tile<kTileK, kTileN>(b, k, n, k0, place.column0, aligned, [&](int row, int column) {
            return &b_tile[row][column];
        });
        __syncthreads();  // both tiles are complete
#pragma unroll
        for (int step = 0; step < kTileK; step += 16) {
            ptx::uint32 left[kBlocksM][4];
#pragma unroll
            for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const int row = place.warp_row + i * 16 + g + part % 2 * 8;
                    left[i][part] = *reinterpret_cast<const ptx::uint32*>(&a_tile[row][step + 2 * t + part / 2 * 8]);
                }
            }
#pragma unroll
            for (int j = 0; j < kBlocksN; ++j) {
                const int column = place.warp_column + j * 8 + g;
                ptx::uint32 right[2];
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    const int row = step + 2 * t + part * 8;
                    right[part] = pair(b_tile[row][column], b_tile[row + 1][column]);
                }
#pragma unroll
                for (int i = 0; i < kBlocksM; ++i) ptx::mma_m16n8k16<ELEMENT>(sums[i][j], left[i], right[0], right[1]);
            }
        }
        __syncthreads();  // nobody still reads what the next round overwrites
    }
    store_sums(sums, place, out, m, n);
}

// out = a b with mma.sync.m16n8k16 in PTX, from permuted shared memory by ldmatrix.
//
// Shapes, layout, tiles and `aligned` as in mma_naive.cu. What is new: the tiles lie in shared memory with each row's
// chunks of 16 bytes in an order of its own (common/tile.cuh), so that neither storing a tile nor reading a fragment
// has bank conflicts; and ldmatrix reads four 8 x 8 matrices at a time, transposing b on the way, where mma_naive needs
// 4 loads for a block of a and 8 for one of b. Left to be gained: the tensor cores wait while a tile travels from
// global memory, since there is only one; gemm/sm80_hgemm.cu has several.
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "ladder/mma_tile.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 2) mma_permuted(
    const ELEMENT* __restrict__ a, const ELEMENT* __restrict__ b, ELEMENT* __restrict__ out, int m, int n, int k,
    int aligned) {
    alignas(128) __shared__ ELEMENT a_tile[kTileM * kTileK];
    alignas(128) __shared__ ELEMENT b_tile[kTileK * kTileN];

    const WarpTile place(n);
    float sums[kBlocksM][kBlocksN][4] = {};
    for (int k0 = 0; k0 < k; k0 += kTileK) {
        load_tile<kTileM, kTileK>(a, m, k, place.row0, k0, aligned, [&](int row, int column) {
            return a_tile + chunk_offset<kTileK>(row, column / kChunk);
        });
        load_tile<kTileK, kTileN>(b, k, n, k0, place.column0, aligned, [&](int row, int column) {
            return b_tile + chunk_offset<kTileN>(row, column / kChunk);
        });
        __syncthreads();  // both tiles are complete
#pragma unroll
        for (int step = 0; step < kTileK; step += 16) {
            ptx::uint32 left[kBlocksM][4];
#pragma unroll
            for (int i = 0; i < kBlocksM; ++i) {
                load_block<kTileK, Second::below, false>(left[i], a_tile, place.warp_row + i * 16, step);
            }
#pragma unroll
            for (int j = 0; j < kBlocksN; j += 2) {
                ptx::uint32 right[4];  // two blocks of 8 columns
                load_block<kTileN, Second::below, true>(right, b_tile, step, place.warp_column + j * 8);
#pragma unroll
                for (int i = 0; i < kBlocksM; ++i) {
                    ptx::mma_m16n8k16<ELEMENT>(sums[i][j], left[i], right[0], right[1]);
                    ptx::mma_m16n8k16<ELEMENT>(sums[i][j + 1], left[i], right[2], right[3]);
                }
            }
        }
        __syncthreads();  // nobody still reads what the next round overwrites
    }
    store_sums(sums, place, out, m, n);
}

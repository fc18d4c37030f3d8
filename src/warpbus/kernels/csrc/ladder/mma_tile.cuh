// Common parts of mma_naive.cu and mma_permuted.cu: the division of the product among blocks and warps, the way
// from global to shared memory, and the way out. Both are launched with a grid of ceil(m / 128) * ceil(n / 128) blocks
// of 128.
#pragma once

#include "common/tile.cuh"

constexpr int kTileM = 128, kTileN = 128, kTileK = 32;
constexpr int kWarpM = 64, kWarpN = 64;
constexpr int kThreads = kTileM / kWarpM * (kTileN / kWarpN) * 32;
constexpr int kBlocksM = kWarpM / 16;  // mma products down and along a warp's tile
constexpr int kBlocksN = kWarpN / 8;

// The tile of the block within the product, and of the warp within that.
struct WarpTile {
    int row0, column0, warp_row, warp_column;

    __device__ explicit WarpTile(int n) {
        const unsigned tiles_in_row = (n + kTileN - 1u) / kTileN;
        const int warp = threadIdx.x / 32;
        row0 = blockIdx.x / tiles_in_row * kTileM;
        column0 = blockIdx.x % tiles_in_row * kTileN;
        warp_row = warp / (kTileN / kWarpN) * kWarpM;
        warp_column = warp % (kTileN / kWarpN) * kWarpN;
    }
};

// Copies the tile at (row0, column0) of a [rows, columns] matrix, zeros where there is none, in chunks of 8 elements;
// `place` says where the chunk that begins at (row, column) of the tile goes.
template <int Rows, int Columns, typename Place>
__device__ __forceinline__ void load_tile(
    const ELEMENT* __restrict__ matrix, int rows, int columns, int row0, int column0, bool aligned, Place place) {
    constexpr int kChunksInRow = Columns / kChunk;
#pragma unroll
    for (int pass = 0; pass < Rows * kChunksInRow / kThreads; ++pass) {
        const int i = pass * kThreads + threadIdx.x;
        const int row = i / kChunksInRow;
        const int column = i % kChunksInRow * kChunk;
        const int valid = row0 + row < rows ? columns - column0 - column : 0;
        const ELEMENT* source = matrix + static_cast<long long>(row0 + row) * columns + column0 + column;
        *reinterpret_cast<Vector16<ELEMENT>*>(place(row, column)) = load_chunk(source, valid, aligned);
    }
}

// Rounds a warp's sums and stores those that lie inside the product. Lane 4 g + t has row g and columns 2t, 2t + 1 of
// each 16 x 8 block, and the same of row g + 8.
__device__ __forceinline__ void store_sums(
    const float (&sums)[kBlocksM][kBlocksN][4], const WarpTile& tile, ELEMENT* __restrict__ out, int m, int n) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = tile.row0 + tile.warp_row + i * 16 + half * 8 + lane / 4;
            if (row >= m) continue;
#pragma unroll
            for (int j = 0; j < kBlocksN; ++j) {
                const int column = tile.column0 + tile.warp_column + j * 8 + lane % 4 * 2;
                ELEMENT* target = out + static_cast<long long>(row) * n + column;
                if (column < n) target[0] = from_float<ELEMENT>(sums[i][j][half * 2]);
                if (column + 1 < n) target[1] = from_float<ELEMENT>(sums[i][j][half * 2 + 1]);
            }
        }
    }
}

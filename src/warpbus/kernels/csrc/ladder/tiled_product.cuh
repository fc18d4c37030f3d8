// The product of two matrices through shared memory: the loop that matmul_tiled.cu and linear_sigmoid.cu share; they differ
// in what they do with the sum.
#pragma once

#include "common/numeric.cuh"

constexpr int kTile = 32;

// A matrix in global memory: element (r, c) is data[r * row + c * column]. Strides, so that a transposed matrix needs no copy.
struct Matrix {
    const ELEMENT* data;
    long long rows, columns;
    long long row, column;

    // Zero outside the matrix: zeros add nothing to a sum, so that the edges need no loop of their own.
    __device__ float at(long long r, long long c) const {
        return r < rows && c < columns ? to_float(data[r * row + c * column]) : 0.0f;
    }
};

// One more column than the tile has: without it, the 32 threads that write a column would all meet in one bank.
using Tile = float[kTile][kTile + 1];

// Copies the tile at (first_row, first_column), one element a thread. Threads of a warp read neighbours in memory, which
// lie along a row, or, in a transposed matrix, along a column.
__device__ __forceinline__ void load_tile(const Matrix& matrix, long long first_row, long long first_column, Tile& tile) {
    const bool along_rows = matrix.column <= matrix.row;
    const int r = along_rows ? threadIdx.y : threadIdx.x;
    const int c = along_rows ? threadIdx.x : threadIdx.y;
    tile[r][c] = matrix.at(first_row + r, first_column + c);
}

// The element (row0 + threadIdx.y, column0 + threadIdx.x) of a b. Called by all kTile x kTile threads of a block together.
// A block reads each element of its strips once and uses it kTile times: the traffic of the naive kernel divided by 32.
__device__ __forceinline__ float tiled_product(const Matrix& a, const Matrix& b, long long row0, long long column0) {
    __shared__ Tile a_tile;
    __shared__ Tile b_tile;
    float sum = 0.0f;
    for (long long k0 = 0; k0 < a.columns; k0 += kTile) {
        load_tile(a, row0, k0, a_tile);
        load_tile(b, k0, column0, b_tile);
        __syncthreads();  // both tiles are complete
#pragma unroll
        for (int i = 0; i < kTile; ++i) sum += a_tile[threadIdx.y][i] * b_tile[i][threadIdx.x];
        __syncthreads();  // nobody still reads what the next round overwrites
    }
    return sum;
}

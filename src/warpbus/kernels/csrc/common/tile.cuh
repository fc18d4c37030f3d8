// Tiles of 16-bit matrices in shared memory without bank conflicts, for mma.sync and ldmatrix.
//
// A tile has Rows rows of Columns contiguous elements and is kept as chunks of 16 bytes (8 elements): what one cp.async
// copies and what one row of an ldmatrix matrix is. Shared memory has 32 banks of 4 bytes, so 8 chunks can be served at
// a time when their places modulo 128 bytes differ. The 8 rows that ldmatrix asks for lie one below the other, all in
// the same banks: so a row keeps its chunks in an order of its own, column c at c XOR key(row), and 8 consecutive rows
// have the one column in 8 different places. Copies write whole rows, whose chunks stay apart under any order.
//
//   chunks per row    8 or more (128 bytes and more): key = row mod 8
//                   4 (64 bytes, two rows in 128):  key = row / 2 mod 4
#pragma once

#include "common/numeric.cuh"
#include "common/ptx.cuh"

constexpr int kChunk = 8;  // elements per 16 bytes

template <int Columns>
__device__ __forceinline__ constexpr int chunk_key(int row) {
    static_assert(Columns == 32 || Columns % 64 == 0, "a row has 4 chunks, or a multiple of 8");
    return Columns == 32 ? row / 2 % 4 : row % 8;
}

// Where the chunk at (row, chunk) begins, in elements from the beginning of the tile.
template <int Columns>
__device__ __forceinline__ constexpr int chunk_offset(int row, int chunk) {
    return row * Columns + (chunk ^ chunk_key<Columns>(row)) * kChunk;
}

// Which of the four 8 x 8 matrices of a 16 x 16 block, as it lies in shared memory, comes second: the one below the
// first or the one to the right of it. The third and the fourth follow from it.
enum class Second { below, right };

// Loads the 16 x 16 block at (row0, column0), both multiples of 16, as the fragment of a warp: four registers, one of
// each 8 x 8 matrix. Transposed swaps rows and columns inside each matrix on the way.
template <int Columns, Second kSecond, bool Transposed, typename T>
__device__ __forceinline__ void load_block(ptx::uint32 (&fragment)[4], const T* tile, int row0, int column0) {
    const int lane = threadIdx.x % 32;
    const int down = kSecond == Second::below ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int along = kSecond == Second::below ? lane / 16 : lane / 8 % 2;
    // row0 is a multiple of 16 and column0 / kChunk is even, so key(row0 + down) = key(down), and the block's first
    // chunk can be joined by XOR: what depends on the lane alone is computed once.
    const int place = column0 / kChunk ^ along ^ chunk_key<Columns>(down);
    const T* source = tile + (row0 + down) * Columns + place * kChunk;
    if constexpr (Transposed) {
        ptx::ldmatrix_x4_trans(fragment, ptx::shared_address(source));
    } else {
        ptx::ldmatrix_x4(fragment, ptx::shared_address(source));
    }
}

// Eight elements of a row, zeros from `valid` on. `aligned` says that `source` is a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ Vector16<T> load_chunk(const T* source, int valid, bool aligned) {
    if (aligned && valid >= kChunk) return *reinterpret_cast<const Vector16<T>*>(source);
    Vector16<T> chunk;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) chunk.element[i] = i < valid ? source[i] : from_float<T>(0.0f);
    return chunk;
}

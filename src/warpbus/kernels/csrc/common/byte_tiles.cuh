// Tiles of 8-bit matrices in shared memory, copied by cp.async. To shared memory and ldmatrix, two codes are one element of
// 16 bits: m16n8k32 wants its registers filled as m16n8k16 does, with twice as many elements in each.
#pragma once

#include "common/tile.cuh"

using Pair = unsigned short;  // two codes

// A thread's share in copying the tiles of an operand, Rows by Depth bytes: one 16-byte chunk of every kRowStep-th row.
template <int Rows, int Depth, int Threads>
class TileCopy {
    static constexpr int kChunks = Depth / 16;
    static constexpr int kRowStep = Threads / kChunks;
    static constexpr int kPairsOfRow = Depth / 2;
    static constexpr int kPasses = Rows / kRowStep;
    static_assert(kPasses * kRowStep == Rows && kRowStep % 8 == 0, "a thread has one chunk_key");

public:
    // The tiles begin at (row0, depth) of a matrix with `rows` rows, `stride` bytes apart; they end before `depth_end`.
    __device__ TileCopy(const unsigned char* matrix, long long stride, int rows, int row0, int depth, int depth_end)
        : matrix_(matrix), stride_(stride) {
        const int row = threadIdx.x / kChunks;
        const int chunk = threadIdx.x % kChunks;
        source_ = matrix + (row0 + row) * stride + depth + chunk * 16;
        rows_left_ = rows - row0 - row;
        bytes_left_ = depth_end - depth - chunk * 16;
        target_ = chunk_offset<kPairsOfRow>(row, chunk);
    }

    // Starts copying the tile into a stage, zeros where the matrix ends, and goes on to the tile after it along k.
    __device__ __forceinline__ void next(Pair* stage) {
        const int inside = max(0, min(bytes_left_, 16));
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int valid = pass * kRowStep < rows_left_ ? inside : 0;
            // cp.async needs a valid address even if it reads nothing.
            const unsigned char* source = valid > 0 ? source_ + pass * kRowStep * stride_ : matrix_;
            ptx::cp_async_16(ptx::shared_address(stage + target_ + pass * kRowStep * kPairsOfRow), source, valid);
        }
        source_ += Depth;
        bytes_left_ -= Depth;
    }

private:
    const unsigned char* matrix_;
    const unsigned char* source_;
    long long stride_;
    int rows_left_, bytes_left_;
    int target_;
};

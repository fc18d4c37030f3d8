// Columns of x multiplied by the rotation of a trellis (warpbus/qtensor/trellis.py), by the tensor cores.
//
// With column 8 i + j of a block of 128, the Hadamard matrix is that of 16 rows, which acts on i, times that of 8, which acts on
// j. x, as a matrix of 16 by 8, is multiplied by one from the left and by the other from the right. Products with 1 and -1 are
// exact, and so is the sum of the two float16 numbers as which the first result meets the second matrix, to 22 bits.
#pragma once
#include "common/numeric.cuh"
#include "common/ptx.cuh"

// A lane's part of the two matrices: of the first as an A fragment, of the second, twice, as a B fragment.
struct Rotation {
    ptx::uint32 left[4], right;

    // The first matrix has blocks of 2^(levels - 3) rows; it is zero between them. levels is 5 to 7.
    __device__ __forceinline__ explicit Rotation(int levels) {
        const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = g + 8 * (i % 2), column = 2 * q + 8 * (i / 2);
            left[i] = entry(row, column, levels - 3) | entry(row, column + 1, levels - 3) << 16;
        }
        right = entry(2 * q, g, 3) | entry(2 * q + 1, g, 3) << 16;
    }

    // The bits of a float16 number: 1 or -1, or 0 between blocks of 2^levels.
    __device__ static __forceinline__ ptx::uint32 entry(int row, int column, int levels) {
        if (row >> levels != column >> levels) return 0;
        return 0x3C00u | (__popc(row & column & (1 << levels) - 1) & 1) << 15;
    }

    // The B fragment of a block, 16 by 8, rotated: the rows g and g + 8 in the columns 2 q and 2 q + 1.
    __device__ __forceinline__ void apply(float (&out)[4], ptx::uint32 b0, ptx::uint32 b1) const {
        float sum[4] = {};
        ptx::mma_m16n8k16<__half>(sum, left, b0, b1);
        ptx::uint32 a[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            a[h] = pack_pair<__half>(sum[2 * h], sum[2 * h + 1]);
            const float2 rounded = unpack_pair<__half>(a[h]);
            a[h + 2] = pack_pair<__half>(sum[2 * h] - rounded.x, sum[2 * h + 1] - rounded.y);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) out[e] = 0.0f;
        ptx::mma_m16n8k16<__half>(out, a, right, right);
    }
};

// Negates the element 2 i + e of a pair where bit 2 i + e of `signs` is set.
__device__ __forceinline__ ptx::uint32 negated(ptx::uint32 pair, ptx::uint32 signs, int i) {
    return pair ^ (signs * ((1u << 15 | 1u << 30) >> 2 * i) & 0x80008000u);
}

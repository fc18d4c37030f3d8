// The orthonormal Hadamard transform (Sylvester's order, its own inverse) of vectors whose elements are spread over lanes.
#pragma once

namespace hadamard {

// The elements that are transformed together, for vectors of `size`: the largest power of two that divides it.
__device__ __forceinline__ int block_of(int size) { return size & -size; }

// 1 / sqrt(block), rounded to nearest, for a power of two.
__device__ __forceinline__ float norm_of(int block) {
    const int exponent = 31 - __clz(block);
    return __int_as_float((127 - exponent / 2) << 23) * (exponent % 2 ? 0.70710678118654752f : 1.0f);
}

// Each lane has Count adjacent elements, and adjacent lanes have adjacent ones: the vector of a block begins at a lane that
// is a multiple of block / Count. All lanes of the warp call it, at most 32 Count elements are transformed together. The
// order of the additions is that of the reference, so that the results are equal.
template <int Count>
__device__ __forceinline__ void transform(float (&x)[Count], int block) {
#pragma unroll
    for (int step = 1; step < Count; step *= 2) {
        if (step >= block) break;
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            if (i & step) continue;
            const float first = x[i], second = x[i + step];
            x[i] = first + second;
            x[i + step] = first - second;
        }
    }
    for (int lanes = 1; Count * lanes < block; lanes *= 2) {
        const bool is_second = threadIdx.x & lanes;
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const float other = __shfl_xor_sync(0xffffffff, x[i], lanes);
            x[i] = is_second ? other - x[i] : x[i] + other;
        }
    }
    const float norm = norm_of(block);
#pragma unroll
    for (int i = 0; i < Count; ++i) x[i] *= norm;
}

}  // namespace hadamard

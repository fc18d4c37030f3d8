// How a cache of keys and values keeps its elements: as they are, or as codes of 8 or 4 bits relative to the largest
// magnitude of a token's head vector. Codes of 4 bits are two per byte, the first one in the lower half: a code c stands for
// c - 7.5 times the scale, and vectors are in the basis of common/hadamard.cuh. The numbers are those of `CODES` in
// kernels/ops/cache.py.
#pragma once

enum CacheCode { kElement = 0, kInt8 = 1, kFp8 = 2, kInt4 = 3 };

// The code of the largest magnitude; with 4 bits the end of the outer one of eight intervals.
__device__ __forceinline__ float largest_code(int code) {
    return code == kInt8 ? 127.0f : code == kFp8 ? 448.0f : 8.0f;
}

// Rounded to nearest even; in software, for GPUs that have no instruction for it (before sm_89).
__device__ __forceinline__ unsigned int to_e4m3(float x) {
    const unsigned int sign = __float_as_uint(x) >> 24 & 0x80;
    const float magnitude = fminf(fabsf(x), 448.0f);
    if (x != x) return sign | 0x7F;
    if (magnitude < 0.015625f) return sign | __float2int_rn(magnitude * 512.0f);  // subnormal: multiples of 2^-9
    const unsigned int wide = __float_as_uint(magnitude);
    // 3 of 23 bits of the mantissa stay; the exponent's bias goes from 127 to 7.
    return sign | (((wide + 0x7FFFF + (wide >> 20 & 1)) >> 20) - (120 << 3));
}

// The code of a value that was divided by its scale.
__device__ __forceinline__ unsigned int to_code(float x, int code) {
    if (code == kInt4) return max(0, min(15, __float2int_rd(x) + 8));
    return code == kInt8 ? max(-127, min(127, __float2int_rn(x))) & 0xFF : to_e4m3(x);
}

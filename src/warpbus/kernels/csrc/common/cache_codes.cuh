// How a cache of keys and values keeps its elements: as they are, or as codes of 8 bits relative to the largest magnitude of
// a token's head vector. The numbers are those of `CODES` in kernels/ops/cache.py.
#pragma once

enum CacheCode { kElement = 0, kInt8 = 1, kFp8 = 2 };

// What the largest magnitude becomes.
__device__ __forceinline__ float largest_code(int code) { return code == kInt8 ? 127.0f : 448.0f; }

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

// The byte of a value that was divided by its scale.
__device__ __forceinline__ unsigned int to_code(float x, int code) {
    return code == kInt8 ? max(-127, min(127, __float2int_rn(x))) & 0xFF : to_e4m3(x);
}

// Element types and activations, the same in every kernel.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

// Two floats rounded to a pair of 16-bit elements; `low` lies first in memory.
template <typename T>
__device__ __forceinline__ unsigned int pack_pair(float low, float high);
template <>
__device__ __forceinline__ unsigned int pack_pair<__half>(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<unsigned int*>(&pair);
}
template <>
__device__ __forceinline__ unsigned int pack_pair<__nv_bfloat16>(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<unsigned int*>(&pair);
}

// The two elements of a pair, as floats.
template <typename T>
__device__ __forceinline__ float2 unpack_pair(unsigned int pair);
template <>
__device__ __forceinline__ float2 unpack_pair<__half>(unsigned int pair) {
    return __half22float2(*reinterpret_cast<__half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 unpack_pair<__nv_bfloat16>(unsigned int pair) {
    return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&pair));
}

// As many elements as one 16-byte access moves.
template <typename T>
struct alignas(16) Vector16 {
    static constexpr int kSize = 16 / sizeof(T);
    T element[kSize];
};

// The numbers are those of `ACTIVATIONS` in kernels/ops/arguments.py.
enum Activation { kNone = 0, kSigmoid = 1, kRelu = 2, kGelu = 3, kSilu = 4 };

// By the special function unit (2 ulp): an exact division would cost more than everything else in an epilogue.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// An activation in fp32; gelu is the exact one, by the error function. The choice is the same for a whole grid, so the
// branch costs nothing beside the product in front of it.
__device__ __forceinline__ float activate(int activation, float x) {
    switch (activation) {
        case kSigmoid: return sigmoid(x);
        case kRelu: return x > 0.0f ? x : (x == x ? 0.0f : x);
        case kGelu: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
        case kSilu: return x * sigmoid(x);
        default: return x;
    }
}

// Dot products by a warp, for gemv.cu and linear_sigmoid.cu.
#pragma once

#include "common/numeric.cuh"

constexpr int kWarp = 32;
constexpr int kLanes = Vector16<ELEMENT>::kSize;
constexpr int kInFlight = 4;  // 16-byte loads of the weight that a thread has under way

// The sum over a warp, the same in every lane; the order of additions is fixed.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

// 16 bytes in one load; `data` is a multiple of 16 bytes.
__device__ __forceinline__ Vector16<ELEMENT> load_vector(const ELEMENT* data) {
    return *reinterpret_cast<const Vector16<ELEMENT>*>(data);
}

__device__ __forceinline__ float dot(const Vector16<ELEMENT>& w, const Vector16<ELEMENT>& x) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < kLanes; ++e) sum += to_float(w.element[e]) * to_float(x.element[e]);
    return sum;
}

// The sum of w[i] x[i] over begin <= i < end, the same in every lane. Called by whole warps. Each thread asks for kInFlight
// vectors of w before it uses the first: a weight matrix is read once, from far away, and only many requests at a time keep
// the memory busy. x is small, and comes from the caches. `aligned`: w + begin and x + begin are multiples of 16 bytes.
__device__ __forceinline__ float warp_dot(
    const ELEMENT* __restrict__ w, const ELEMENT* __restrict__ x, long long begin, long long end, bool aligned) {
    constexpr int kStep = kWarp * kLanes;
    long long i = begin + threadIdx.x % kWarp * kLanes;
    float sum = 0.0f;
    if (aligned) {
        for (; i + (kInFlight - 1) * kStep + kLanes <= end; i += kInFlight * kStep) {
            Vector16<ELEMENT> weights[kInFlight];
#pragma unroll
            for (int load = 0; load < kInFlight; ++load) weights[load] = load_vector(w + i + load * kStep);
#pragma unroll
            for (int load = 0; load < kInFlight; ++load) sum += dot(weights[load], load_vector(x + i + load * kStep));
        }
        for (; i + kLanes <= end; i += kStep) sum += dot(load_vector(w + i), load_vector(x + i));
    }
    for (; i < end; i += kStep) {
        for (long long e = i; e < min(i + kLanes, end); ++e) sum += to_float(w[e]) * to_float(x[e]);
    }
    return warp_sum(sum);
}

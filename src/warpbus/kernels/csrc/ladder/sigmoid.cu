// out[i] = 1 / (1 + exp(-x[i])): a kernel that calls a function of its own, which lives on the device.
//
// Shapes and layout: x, out [size], contiguous, ELEMENT = float, __half or __nv_bfloat16, computed in float32. Threads
// stride over the vector by the size of the grid. `sigmoid` itself is a `__device__` function in common/numeric.cuh, compiled
// into whatever kernel calls it: linear_sigmoid.cu does too. It needs no case for large |x|: exp(-x) overflows to infinity
// at x < -88.7, and 1 / infinity is the 0 that is meant.
#include "common/numeric.cuh"

constexpr int kBlock = 256;

extern "C" __global__ void __launch_bounds__(kBlock)
    sigmoid_forward(const ELEMENT* __restrict__ x, ELEMENT* __restrict__ out, long long size) {
    const long long stride = static_cast<long long>(gridDim.x) * kBlock;
    for (long long i = static_cast<long long>(blockIdx.x) * kBlock + threadIdx.x; i < size; i += stride) {
        out[i] = from_float<ELEMENT>(sigmoid(to_float(x[i])));
    }
}

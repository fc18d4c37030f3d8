// out = sigmoid(x wᵀ + bias), a whole layer in one kernel: bias and sigmoid are applied while the sum is still in a
// register. As three kernels, the [m, n] matrix would be written and read twice more.
//
// Shapes and layout: x [m, k], weight [n, k], out [m, n], row-major and contiguous; bias [n]. ELEMENT = float, __half or
// __nv_bfloat16, computed in float32.
//
//   linear_sigmoid_vector  m = 1: a warp an output, 16 bytes a load. `aligned`: x, weight and its rows begin at multiples
//                          of 16 bytes
//   linear_sigmoid_batch   any m: 32 x 32 tiles through shared memory; the transposed weight is just another stride
#include "ladder/tiled_product.cuh"
#include "ladder/warp_dot.cuh"

constexpr int kRowsInBlock = 256 / kWarp;

__device__ __forceinline__ ELEMENT epilogue(float sum, ELEMENT bias) {
    return from_float<ELEMENT>(sigmoid(sum + to_float(bias)));
}

extern "C" __global__ void __launch_bounds__(256, 4) linear_sigmoid_vector(
    const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ weight, const ELEMENT* __restrict__ bias,
    ELEMENT* __restrict__ out, long long n, long long k, int aligned) {
    const long long row = static_cast<long long>(blockIdx.x) * kRowsInBlock + threadIdx.x / kWarp;
    if (row >= n) return;
    const float sum = warp_dot(weight + row * k, x, 0, k, aligned);
    if (threadIdx.x % kWarp == 0) out[row] = epilogue(sum, bias[row]);
}

extern "C" __global__ void __launch_bounds__(kTile* kTile) linear_sigmoid_batch(
    const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ weight, const ELEMENT* __restrict__ bias,
    ELEMENT* __restrict__ out, long long m, long long n, long long k) {
    const int tiles_in_row = static_cast<int>((n + kTile - 1) / kTile);
    const long long row0 = static_cast<long long>(blockIdx.x / tiles_in_row) * kTile;
    const long long column0 = static_cast<long long>(blockIdx.x % tiles_in_row) * kTile;
    const float sum = tiled_product({x, m, k, k, 1}, {weight, k, n, 1, k}, row0, column0);
    const long long row = row0 + threadIdx.y;
    const long long column = column0 + threadIdx.x;
    if (row < m && column < n) out[row * n + column] = epilogue(sum, bias[column]);
}

// out = w x, a matrix times a vector: every weight is used once, so that the time is that of reading w.
//
// Shapes and layout: w [n, k] row-major and contiguous, x [k], out [n]; any n, k. ELEMENT = float, __half or
// __nv_bfloat16, summed in float32. `aligned` says that w, x and every row of w begin at multiples of 16 bytes.
//
//   gemv_thread      one thread a row: neighbouring threads read k elements apart, and most of each memory sector is wasted
//   gemv_warp        one warp a row, one element a lane: neighbours read neighbours; a shuffle adds up the warp
//   gemv_vectorised  16 bytes per lane and four such loads under way
//   gemv_split_k     a matrix with few rows has too few warps to keep the memory busy, so that several warps share a row;
//                    each writes its part to `partial` [splits, n] and gemv_combine adds the parts in a fixed order, which
//                    atomics would not: results are bitwise repeatable
#include "ladder/warp_dot.cuh"

constexpr int kBlock = 256;
constexpr int kBlocks = 4;  // on a multiprocessor: leaves 64 registers per thread for the loads under way
constexpr int kRowsInBlock = kBlock / kWarp;

extern "C" __global__ void __launch_bounds__(kBlock) gemv_thread(
    const ELEMENT* __restrict__ w, const ELEMENT* __restrict__ x, ELEMENT* __restrict__ out, long long n, long long k) {
    const long long row = static_cast<long long>(blockIdx.x) * kBlock + threadIdx.x;
    if (row >= n) return;
    float sum = 0.0f;
    for (long long i = 0; i < k; ++i) sum += to_float(w[row * k + i]) * to_float(x[i]);
    out[row] = from_float<ELEMENT>(sum);
}

// The row of this thread's warp. All lanes agree on it, so that whole warps leave where there is none.
__device__ __forceinline__ long long warp_row() {
    return static_cast<long long>(blockIdx.x) * kRowsInBlock + threadIdx.x / kWarp;
}

extern "C" __global__ void __launch_bounds__(kBlock) gemv_warp(
    const ELEMENT* __restrict__ w, const ELEMENT* __restrict__ x, ELEMENT* __restrict__ out, long long n, long long k) {
    const long long row = warp_row();
    if (row >= n) return;
    const int lane = threadIdx.x % kWarp;
    float sum = 0.0f;
    for (long long i = lane; i < k; i += kWarp) sum += to_float(w[row * k + i]) * to_float(x[i]);
    sum = warp_sum(sum);
    if (lane == 0) out[row] = from_float<ELEMENT>(sum);
}

extern "C" __global__ void __launch_bounds__(kBlock, kBlocks) gemv_vectorised(
    const ELEMENT* __restrict__ w, const ELEMENT* __restrict__ x, ELEMENT* __restrict__ out, long long n, long long k,
    int aligned) {
    const long long row = warp_row();
    if (row >= n) return;
    const float sum = warp_dot(w + row * k, x, 0, k, aligned);
    if (threadIdx.x % kWarp == 0) out[row] = from_float<ELEMENT>(sum);
}

// blockIdx.y is the part of k that this warp adds up: `part` elements, a multiple of kLanes, the last part fewer.
extern "C" __global__ void __launch_bounds__(kBlock, kBlocks) gemv_split_k(
    const ELEMENT* __restrict__ w, const ELEMENT* __restrict__ x, float* __restrict__ partial, long long n, long long k,
    long long part, int aligned) {
    const long long row = warp_row();
    if (row >= n) return;
    const long long begin = blockIdx.y * part;
    const float sum = warp_dot(w + row * k, x, begin, min(begin + part, k), aligned);
    if (threadIdx.x % kWarp == 0) partial[blockIdx.y * n + row] = sum;
}

extern "C" __global__ void __launch_bounds__(kBlock)
    gemv_combine(const float* __restrict__ partial, ELEMENT* __restrict__ out, long long n, int splits) {
    const long long row = static_cast<long long>(blockIdx.x) * kBlock + threadIdx.x;
    if (row >= n) return;
    float sum = 0.0f;
    for (int split = 0; split < splits; ++split) sum += partial[split * n + row];
    out[row] = from_float<ELEMENT>(sum);
}

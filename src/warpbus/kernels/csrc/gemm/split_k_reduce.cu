// The second half of a matrix product whose k was split among blocks: out = activation(sum of the partial sums + bias).
//
// partial: float32 [splits, m, stride], stride = n rounded up to a multiple of 8; out [m, n] with rows out_stride
// elements apart; bias [n] or null. ELEMENT = __half or __nv_bfloat16. The partial sums are added in the order of the
// splits, so that the result does not depend on which block finished first.
//
// One thread finishes 8 columns of a row; launched with ceil(m * stride / 8 / kThreads) blocks of kThreads.
#include "gemm/epilogue.cuh"

constexpr int kThreads = 128;

extern "C" __global__ void __launch_bounds__(kThreads) split_k_reduce(
    const float* __restrict__ partial, const ELEMENT* __restrict__ bias, ELEMENT* __restrict__ out, int splits, int m,
    int n, long long out_stride, int activation) {
    constexpr int kColumns = Epilogue<ELEMENT>::kColumns;
    const int groups = (n + kColumns - 1) / kColumns;  // in a row
    const long long group = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
    if (group >= static_cast<long long>(m) * groups) return;

    const long long between_splits = static_cast<long long>(m) * groups * kColumns;
    const float* source = partial + group * kColumns;
    float sums[kColumns] = {};
    for (int split = 0; split < splits; ++split, source += between_splits) {
        const float4 low = reinterpret_cast<const float4*>(source)[0];
        const float4 high = reinterpret_cast<const float4*>(source)[1];
        const float values[kColumns] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sums[i] += values[i];
    }
    const int row = static_cast<int>(group / groups);
    const int column = static_cast<int>(group % groups) * kColumns;
    Epilogue<ELEMENT>(bias, activation, out, out_stride, n, column).store(sums, row);
}

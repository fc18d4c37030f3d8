// out = a b, one thread an element: the ground floor of the ladder.
//
// Shapes and layout: a [m, k], b [k, n] with any strides (in elements); out [m, n], row-major. ELEMENT = float, __half or
// __nv_bfloat16, summed in float32.
//
// Every thread reads a whole row of a and a whole column of b from global memory: 2 k reads for 2 k operations. The threads
// of a warp share their row of a and read neighbouring elements of b, so the caches make up for some of it.
#include "common/numeric.cuh"

constexpr int kRows = 8;
constexpr int kColumns = 32;

extern "C" __global__ void __launch_bounds__(kRows * kColumns) matmul_naive(
    const ELEMENT* __restrict__ a, const ELEMENT* __restrict__ b, ELEMENT* __restrict__ out, long long m, long long n,
    long long k, long long a_row, long long a_column, long long b_row, long long b_column) {
    const long long column = static_cast<long long>(blockIdx.x) * kColumns + threadIdx.x;
    if (column >= n) return;
    // gridDim.y ends at 65,535: blocks stride over the rows of a taller matrix.
    const long long stride = static_cast<long long>(gridDim.y) * kRows;
    for (long long row = static_cast<long long>(blockIdx.y) * kRows + threadIdx.y; row < m; row += stride) {
        float sum = 0.0f;
        for (long long i = 0; i < k; ++i) {
            sum += to_float(a[row * a_row + i * a_column]) * to_float(b[i * b_row + column * b_column]);
        }
        out[row * n + column] = from_float<ELEMENT>(sum);
    }
}

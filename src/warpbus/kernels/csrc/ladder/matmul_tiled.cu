// out = a b through tiles in shared memory: each element is fetched once for 32 uses.
//
// Shapes and layout: a [m, k], b [k, n] with any strides (in elements), so that transposed products need no copy; out
// [m, n], row-major. ELEMENT = float, __half or __nv_bfloat16; the tiles and the sums are float32.
//
// A block of 32 x 32 threads computes a tile of 32 x 32 elements; blocks count row by row through the tiles on one grid
// axis, which has room for 2^31 - 1 of them.
#include "ladder/tiled_product.cuh"

extern "C" __global__ void __launch_bounds__(kTile* kTile) matmul_tiled(
    const ELEMENT* __restrict__ a, const ELEMENT* __restrict__ b, ELEMENT* __restrict__ out, long long m, long long n,
    long long k, long long a_row, long long a_column, long long b_row, long long b_column) {
    const int tiles_in_row = static_cast<int>((n + kTile - 1) / kTile);
    const long long row0 = static_cast<long long>(blockIdx.x / tiles_in_row) * kTile;
    const long long column0 = static_cast<long long>(blockIdx.x % tiles_in_row) * kTile;
    const float sum = tiled_product({a, m, k, a_row, a_column}, {b, k, n, b_row, b_column}, row0, column0);
    const long long row = row0 + threadIdx.y;
    const long long column = column0 + threadIdx.x;
    if (row < m && column < n) out[row * n + column] = from_float<ELEMENT>(sum);
}

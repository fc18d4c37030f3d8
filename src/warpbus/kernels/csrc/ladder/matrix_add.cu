// out = a + b for matrices on 2D blocks and for volumes on 3D blocks: how threads are laid over more than one axis.
//
// Shapes and layout: a, b, out [rows, columns] or [depth, rows, columns], row-major and contiguous; ELEMENT = float,
// __half or __nv_bfloat16. threadIdx.x runs along the columns, because neighbours in a warp must read neighbours in memory;
// the other axes may be anything. gridDim.y and gridDim.z end at 65,535, so blocks stride over rows and planes.
//
//   matrix_add  blocks of 32 x 8 threads
//   volume_add  blocks of 32 x 4 x 2 threads
#include "common/numeric.cuh"

extern "C" __global__ void __launch_bounds__(256) matrix_add(
    const ELEMENT* __restrict__ a, const ELEMENT* __restrict__ b, ELEMENT* __restrict__ out, long long rows,
    long long columns) {
    const long long column = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const long long stride = static_cast<long long>(gridDim.y) * blockDim.y;
    for (long long row = static_cast<long long>(blockIdx.y) * blockDim.y + threadIdx.y; row < rows; row += stride) {
        const long long i = row * columns + column;
        out[i] = from_float<ELEMENT>(to_float(a[i]) + to_float(b[i]));
    }
}

extern "C" __global__ void __launch_bounds__(256) volume_add(
    const ELEMENT* __restrict__ a, const ELEMENT* __restrict__ b, ELEMENT* __restrict__ out, long long depth,
    long long rows, long long columns) {
    const long long column = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const long long row_stride = static_cast<long long>(gridDim.y) * blockDim.y;
    const long long plane_stride = static_cast<long long>(gridDim.z) * blockDim.z;
    const long long first_row = static_cast<long long>(blockIdx.y) * blockDim.y + threadIdx.y;
    const long long first_plane = static_cast<long long>(blockIdx.z) * blockDim.z + threadIdx.z;
    for (long long plane = first_plane; plane < depth; plane += plane_stride) {
        for (long long row = first_row; row < rows; row += row_stride) {
            const long long i = (plane * rows + row) * columns + column;
            out[i] = from_float<ELEMENT>(to_float(a[i]) + to_float(b[i]));
        }
    }
}

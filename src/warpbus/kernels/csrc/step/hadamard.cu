// The Hadamard transform of rows in place: what attention over rotated values gives, in the basis of the model.
//
// Shapes and layout
//   x       [rows, size] ELEMENT = __half or __nv_bfloat16, contiguous, aligned to 16 bytes; size is a multiple of 8 up to
//           256; blocks of the largest power of two that divides it are transformed
// Launch: `lanes` (a power of two, at least size / 8, at most 32) threads share a row, 8 elements each; kBlock threads a
// block, and blocks for all rows.
#include "common/hadamard.cuh"
#include "common/ptx.cuh"
#include "step/chunk.cuh"

using step::Chunk;
using step::kChunk;

constexpr int kBlock = 128;

// The previous kernel writes x: no __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(kBlock) hadamard_rows(ELEMENT* x, int rows, int size, int lanes) {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const int chunk = threadIdx.x % lanes;
    const int row = blockIdx.x * (kBlock / lanes) + threadIdx.x / lanes;
    const bool there = row < rows && kChunk * chunk < size;
    ELEMENT* own = x + static_cast<long long>(row) * size;
    Chunk<ELEMENT> values = {};
    if (there) values = step::load_chunk(own, chunk, size, true);
    float wide[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) wide[i] = to_float(values.element[i]);
    hadamard::transform(wide, hadamard::block_of(size));
#pragma unroll
    for (int i = 0; i < kChunk; ++i) values.element[i] = from_float<ELEMENT>(wide[i]);
    if (there) step::store_chunk(own, chunk, size, true, values);
}

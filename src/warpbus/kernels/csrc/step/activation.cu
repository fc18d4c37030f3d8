// SwiGLU and GELU of the rows of a matrix, and the gradient of the first, in float32, rounded once.
//
//   swiglu: out[r, c] = silu(x[r, c]) * x[r, width + c]        x [rows, 2 width], out [rows, width]
//   swiglu_backward: out[r, :] = the gradient of x[r, :] for that of swiglu's out     gradient [rows, width], out like x
//   gelu:   out[r, c] = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))     x, out [rows, width]
//
// Shapes and layout: contiguous; ELEMENT = float, __half or __nv_bfloat16. A thread takes a chunk of 8 elements of a
// row and strides over all `chunks` (rows * ceil(width / 8)) by the size of the grid. `vectorised`: width is a multiple
// of 8 and everything is aligned to 16 bytes.
#include "common/ptx.cuh"
#include "step/chunk.cuh"

using step::Chunk;
using step::kChunk;

constexpr int kBlock = 256;

__device__ __forceinline__ float swiglu_of(float gate, float up) { return gate * sigmoid(gate) * up; }

// (1 + tanh(z)) / 2 is the sigmoid of 2 z.
__device__ __forceinline__ float gelu_of(float x) { return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); }

template <bool Gated>
__device__ __forceinline__ void apply(const ELEMENT* x, ELEMENT* out, long long chunks, int width, bool vectorised) {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const int chunks_of_row = (width + kChunk - 1) / kChunk;
    const long long stride = static_cast<long long>(gridDim.x) * kBlock;
    for (long long i = static_cast<long long>(blockIdx.x) * kBlock + threadIdx.x; i < chunks; i += stride) {
        // No memory holds 2^32 chunks, and a division of 32 bits costs a third of one of 64.
        const unsigned int row = static_cast<unsigned int>(i) / chunks_of_row;
        const int chunk = static_cast<int>(i - static_cast<long long>(row) * chunks_of_row);
        const ELEMENT* source = x + static_cast<long long>(row) * (Gated ? 2 : 1) * width;
        Chunk<ELEMENT> value = step::load_chunk(source, chunk, width, vectorised);
        if constexpr (Gated) {
            const Chunk<ELEMENT> up = step::load_chunk(source + width, chunk, width, vectorised);
#pragma unroll
            for (int e = 0; e < kChunk; ++e) {
                value.element[e] = from_float<ELEMENT>(swiglu_of(to_float(value.element[e]), to_float(up.element[e])));
            }
        } else {
#pragma unroll
            for (int e = 0; e < kChunk; ++e) {
                value.element[e] = from_float<ELEMENT>(gelu_of(to_float(value.element[e])));
            }
        }
        step::store_chunk(out + static_cast<long long>(row) * width, chunk, width, vectorised, value);
    }
}

// The previous kernel may write x and gradient: no __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(kBlock)
    swiglu(const ELEMENT* x, ELEMENT* __restrict__ out, long long chunks, int width, int vectorised) {
    apply<true>(x, out, chunks, width, vectorised);
}

extern "C" __global__ void __launch_bounds__(kBlock)
    gelu(const ELEMENT* x, ELEMENT* __restrict__ out, long long chunks, int width, int vectorised) {
    apply<false>(x, out, chunks, width, vectorised);
}

extern "C" __global__ void __launch_bounds__(kBlock)
    swiglu_backward(const ELEMENT* gradient, const ELEMENT* x, ELEMENT* __restrict__ out, long long chunks, int width,
                    int vectorised) {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const int chunks_of_row = (width + kChunk - 1) / kChunk;
    const long long stride = static_cast<long long>(gridDim.x) * kBlock;
    for (long long i = static_cast<long long>(blockIdx.x) * kBlock + threadIdx.x; i < chunks; i += stride) {
        const unsigned int row = static_cast<unsigned int>(i) / chunks_of_row;
        const int chunk = static_cast<int>(i - static_cast<long long>(row) * chunks_of_row);
        const long long begin = static_cast<long long>(row) * 2 * width;
        const Chunk<ELEMENT> incoming =
            step::load_chunk(gradient + static_cast<long long>(row) * width, chunk, width, vectorised);
        Chunk<ELEMENT> gate = step::load_chunk(x + begin, chunk, width, vectorised);
        Chunk<ELEMENT> up = step::load_chunk(x + begin + width, chunk, width, vectorised);
#pragma unroll
        for (int e = 0; e < kChunk; ++e) {
            const float by = to_float(incoming.element[e]), g = to_float(gate.element[e]), u = to_float(up.element[e]);
            const float s = sigmoid(g);
            gate.element[e] = from_float<ELEMENT>(by * u * s * (1.0f + g * (1.0f - s)));
            up.element[e] = from_float<ELEMENT>(by * g * s);
        }
        step::store_chunk(out + begin, chunk, width, vectorised, gate);
        step::store_chunk(out + begin + width, chunk, width, vectorised, up);
    }
}

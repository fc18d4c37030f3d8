// Attention of the same queries to two sets of keys, joined to that to all of them:
// out = a + (b - a) / (1 + exp(lse_a - lse_b)), computed in float32 and rounded once.
//
// Shapes and layout
//   a, b          [tokens, heads, width] ELEMENT, contiguous: the attention to each set; width is a multiple of 8
//   lse_a, lse_b  float [heads, ...]: logarithms of the sums of exp(scores), token by token; of a head, they begin
//                 lse_a_stride and lse_b_stride elements after those of the head before
//   out           as a
//   a, b and out begin at multiples of 16 bytes.
//
// Macro ELEMENT: __half or __nv_bfloat16.
// Grid: a thread for every 8 features, 256 in a block.
#include "common/ptx.cuh"
#include "step/chunk.cuh"

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
    merge_attention(const ELEMENT* a, const ELEMENT* b, const float* lse_a, const float* lse_b, ELEMENT* out,
                    long long chunks, int heads, int width, int lse_a_stride, int lse_b_stride) {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const long long chunk = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
    if (chunk >= chunks) return;
    const long long row = chunk / (width / step::kChunk);
    const int head = row % heads;
    const long long token = row / heads;
    const float difference = lse_a[static_cast<long long>(head) * lse_a_stride + token] -
                             lse_b[static_cast<long long>(head) * lse_b_stride + token];
    const float share = 1.0f / (1.0f + __expf(difference));  // of b; 0 where exp is infinite
    using Chunk = step::Chunk<ELEMENT>;
    Chunk first = reinterpret_cast<const Chunk*>(a)[chunk];
    const Chunk second = reinterpret_cast<const Chunk*>(b)[chunk];
#pragma unroll
    for (int i = 0; i < step::kChunk; ++i) {
        const float value = to_float(first.element[i]);
        first.element[i] = from_float<ELEMENT>(fmaf(share, to_float(second.element[i]) - value, value));
    }
    reinterpret_cast<Chunk*>(out)[chunk] = first;
}

// The keys of multi-head latent attention for prompts: each head's own features, and the rotary key that all heads share.
//
// Shapes and layout
//   expanded  [tokens, heads, stride] ELEMENT, contiguous: a head's features of the key come first, `nope` of them
//   rotary    [tokens, rope] ELEMENT, tokens rotary_stride elements apart
//   out       [tokens, heads, nope + rope] ELEMENT, contiguous
//   nope, rope, stride and rotary_stride are multiples of 8; all begin at multiples of 16 bytes.
//
// Macro ELEMENT: __half or __nv_bfloat16.
// Grid: a thread for every 8 features of out, 256 in a block.
#include "common/ptx.cuh"
#include "step/chunk.cuh"

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_keys(const ELEMENT* expanded, const ELEMENT* rotary, ELEMENT* out, long long chunks, int heads, int nope, int rope,
             int stride, long long rotary_stride) {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const long long chunk = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
    if (chunk >= chunks) return;
    const int of_row = (nope + rope) / step::kChunk;
    const long long row = chunk / of_row;
    const int feature = chunk % of_row * step::kChunk;
    const ELEMENT* const from =
        feature < nope ? expanded + row * stride + feature : rotary + row / heads * rotary_stride + (feature - nope);
    using Chunk = step::Chunk<ELEMENT>;
    reinterpret_cast<Chunk*>(out)[chunk] = *reinterpret_cast<const Chunk*>(from);
}

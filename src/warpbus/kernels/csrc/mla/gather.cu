// The latents and rotary keys of a sequence, from the FP8 blocks of the cache into one piece of memory, as elements.
//
// Shapes and layout
//   latents  [blocks, 1 << shift, kTokenBytes] bytes, see mla/latents.cuh; strides of blocks and tokens in bytes, multiples
//            of 16, as is the beginning; shift is at least 4
//   table    int: entry i, at i * entry_stride, names the block of the tokens i << shift to (i + 1 << shift) - 1
//   out      [tokens, kKeyDim] ELEMENT, contiguous
//
// Macro ELEMENT: __half or __nv_bfloat16.
// Grid: blocks of kThreads / 32 * kTokens tokens; a warp has kTokens, all of one block of the cache.
#define CODE 2  // kFp8
#include "mla/latents.cuh"

constexpr int kThreads = 256;
constexpr int kTokens = 4;

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_gather(const unsigned char* latents, const int* __restrict__ table, ELEMENT* __restrict__ out,
               long long block_stride, long long token_stride, long long entry_stride, int tokens, int shift) {
    const int first = (blockIdx.x * (kThreads / 32) + threadIdx.x / 32) * kTokens;
    if (first >= tokens) return;
    const long long block = table[(first >> shift) * entry_stride];
    const unsigned char* from = latents + block * block_stride + (first & ((1 << shift) - 1)) * token_stride;
    CodedTokens<kTokens> held;
    held.load([&](int token) { return from + token * token_stride; }, tokens - first);
    uint4* to = reinterpret_cast<uint4*>(out + static_cast<long long>(first) * kKeyDim);
    held.store(tokens - first, [&](int token, int piece) { return to + token * (kKeyDim / 8) + piece; });
}

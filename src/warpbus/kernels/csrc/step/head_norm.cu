// RMSNorm of the queries and keys of each head, in place.
//
//   x = round(x * rsqrt(mean(x^2) + eps)) * weight       as rms_norm in norm.cu, with the same bits
//
// Shapes and layout: qkv [rows, (heads + 2 kv_heads) * head_dim] ELEMENT, contiguous and aligned to 16 bytes: all queries,
// keys, values; the values stay. q_weight, k_weight [head_dim], aligned to 16 bytes. head_dim is a multiple of 8, at most 512.
// Launch: a warp for each row and head of queries and keys; blocks of any number of warps.
#include "common/ptx.cuh"
#include "step/chunk.cuh"

using step::Chunk;
using step::kChunk;

constexpr int kMost = 2;  // chunks of a lane

extern "C" __global__ void head_norm(ELEMENT* qkv, const ELEMENT* q_weight, const ELEMENT* k_weight, int rows, int heads,
                                     int kv_heads, int head_dim, float eps) {
    const int lane = threadIdx.x % 32;
    const int normed_heads = heads + kv_heads, chunks = head_dim / kChunk;
    const int index = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const int row = index / normed_heads, head = index % normed_heads;
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
#endif
    const ELEMENT* weight = head < heads ? q_weight : k_weight;
    Chunk<ELEMENT> scales[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {  // no previous kernel writes it
        if (lane + 32 * i < chunks) scales[i] = step::load_chunk(weight, lane + 32 * i, head_dim, true);
    }
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_wait();
#endif
    if (row >= rows) return;
    ELEMENT* x = qkv + (static_cast<long long>(row) * (heads + 2 * kv_heads) + head) * head_dim;
    Chunk<ELEMENT> values[kMost];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        if (lane + 32 * i >= chunks) continue;
        values[i] = step::load_chunk(x, lane + 32 * i, head_dim, true);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            const float element = to_float(values[i].element[j]);
            sum += element * element;
        }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
    const float factor = rsqrtf(sum / head_dim + eps);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        if (lane + 32 * i >= chunks) continue;
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            const ELEMENT normed = from_float<ELEMENT>(to_float(values[i].element[j]) * factor);
            values[i].element[j] = from_float<ELEMENT>(to_float(normed) * to_float(scales[i].element[j]));
        }
        step::store_chunk(x, lane + 32 * i, head_dim, true, values[i]);
    }
}

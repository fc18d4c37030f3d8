// The router of a mixture of experts: each token's experts and their weights.
//
//   moe_route   normed = rms_norm(x);  logits = normed weight^T in fp32;  experts, weights = choose(logits)
//   moe_choose  experts, weights = choose(logits), for logits computed elsewhere
//
// Shapes: x, normed [tokens, hidden]; weight [experts, hidden]; norm [hidden]; all ELEMENT, contiguous, hidden a multiple of 8,
// addresses multiples of 16 bytes. bias [experts], logits [tokens, experts], weights [tokens, shared + top_k] fp32; experts
// [tokens, shared + top_k] int32. norm and bias may be null; without norm, normed is not written.
// choose: see moe/choice.cuh.
//
// moe_route is for few tokens. Grid (ranks, tokens), on sm_90 a cluster of `ranks` blocks per token, else ranks = 1; kThreads
// threads; shared memory hidden * sizeof(ELEMENT) + (3 experts + groups + top_k) * 4 bytes. Each block computes the logits of an
// equal part of the experts, a warp per expert; the first block of the cluster chooses. What no kernel writes is loaded before
// the previous kernel has ended: the norm and the bias, and the router's weight into L2. moe_choose: a warp per token, 4 warps
// per block, shared memory (2 experts + groups + top_k) * 4 bytes each.
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "moe/choice.cuh"
#include "step/chunk.cuh"
#include "step/cluster.cuh"

constexpr int kThreads = 512, kWarps = kThreads / 32;
using step::kChunk;
using Vector = Vector16<ELEMENT>;
static_assert(Vector::kSize == kChunk, "16 bits an element");

__device__ __forceinline__ float block_sum(float value) {
    __shared__ float partial[kWarps];
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < kWarps ? partial[threadIdx.x % 32] : 0.0f);
}

constexpr int kAtOnce = 8;  // vectors of the weight that a thread has in flight
constexpr int kAhead = 2;   // vectors of the norm that a thread loads ahead

// Adds the products of every 32nd vector, up to kAtOnce of them, as far as there are `left`.
__device__ __forceinline__ float add_products(float sum, const Vector* x, const Vector* weight, int left) {
    uint4 loaded[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) loaded[j] = ptx::load_streaming(weight + (32 * j < left ? 32 * j : 0));
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
        if (32 * j >= left) break;
        const Vector a = x[32 * j], b = *reinterpret_cast<const Vector*>(&loaded[j]);
#pragma unroll
        for (int k = 0; k < kChunk; ++k) sum = fmaf(to_float(a.element[k]), to_float(b.element[k]), sum);
    }
    return sum;
}

// The previous kernel may write x: no __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    moe_route(const ELEMENT* x, const ELEMENT* norm, const ELEMENT* weight, const float* bias, ELEMENT* normed, int* experts,
              float* weights, int hidden, float eps, const Choice c) {
    extern __shared__ __align__(16) unsigned char memory[];
    Vector* const staged = reinterpret_cast<Vector*>(memory);
    float* const logits = reinterpret_cast<float*>(memory + hidden * sizeof(ELEMENT));
    const int ranks = gridDim.x, rank = blockIdx.x, token = blockIdx.y;
    const int first = c.experts_of_layer * rank / ranks, last = c.experts_of_layer * (rank + 1) / ranks;
    const int vectors = hidden / kChunk;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned* const keys = reinterpret_cast<unsigned*>(logits + c.experts_of_layer);
    float* const biases = reinterpret_cast<float*>(keys + c.experts_of_layer + c.groups + c.top_k);
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
#endif
    if (rank == 0 && bias != nullptr) {
        for (int e = threadIdx.x; e < c.experts_of_layer; e += kThreads) biases[e] = bias[e];
    }
    Vector scales[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
        const int i = threadIdx.x + j * kThreads;
        if (norm != nullptr && i < vectors) scales[j] = reinterpret_cast<const Vector*>(norm)[i];
    }
#if __CUDA_ARCH__ >= 900
    if (token == 0) {
        const char* const mine = reinterpret_cast<const char*>(weight + static_cast<long long>(first) * hidden);
        const long long bytes = static_cast<long long>(last - first) * hidden * sizeof(ELEMENT);
        for (long long at = 128 * threadIdx.x; at < bytes; at += 128 * kThreads) step::prefetch_l2(mine + at);
    }
    ptx::cluster_sync();  // the first block has begun, to which the others send
    ptx::griddepcontrol_wait();
#endif
    const Vector* const row = reinterpret_cast<const Vector*>(x) + static_cast<long long>(token) * vectors;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < vectors; i += kThreads) {
        const Vector values = row[i];
        staged[i] = values;
#pragma unroll
        for (int e = 0; e < kChunk; ++e) squares = fmaf(to_float(values.element[e]), to_float(values.element[e]), squares);
    }
    if (norm != nullptr) {
        const float factor = rsqrtf(block_sum(squares) / hidden + eps);
        const auto apply = [&](int i, const Vector& scale) {
            Vector values = staged[i];
#pragma unroll
            for (int e = 0; e < kChunk; ++e) {
                // Rounded before the weight, as the layer is defined.
                const ELEMENT unscaled = from_float<ELEMENT>(to_float(values.element[e]) * factor);
                values.element[e] = from_float<ELEMENT>(to_float(unscaled) * to_float(scale.element[e]));
            }
            staged[i] = values;
            if (i % ranks == rank) {
                reinterpret_cast<Vector*>(normed)[static_cast<long long>(token) * vectors + i] = values;
            }
        };
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int i = threadIdx.x + j * kThreads;
            if (i < vectors) apply(i, scales[j]);
        }
        for (int i = threadIdx.x + kAhead * kThreads; i < vectors; i += kThreads) {
            apply(i, reinterpret_cast<const Vector*>(norm)[i]);
        }
    }
    __syncthreads();
    for (int e = first + warp; e < last; e += kWarps) {
        const Vector* const its = reinterpret_cast<const Vector*>(weight) + static_cast<long long>(e) * vectors;
        float sum = 0.0f;
        for (int i = lane; i < vectors; i += 32 * kAtOnce) sum = add_products(sum, staged + i, its + i, vectors - i);
        sum = warp_sum(sum);
        if (lane == 0) *step::of_block(logits + e, 0) = sum;
    }
    step::row_sync();
    if (rank == 0 && warp == 0) {
        const long long slot = static_cast<long long>(token) * (c.shared_expert + c.top_k);
        choose(logits, keys, bias == nullptr ? nullptr : biases, experts + slot, weights + slot, c);
    }
}

extern "C" __global__ void __launch_bounds__(128)
    moe_choose(const float* logits, const float* bias, int* experts, float* weights, int tokens, const Choice c) {
    extern __shared__ __align__(16) unsigned char memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int token = blockIdx.x * 4 + warp;
    float* const scores = reinterpret_cast<float*>(memory) + warp * (2 * c.experts_of_layer + c.groups + c.top_k);
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    if (token >= tokens) return;
    for (int e = lane; e < c.experts_of_layer; e += 32) scores[e] = logits[static_cast<long long>(token) * c.experts_of_layer + e];
    __syncwarp();
    const long long slot = static_cast<long long>(token) * (c.shared_expert + c.top_k);
    choose(scores, reinterpret_cast<unsigned*>(scores + c.experts_of_layer), bias, experts + slot, weights + slot, c);
}

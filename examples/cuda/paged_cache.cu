// A paged KV cache of 8 bits: keys of new tokens are rounded and written where a block table says, and read again.
//
//     warpbus cuda run examples/cuda/paged_cache.cu
#include "check.h"

#include <cmath>
#include <vector>

constexpr int kBlockTokens = 16, kDim = 128;  // tokens per block of the cache, numbers per vector

__device__ float warp_max(float value) {
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, step));
    return value;  // of all 32 lanes, in all of them
}

// The slot of a token: its block of the cache, and its place there.
__device__ int slot_of(const int *table, int position) {
    return table[position / kBlockTokens] * kBlockTokens + position % kBlockTokens;
}

// One warp per token: a scale for its vector, and 128 codes of 8 bits.
__global__ void append(const float *keys, const int *table, int first, signed char *codes, float *scales) {
    const int token = blockIdx.x, slot = slot_of(table, first + token);
    float largest = 0;
    for (int i = threadIdx.x; i < kDim; i += 32) largest = fmaxf(largest, fabsf(keys[token * kDim + i]));
    const float scale = warp_max(largest) / 127;
    for (int i = threadIdx.x; i < kDim; i += 32)
        codes[slot * kDim + i] = scale > 0 ? static_cast<signed char>(rintf(keys[token * kDim + i] / scale)) : 0;
    if (threadIdx.x == 0) scales[slot] = scale;
}

__global__ void read(const signed char *codes, const float *scales, const int *table, float *keys) {
    const int token = blockIdx.x, slot = slot_of(table, token);
    for (int i = threadIdx.x; i < kDim; i += 32) keys[token * kDim + i] = codes[slot * kDim + i] * scales[slot];
}

int main() {
    const int tokens = 40, blocks = 8;
    const int table[] = {6, 1, 3};  // blocks of the sequence, in its order
    std::vector<float> keys(tokens * kDim), found(tokens * kDim);
    for (int i = 0; i < tokens * kDim; ++i) keys[i] = std::sin(0.37f * i) * (1 + i / kDim);

    float *d_keys, *d_scales, *d_found;
    signed char *d_codes;
    int *d_table;
    CHECK(cudaMalloc(&d_keys, keys.size() * sizeof(float)));
    CHECK(cudaMalloc(&d_found, keys.size() * sizeof(float)));
    CHECK(cudaMalloc(&d_scales, blocks * kBlockTokens * sizeof(float)));
    CHECK(cudaMalloc(&d_codes, blocks * kBlockTokens * kDim));
    CHECK(cudaMalloc(&d_table, sizeof table));
    CHECK(cudaMemcpy(d_keys, keys.data(), keys.size() * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_table, table, sizeof table, cudaMemcpyHostToDevice));
    append<<<tokens - 1, 32>>>(d_keys, d_table, 0, d_codes, d_scales);                              // a prompt
    append<<<1, 32>>>(d_keys + (tokens - 1) * kDim, d_table, tokens - 1, d_codes, d_scales);        // one more token
    read<<<tokens, 32>>>(d_codes, d_scales, d_table, d_found);
    CHECK_LAUNCH();
    CHECK(cudaMemcpy(found.data(), d_found, keys.size() * sizeof(float), cudaMemcpyDeviceToHost));

    int wrong = 0;
    for (int token = 0; token < tokens; ++token) {
        float largest = 0;
        for (int i = 0; i < kDim; ++i) largest = std::fmax(largest, std::fabs(keys[token * kDim + i]));
        for (int i = 0; i < kDim; ++i)  // rounding is wrong by half a step, at most
            wrong += !(std::fabs(found[token * kDim + i] - keys[token * kDim + i]) <= 0.5001f * largest / 127);
    }
    printf("%d tokens in 3 of %d blocks, %d bytes per vector instead of %d: ", tokens, blocks, kDim + 4, 2 * kDim);
    printf(wrong ? "%d numbers are wrong\n" : "all within half a step\n", wrong);
    CHECK(cudaFree(d_keys));
    CHECK(cudaFree(d_found));
    CHECK(cudaFree(d_scales));
    CHECK(cudaFree(d_codes));
    CHECK(cudaFree(d_table));
    return wrong != 0;
}

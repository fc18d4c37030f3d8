// Attention of single new tokens over a cache in blocks, of float32 or of 4-bit codes: rotates queries and keys, and writes
// keys and values to a cache of float32. Codes are two per byte, see common/cache_codes.cuh; the queries are multiplied by the
// Hadamard matrix, and so is the output.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/lanes.h"
#include "cpu/threads.h"

// Shared with Python: warpbus/kernels/ops/attention.py. Strides are in elements, for codes in bytes.
struct Attention {
    const float* qkv;          // [rows, (heads + 2 kv_heads) dim]
    const float* table;        // [positions, rotary]: cosines, then sines
    const int32_t* positions;  // [rows]
    const int32_t* blocks;     // [rows, ...]
    void* keys;                // [blocks, kv_heads, block, dim] float32, or dim / 2 bytes of codes
    void* values;
    const float* key_scales;  // [blocks, kv_heads, block]; null for float32
    const float* value_scales;
    float* out;  // [rows, heads, dim]
    int64_t blocks_stride, key_block, key_head, key_token, value_block, value_head, value_token;
    int64_t key_scale_block, key_scale_head, value_scale_block, value_scale_head;
    int64_t rows, heads, kv_heads, block, dim, rotary, interleaved, stored, threads;
};

constexpr int kQueries = 4;  // that are multiplied with a key while it is in the cache

inline float dot_product(const float* a, const float* b, int64_t size) {
    Floats lanes = zero_floats();
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) lanes = multiply_add(load(a + i), load(b + i), lanes);
    float parts[kLanes], rest = 0.0f;
    store(parts, lanes);
    for (; i < size; ++i) rest += a[i] * b[i];
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; ++l) parts[l] += parts[l + half];
    }
    return parts[0] + rest;
}

// sums += weight * a
inline void accumulate(const float* a, float weight, int64_t size, float* sums) {
    const Floats spread_weight = spread(weight);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(sums + i, multiply_add(load(a + i), spread_weight, load(sums + i)));
    for (; i < size; ++i) sums[i] += weight * a[i];
}

inline void rotate(const float* x, const float* angles, const Attention& task, float scale, float* out) {
    const int64_t half = task.rotary / 2;
    for (int64_t i = 0; i < half; ++i) {
        const int64_t one = task.interleaved ? 2 * i : i, two = task.interleaved ? 2 * i + 1 : i + half;
        const float cosine = angles[i], sine = angles[half + i];
        out[one] = (x[one] * cosine - x[two] * sine) * scale;
        out[two] = (x[two] * cosine + x[one] * sine) * scale;
    }
    for (int64_t i = task.rotary; i < task.dim; ++i) out[i] = x[i] * scale;
}

// Softmax of scores / their sum, in place.
inline void softmax(float* scores, int64_t count) {
    float most = -INFINITY;
    for (int64_t i = 0; i < count; ++i) most = scores[i] > most ? scores[i] : most;
    const Floats shift = spread(-most);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(scores + i, exponential(add(load(scores + i), shift)));
    for (; i < count; ++i) scores[i] = std::exp(scores[i] - most);
    float sum = 0.0f;
    for (int64_t j = 0; j < count; ++j) sum += scores[j];
    for (int64_t j = 0; j < count; ++j) scores[j] /= sum;
}

// The values of each byte of two codes.
struct CodePairs {
    float pair[256][2];
    CodePairs() {
        for (int i = 0; i < 256; ++i) {
            pair[i][0] = static_cast<float>(i % 16) - 7.5f;
            pair[i][1] = static_cast<float>(i / 16) - 7.5f;
        }
    }
};

// Keys or values of a row and a KV head.
struct Vectors {
    const void* cache;
    const float* scales;
    int64_t cache_block, cache_token, scale_block;
    int64_t cache_first, scale_first;  // where those of the KV head begin

    // The vector of a token, without its scale; `unpacked` has room for one.
    const float* read(int64_t block, int64_t offset, int64_t dim, float* unpacked) const {
        static const CodePairs code_pairs;
        const int64_t at = cache_first + block * cache_block + offset * cache_token;
        if (scales == nullptr) return static_cast<const float*>(cache) + at;
        const uint8_t* codes = static_cast<const uint8_t*>(cache) + at;
        for (int64_t i = 0; i < dim / 2; ++i) std::memcpy(unpacked + 2 * i, code_pairs.pair[codes[i]], 2 * sizeof(float));
        return unpacked;
    }
    float scale(int64_t block, int64_t offset) const {
        return scales == nullptr ? 1.0f : scales[scale_first + block * scale_block + offset];
    }
};

// The orthonormal Hadamard transform of blocks of a vector, of the largest power of two that divides its size.
inline void hadamard(float* x, int64_t dim) {
    const int64_t block = dim & -dim;
    for (int64_t step = 1; step < block; step *= 2) {
        for (int64_t begin = 0; begin < dim; begin += 2 * step) {
            for (int64_t i = begin; i < begin + step; ++i) {
                const float first = x[i], second = x[i + step];
                x[i] = first + second;
                x[i + step] = first - second;
            }
        }
    }
    const float norm = 1.0f / std::sqrt(static_cast<float>(block));
    for (int64_t i = 0; i < dim; ++i) x[i] *= norm;
}

inline void attend(const Attention& task, const float* queries, int64_t row, int64_t kv_head, int count, float* out) {
    const int64_t tokens = static_cast<int64_t>(task.positions[row]) + 1, dim = task.dim;
    const int32_t* blocks = task.blocks + row * task.blocks_stride;
    const Vectors keys = {task.keys, task.key_scales, task.key_block, task.key_token, task.key_scale_block,
                          kv_head * task.key_head, kv_head * task.key_scale_head};
    const Vectors values = {task.values, task.value_scales, task.value_block, task.value_token, task.value_scale_block,
                            kv_head * task.value_head, kv_head * task.value_scale_head};
    std::vector<float> scores(count * tokens), unpacked(dim);
    for (int64_t t = 0; t < tokens; ++t) {
        const int64_t block = blocks[t / task.block], offset = t % task.block;
        const float* key = keys.read(block, offset, dim, unpacked.data());
        const float scale = keys.scale(block, offset);
        for (int q = 0; q < count; ++q) scores[q * tokens + t] = dot_product(queries + q * dim, key, dim) * scale;
    }
    for (int q = 0; q < count; ++q) softmax(scores.data() + q * tokens, tokens);
    for (int64_t i = 0; i < count * dim; ++i) out[i] = 0.0f;
    for (int64_t t = 0; t < tokens; ++t) {
        const int64_t block = blocks[t / task.block], offset = t % task.block;
        const float* value = values.read(block, offset, dim, unpacked.data());
        const float scale = values.scale(block, offset);
        for (int q = 0; q < count; ++q) accumulate(value, scores[q * tokens + t] * scale, dim, out + q * dim);
    }
    for (int q = 0; q < count && task.key_scales != nullptr; ++q) hadamard(out + q * dim, dim);
}

inline void decode_attention(const Attention& task) {
    const int64_t dim = task.dim, group = task.heads / task.kv_heads, width = (task.heads + 2 * task.kv_heads) * dim;
    std::vector<float> queries(task.rows * task.heads * dim);
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    const auto prepare = [&](int64_t row) {
        const float *from = task.qkv + row * width, *angles = task.table + task.positions[row] * task.rotary;
        for (int64_t h = 0; h < task.heads; ++h) {
            float* query = queries.data() + (row * task.heads + h) * dim;
            rotate(from + h * dim, angles, task, scale, query);
            if (task.key_scales != nullptr) hadamard(query, dim);
        }
        if (task.stored) return;
        const int64_t block = task.blocks[row * task.blocks_stride + task.positions[row] / task.block];
        const int64_t offset = task.positions[row] % task.block;
        for (int64_t h = 0; h < task.kv_heads; ++h) {
            float* key = static_cast<float*>(task.keys) + block * task.key_block + h * task.key_head + offset * task.key_token;
            float* value =
                static_cast<float*>(task.values) + block * task.value_block + h * task.value_head + offset * task.value_token;
            rotate(from + (task.heads + h) * dim, angles, task, 1.0f, key);
            std::memcpy(value, from + (task.heads + task.kv_heads + h) * dim, dim * sizeof(float));
        }
    };
    const int64_t chunks = (group + kQueries - 1) / kQueries;
    // Every key is written before a row attends to it: with `stored` by others, else it is the row's own.
    for (int64_t row = 0; row < task.rows; ++row) prepare(row);
    Team(static_cast<int>(task.threads)).run([&](Team& shared) {
        shared.share(0, task.rows * task.kv_heads * chunks, [&](int64_t item) {
            const int64_t row = item / chunks / task.kv_heads, kv_head = item / chunks % task.kv_heads;
            const int64_t first = item % chunks * kQueries;
            const int count = static_cast<int>(group - first < kQueries ? group - first : kQueries);
            const int64_t at = (row * task.heads + kv_head * group + first) * dim;
            attend(task, queries.data() + at, row, kv_head, count, task.out + at);
        });
    });
}

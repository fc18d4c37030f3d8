// Attention of single new tokens over a float32 cache in blocks: rotates queries and keys, writes keys and values.
#pragma once

#include <cmath>
#include <vector>

#include "cpu/lanes.h"
#include "cpu/threads.h"

// Shared with Python: warpbus/kernels/ops/cpu_attention.py. Strides are in elements.
struct Attention {
    const float* qkv;          // [rows, (heads + 2 kv_heads) dim]
    const float* table;        // [positions, rotary]: cosines, then sines
    const int32_t* positions;  // [rows]
    const int32_t* blocks;     // [rows, ...]
    float* keys;               // [blocks, kv_heads, block, dim]
    float* values;
    float* out;  // [rows, heads, dim]
    int64_t blocks_stride, key_block, key_head, key_token, value_block, value_head, value_token;
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

inline void attend(const Attention& task, const float* queries, int64_t row, int64_t kv_head, int count, float* out) {
    const int64_t tokens = static_cast<int64_t>(task.positions[row]) + 1, dim = task.dim;
    const int32_t* blocks = task.blocks + row * task.blocks_stride;
    std::vector<float> scores(count * tokens);
    for (int64_t t = 0; t < tokens; ++t) {
        const float* key = task.keys + blocks[t / task.block] * task.key_block + kv_head * task.key_head +
                           t % task.block * task.key_token;
        for (int q = 0; q < count; ++q) scores[q * tokens + t] = dot_product(queries + q * dim, key, dim);
    }
    for (int q = 0; q < count; ++q) softmax(scores.data() + q * tokens, tokens);
    for (int64_t i = 0; i < count * dim; ++i) out[i] = 0.0f;
    for (int64_t t = 0; t < tokens; ++t) {
        const float* value = task.values + blocks[t / task.block] * task.value_block + kv_head * task.value_head +
                             t % task.block * task.value_token;
        for (int q = 0; q < count; ++q) accumulate(value, scores[q * tokens + t], dim, out + q * dim);
    }
}

inline void decode_attention(const Attention& task) {
    const int64_t dim = task.dim, group = task.heads / task.kv_heads, width = (task.heads + 2 * task.kv_heads) * dim;
    std::vector<float> queries(task.rows * task.heads * dim);
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    const auto prepare = [&](int64_t row) {
        const float *from = task.qkv + row * width, *angles = task.table + task.positions[row] * task.rotary;
        for (int64_t h = 0; h < task.heads; ++h) {
            rotate(from + h * dim, angles, task, scale, queries.data() + (row * task.heads + h) * dim);
        }
        if (task.stored) return;
        const int64_t block = task.blocks[row * task.blocks_stride + task.positions[row] / task.block];
        const int64_t offset = task.positions[row] % task.block;
        for (int64_t h = 0; h < task.kv_heads; ++h) {
            float* key = task.keys + block * task.key_block + h * task.key_head + offset * task.key_token;
            float* value = task.values + block * task.value_block + h * task.value_head + offset * task.value_token;
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

// How a token chooses its experts from the router's logits; `RouterSpec` in models/layer_spec.py says what the fields mean.
#pragma once

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

struct Choice {
    int experts_of_layer, top_k;
    int groups, top_groups;
    int softmax;     // scores by softmax over all experts; else by sigmoid
    int normalized;  // weights are divided by their sum
    int shared_expert;  // 1: the first slot of a token is expert number `experts`, with weight 1
    float scale;
    const int* slots;  // [experts + shared]: what is written instead of an expert's number; or null
    int* counts;       // [experts]: how often each was chosen, which is added to; or null
};

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, offset));
    return value;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffff, value, offset);
    return value;
}

// A key in an order of whole numbers: the larger the number the larger the float; 0 for NaN and for what is taken out.
__device__ __forceinline__ unsigned ordered(float key) {
    const unsigned bits = __float_as_uint(key);
    if (key != key) return 0;
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// The place of the largest of `keys[0..count)`, the first of equals; `fallback` if all are 0.
__device__ __forceinline__ int warp_argmax(const unsigned* keys, int count, int fallback) {
    unsigned best = 0;
    int place = 0x7fffffff;
    for (int i = threadIdx.x % 32; i < count; i += 32) {
        if (keys[i] > best) best = keys[i], place = i;
    }
    const unsigned largest = __reduce_max_sync(0xffffffff, best);
    const int first = __reduce_min_sync(0xffffffff, best == largest ? place : 0x7fffffff);
    return largest > 0 ? first : fallback;
}

// Chooses the experts of one token, by one warp. `scores` holds the logits [experts] and is overwritten; `keys` is room in
// shared memory for [experts + groups + top_k]. Writes [shared + top_k] experts and weights, the best expert first.
__device__ __forceinline__ void choose(float* scores, unsigned* keys, const float* bias, int* experts, float* weights,
                                       const Choice& c) {
    const int lane = threadIdx.x % 32;
    unsigned* const chosen = keys + c.experts_of_layer + c.groups;
    float largest = minus_infinity(), sum = 0.0f;
    if (c.softmax) {
        for (int e = lane; e < c.experts_of_layer; e += 32) largest = fmaxf(largest, scores[e]);
        largest = warp_max(largest);
        for (int e = lane; e < c.experts_of_layer; e += 32) sum += expf(scores[e] - largest);
        sum = warp_sum(sum);
    }
    for (int e = lane; e < c.experts_of_layer; e += 32) {
        const float score = c.softmax ? expf(scores[e] - largest) / sum : 1.0f / (1.0f + expf(-scores[e]));
        scores[e] = score;
        keys[e] = ordered(bias == nullptr ? score : score + bias[e]);
    }
    __syncwarp();
    if (c.top_groups < c.groups) {
        // A group's score is the sum of its two best experts'. Its experts are out unless it is among the best groups.
        unsigned* const of_group = keys + c.experts_of_layer;
        const int size = c.experts_of_layer / c.groups;
        for (int g = lane; g < c.groups; g += 32) {
            float first = minus_infinity(), second = minus_infinity();
            for (int i = g * size; i < (g + 1) * size; ++i) {
                const float key = bias == nullptr ? scores[i] : scores[i] + bias[i];
                if (key > first) second = first, first = key;
                else if (key > second) second = key;
            }
            of_group[g] = ordered(first + second);
        }
        __syncwarp();
        for (int round = 0; round < c.top_groups; ++round) {
            const int g = warp_argmax(of_group, c.groups, round);
            __syncwarp();
            if (lane == 0) of_group[g] = 0;
            // The chosen groups' experts are marked by adding nothing; all others are taken out below.
            for (int i = lane; i < size; i += 32) scores[g * size + i] = -1.0f - scores[g * size + i];
            __syncwarp();
        }
        for (int e = lane; e < c.experts_of_layer; e += 32) {
            const bool in = scores[e] < 0.0f;
            if (in) scores[e] = -1.0f - scores[e];
            else keys[e] = 0;
        }
        __syncwarp();
    }
    float total = 0.0f;
    for (int slot = 0; slot < c.top_k; ++slot) {
        const int e = warp_argmax(keys, c.experts_of_layer, slot);
        __syncwarp();
        total += scores[e];
        if (lane == 0) {
            keys[e] = 0;
            chosen[slot] = e;
        }
        __syncwarp();
    }
    // The scores of a softmax cannot all be zero.
    const float factor = c.normalized ? c.scale / (total + (c.softmax ? 0.0f : 1e-20f)) : c.scale;
    for (int slot = lane; slot < c.top_k; slot += 32) {
        const int e = chosen[slot];
        experts[c.shared_expert + slot] = c.slots == nullptr ? e : c.slots[e];
        weights[c.shared_expert + slot] = scores[e] * factor;
        if (c.counts != nullptr) atomicAdd(&c.counts[e], 1);
    }
    if (c.shared_expert && lane == 0) {
        experts[0] = c.slots == nullptr ? c.experts_of_layer : c.slots[c.experts_of_layer];
        weights[0] = 1.0f;
    }
}

// Rows of float32 to 8 bits, after an RMSNorm where there is one.
#pragma once

#include <cmath>

#include "cpu/lanes.h"
#include "cpu/matrix.h"

// Sums of 16 partial sums: the same bits for every instruction set with multiply_add.
inline float sum_of_squares(const float* x, int64_t size) {
    constexpr int kParts = 16 / kLanes;
    Floats parts[kParts];
    for (Floats& part : parts) part = zero_floats();
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
        for (int p = 0; p < kParts; ++p) {
            const Floats a = load(x + i + p * kLanes);
            parts[p] = multiply_add(a, a, parts[p]);
        }
    }
    float lanes[16], rest = 0.0f;
    for (int p = 0; p < kParts; ++p) store(lanes + p * kLanes, parts[p]);
    for (; i < size; ++i) rest += x[i] * x[i];
    for (int half = 8; half > 0; half /= 2) {
        for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    }
    return lanes[0] + rest;
}

// normed[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]
inline void normalize(const float* x, const float* weight, float eps, int64_t size, float* normed) {
    const float factor = 1.0f / std::sqrt(sum_of_squares(x, size) / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < size; ++i) normed[i] = x[i] * factor * weight[i];
}

// Quantize row `at` of a strip whose first row is `first`.
//
// A block with an element that is infinite or NaN gets the scale NaN, so that the results are NaN.
inline void quantize_row(const Matrix& w, const float* x, const Activations& to, int64_t first, Strip strip, int at) {
    const int64_t rows = strip.rows, run = strip.run;
    int8_t* codes = to.codes + first * to.columns + run * at;
    float* scales = to.scales + first * to.blocks + at;
    int32_t* sums = to.sums + first * to.blocks + at;
    const int64_t per_group = w.blocks_of_group(), padded = w.padded_group();
    for (int64_t block = 0; block < to.blocks; ++block) {
        const int64_t group = block / per_group, begin = block % per_group * kBlock;
        const int64_t size = w.group - begin < kBlock ? w.group - begin : kBlock;
        const int64_t width = padded - begin < kBlock ? padded - begin : kBlock;
        const float* from = x + group * w.group + begin;
        uint32_t largest = 0;  // of the magnitudes, as bits: in their order, and NaN above all numbers
        float values[kBlock] = {};
        std::memcpy(values, from, size * sizeof(float));
        uint32_t bits[kBlock];
        std::memcpy(bits, values, sizeof(bits));
        for (uint32_t each : bits) largest = largest > (each & 0x7fffffffu) ? largest : each & 0x7fffffffu;
        float magnitude;
        std::memcpy(&magnitude, &largest, sizeof(magnitude));
        const bool finite = largest < 0x7f800000u;
        // The reciprocal of a tiny magnitude is infinite; such a block counts as zeros.
        const float inverse = finite && magnitude > 1e-36f ? 127.0f / magnitude : 0.0f;
        int32_t sum = 0, rounded[kBlock];
        for (int i = 0; i < kBlock; ++i) {
            // The low bits of a float between 2^23 and 2^24 are its integer part, rounded to the nearest.
            const float shifted = (finite ? values[i] : 0.0f) * inverse + 12582912.0f;
            int32_t integer;
            std::memcpy(&integer, &shifted, sizeof(integer));
            rounded[i] = integer - 0x4b400000;
            sum += rounded[i];
        }
        int8_t* out = codes + (group * padded + begin) * rows;
        for (int64_t i = 0; i < width; i += run) {
            for (int64_t j = 0; j < run; ++j) out[i * rows + j] = static_cast<int8_t>(rounded[i + j]);
        }
        scales[block * rows] = finite ? magnitude / 127.0f : NAN;
        sums[block * rows] = sum;
    }
}

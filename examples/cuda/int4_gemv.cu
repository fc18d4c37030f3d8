// y = W x with 4-bit weights: groups of 64 weights share a scale, eight codes lie in a 32-bit word.
//
//     warpbus cuda run examples/cuda/int4_gemv.cu
#include "check.h"

#include <cmath>
#include <cstdint>
#include <vector>

constexpr int kGroup = 64;

// One thread per row. Code c of 0..15 stands for (c - 8) * scale.
__global__ void by_thread(const uint32_t *codes, const float *scales, const float *x, float *y, int rows, int columns) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float sum = 0;
    for (int i = 0; i < columns; ++i) {
        const int at = row * columns + i;
        const int code = codes[at / 8] >> at % 8 * 4 & 15;
        sum += (code - 8) * scales[at / kGroup] * x[i];
    }
    y[row] = sum;
}

// One warp per row: neighbouring lanes read neighbouring words. Within a word, the scale is multiplied once.
__global__ void by_warp(const uint32_t *codes, const float *scales, const float *x, float *y, int columns) {
    const int row = blockIdx.x, words = columns / 8;
    float sum = 0;
    for (int word = threadIdx.x; word < words; word += 32) {
        const uint32_t packed = codes[row * words + word];
        float part = 0;
        for (int i = 0; i < 8; ++i) part += (int(packed >> 4 * i & 15) - 8) * x[word * 8 + i];
        sum += part * scales[(row * columns + word * 8) / kGroup];
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xFFFFFFFF, sum, step);
    if (threadIdx.x == 0) y[row] = sum;
}

int main() {
    const int rows = 100, columns = 1024, count = rows * columns;
    std::vector<float> w(count), x(columns), scales(count / kGroup), y(rows);
    std::vector<uint32_t> codes(count / 8, 0);
    uint32_t random = 1;
    const auto next = [&random] { return int((random = random * 1664525u + 1013904223u) >> 16) / 32768.0f - 1; };
    for (float &each : w) each = next();
    for (float &each : x) each = next();

    // Round to nearest: the largest weight of a group becomes code 15 or 1, that is 7 or -7 times the scale.
    for (int group = 0; group < count / kGroup; ++group) {
        float most = 0;
        for (int i = group * kGroup; i < (group + 1) * kGroup; ++i) most = std::fmax(most, std::fabs(w[i]));
        scales[group] = most > 0 ? most / 7 : 1;
        for (int i = group * kGroup; i < (group + 1) * kGroup; ++i) {
            const int code = int(std::lround(w[i] / scales[group])) + 8;
            codes[i / 8] |= uint32_t(code) << i % 8 * 4;
        }
    }

    // What the kernels have to give, and what the weights gave before they were rounded.
    std::vector<double> expected(rows, 0);
    double error = 0, size = 0;
    for (int row = 0; row < rows; ++row) {
        double exact = 0;
        for (int i = 0; i < columns; ++i) {
            const int at = row * columns + i;
            const int code = codes[at / 8] >> at % 8 * 4 & 15;
            expected[row] += double(code - 8) * scales[at / kGroup] * x[i];
            exact += double(w[at]) * x[i];
        }
        error += (expected[row] - exact) * (expected[row] - exact);
        size += exact * exact;
    }
    printf("%zu bytes instead of %zu, the product changes by %.1f %%\n", codes.size() * 4 + scales.size() * 4,
           w.size() * 4, 100 * std::sqrt(error / size));

    uint32_t *d_codes;
    float *d_scales, *d_x, *d_y;
    CHECK(cudaMalloc(&d_codes, codes.size() * 4));
    CHECK(cudaMalloc(&d_scales, scales.size() * 4));
    CHECK(cudaMalloc(&d_x, columns * 4));
    CHECK(cudaMalloc(&d_y, rows * 4));
    CHECK(cudaMemcpy(d_codes, codes.data(), codes.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_scales, scales.data(), scales.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_x, x.data(), columns * 4, cudaMemcpyHostToDevice));
    bool right = true;
    for (int version = 0; version < 2; ++version) {
        CHECK(cudaMemset(d_y, 0xFF, rows * 4));
        if (version == 0)
            by_thread<<<(rows + 63) / 64, 64>>>(d_codes, d_scales, d_x, d_y, rows, columns);
        else
            by_warp<<<rows, 32>>>(d_codes, d_scales, d_x, d_y, columns);
        CHECK_LAUNCH();
        CHECK(cudaMemcpy(y.data(), d_y, rows * 4, cudaMemcpyDeviceToHost));
        int wrong = 0;
        for (int row = 0; row < rows; ++row) wrong += !(std::fabs(y[row] - expected[row]) <= 1e-3);
        printf("%s: ", version ? "one warp per row" : "one thread per row");
        printf(wrong ? "%d rows are wrong\n" : "all match the CPU\n", wrong);
        right = right && !wrong;
    }
    CHECK(cudaFree(d_codes));
    CHECK(cudaFree(d_scales));
    CHECK(cudaFree(d_x));
    CHECK(cudaFree(d_y));
    return !right;
}

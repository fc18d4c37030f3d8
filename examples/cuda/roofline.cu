// The roofline: kernels that do 1, 16 and 256 multiply-adds per element, and one chain of operations as three kernels and
// as one.
//
//     warpbus cuda run examples/cuda/roofline.cu           # with `128 time`: 128 M elements, GB/s and TFLOP/s, on a GPU
#include "check.h"

#include <cmath>
#include <cstring>
#include <vector>

int blocks(int n) { return (n + 255) / 256; }

// 8 bytes and 2 * Steps operations per element.
template <int Steps> __global__ void chain(const float *x, float *y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float value = x[i];
    for (int step = 0; step < Steps; ++step) value = value * 0.5f + 1;
    y[i] = value;
}

__global__ void scale(const float *x, float *y, float factor, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * factor;
}
__global__ void shift(const float *x, float *y, float by, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] + by;
}
__global__ void relu(const float *x, float *y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = fmaxf(x[i], 0);
}
// The three above: what lies between them stays in a register.
__global__ void fused(const float *x, float *y, float factor, float by, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = fmaxf(x[i] * factor + by, 0);
}

template <class F> void measure(const char *name, double bytes, double operations, bool timed, F run) {
    printf("%-24s %5.1f bytes, %6.1f operations per element, %.4g operations per byte\n", name, bytes, operations,
           operations / bytes);
    run();
    CHECK_LAUNCH();
    if (!timed) return;
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaEventRecord(begin));
    for (int i = 0; i < 20; ++i) run();
    CHECK(cudaEventRecord(end));
    CHECK_LAUNCH();
    float milliseconds = 0;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    printf("  %.3f ms\n", milliseconds / 20);
}

int main(int count, char **words) {
    const int n = count > 1 ? atoi(words[1]) << 20 : 10000;
    const bool timed = count > 2 && !strcmp(words[2], "time");
    const size_t bytes = n * sizeof(float);
    std::vector<float> x(n), y(n);
    for (int i = 0; i < n; ++i) x[i] = i % 1000 - 500;
    float *d_x, *d_y, *d_t;
    CHECK(cudaMalloc(&d_x, bytes));
    CHECK(cudaMalloc(&d_y, bytes));
    CHECK(cudaMalloc(&d_t, bytes));
    CHECK(cudaMemcpy(d_x, x.data(), bytes, cudaMemcpyHostToDevice));

    measure("1 multiply-add", 8, 2, timed, [&] { chain<1><<<blocks(n), 256>>>(d_x, d_y, n); });
    measure("16 multiply-adds", 8, 32, timed, [&] { chain<16><<<blocks(n), 256>>>(d_x, d_y, n); });
    measure("256 multiply-adds", 8, 512, timed, [&] { chain<256><<<blocks(n), 256>>>(d_x, d_y, n); });
    int wrong = 0;
    CHECK(cudaMemcpy(y.data(), d_y, bytes, cudaMemcpyDeviceToHost));
    for (float each : y) wrong += std::fabs(each - 2) > 1e-5;  // x / 2 + 1, again and again, approaches 2

    for (bool one : {false, true}) {
        CHECK(cudaMemset(d_y, 0xFF, bytes));
        measure(one ? "fused" : "three kernels", one ? 8 : 24, 3, timed, [&] {
            if (one) {
                fused<<<blocks(n), 256>>>(d_x, d_y, 3, 5, n);
            } else {
                scale<<<blocks(n), 256>>>(d_x, d_y, 3, n);
                shift<<<blocks(n), 256>>>(d_y, d_t, 5, n);
                relu<<<blocks(n), 256>>>(d_t, d_y, n);
            }
        });
        CHECK(cudaMemcpy(y.data(), d_y, bytes, cudaMemcpyDeviceToHost));
        for (int i = 0; i < n; ++i) wrong += y[i] != std::fmax(x[i] * 3 + 5, 0);
    }
    printf(wrong ? "%d elements are wrong\n" : "all match the CPU\n", wrong);
    CHECK(cudaFree(d_x));
    CHECK(cudaFree(d_y));
    CHECK(cudaFree(d_t));
    return wrong != 0;
}

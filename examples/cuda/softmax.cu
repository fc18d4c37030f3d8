// Softmax and RMSNorm of rows: reductions of a block and of a warp, and softmax in one pass over the data.
//
//     warpbus cuda run examples/cuda/softmax.cu
#include "check.h"

#include <cmath>
#include <vector>

constexpr int kBlock = 128;

__device__ float warp_sum(float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, step);
    return value;  // of all 32 lanes, in all of them
}

__device__ float warp_max(float value) {
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, step));
    return value;
}

// The sum of a block: each warp adds its own, then every thread adds what the warps have found.
__device__ float block_sum(float value) {
    __shared__ float part[kBlock / 32];
    value = warp_sum(value);
    __syncthreads();  // an earlier call has been read
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0;
    for (int warp = 0; warp < kBlock / 32; ++warp) sum += part[warp];
    return sum;
}

// exp(x) of float32 is infinite from x = 89 on, and inf / inf is not a number.
__global__ void unsafe(const float *x, float *y, int columns) {
    x += blockIdx.x * columns;
    y += blockIdx.x * columns;
    float sum = 0;
    for (int i = threadIdx.x; i < columns; i += kBlock) sum += expf(x[i]);
    sum = block_sum(sum);
    for (int i = threadIdx.x; i < columns; i += kBlock) y[i] = expf(x[i]) / sum;
}

// One warp per row. Maximum and sum in one pass: when the maximum grows, the sum so far is scaled down.
__global__ void online(const float *x, float *y, int columns) {
    x += blockIdx.x * columns;
    y += blockIdx.x * columns;
    float most = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < columns; i += 32) {
        const float larger = fmaxf(most, x[i]);
        sum = sum * expf(most - larger) + expf(x[i] - larger);
        most = larger;
    }
    const float of_all = warp_max(most);
    sum = warp_sum(most == -INFINITY ? 0 : sum * expf(most - of_all));
    for (int i = threadIdx.x; i < columns; i += 32) y[i] = expf(x[i] - of_all) / sum;
}

// RMSNorm, the norm of Llama and GLM: x / sqrt(mean(x * x) + epsilon). One block per row.
__global__ void rms_norm(const float *x, float *y, int columns) {
    x += blockIdx.x * columns;
    y += blockIdx.x * columns;
    float squares = 0;
    for (int i = threadIdx.x; i < columns; i += kBlock) squares += x[i] * x[i];
    const float scale = rsqrtf(block_sum(squares) / columns + 1e-5f);
    for (int i = threadIdx.x; i < columns; i += kBlock) y[i] = x[i] * scale;
}

int main() {
    const int rows = 50, columns = 1000;
    const size_t bytes = rows * columns * sizeof(float);
    std::vector<float> x(rows * columns), y(rows * columns);
    for (int i = 0; i < rows * columns; ++i) x[i] = (i * 37 % 101) + i / columns;  // up to 149
    std::vector<double> softmax(rows * columns), norm(rows * columns);
    for (int row = 0; row < rows; ++row) {
        const float *in = &x[row * columns];
        double most = in[0], sum = 0, squares = 0;
        for (int i = 0; i < columns; ++i) most = std::fmax(most, in[i]);
        for (int i = 0; i < columns; ++i) sum += std::exp(in[i] - most), squares += double(in[i]) * in[i];
        for (int i = 0; i < columns; ++i) {
            softmax[row * columns + i] = std::exp(in[i] - most) / sum;
            norm[row * columns + i] = in[i] / std::sqrt(squares / columns + 1e-5);
        }
    }

    float *d_x, *d_y;
    CHECK(cudaMalloc(&d_x, bytes));
    CHECK(cudaMalloc(&d_y, bytes));
    CHECK(cudaMemcpy(d_x, x.data(), bytes, cudaMemcpyHostToDevice));
    unsafe<<<rows, kBlock>>>(d_x, d_y, columns);
    CHECK_LAUNCH();
    CHECK(cudaMemcpy(y.data(), d_y, bytes, cudaMemcpyDeviceToHost));
    int broken = 0;
    for (int row = 0; row < rows; ++row) {
        bool found = false;
        for (int i = 0; i < columns; ++i) found = found || std::isnan(y[row * columns + i]);
        broken += found;
    }
    printf("softmax without the maximum: %d of %d rows have NaN\n", broken, rows);

    bool right = true;
    for (int version = 0; version < 2; ++version) {
        CHECK(cudaMemset(d_y, 0xFF, bytes));
        if (version == 0)
            online<<<rows, 32>>>(d_x, d_y, columns);
        else
            rms_norm<<<rows, kBlock>>>(d_x, d_y, columns);
        CHECK_LAUNCH();
        CHECK(cudaMemcpy(y.data(), d_y, bytes, cudaMemcpyDeviceToHost));
        const std::vector<double> &expected = version ? norm : softmax;
        int wrong = 0;
        for (int i = 0; i < rows * columns; ++i) wrong += !(std::fabs(y[i] - expected[i]) <= 1e-5 * (1 + expected[i]));
        printf("%s: ", version ? "RMSNorm" : "softmax in one pass");
        printf(wrong ? "%d elements are wrong\n" : "all match the CPU\n", wrong);
        right = right && !wrong;
    }
    CHECK(cudaFree(d_x));
    CHECK(cudaFree(d_y));
    return !right;
}

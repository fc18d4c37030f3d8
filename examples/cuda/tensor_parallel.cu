// Tensor parallelism: an MLP with the 13,696 inner features of ChatGLM2-6B, and 32 outer ones instead of 4,096, on two
// ranks. The first matrix is split by rows, the second by columns, and one sum joins the results.
//
//     warpbus cuda run examples/cuda/tensor_parallel.cu
#include "check.h"

#include <cmath>
#include <vector>

constexpr int kRanks = 2, kGroup = 128, kInner = 13696, kOuter = 32;

// Columns of the second matrix that a rank has: whole quantization groups, of 107.
int begin_of(int rank) { return (kInner / kGroup * rank + kRanks - 1) / kRanks * kGroup; }

// y[row] = activation(sum of w[row][k] x[k]), one warp per row; a row has `stride` numbers in memory.
__global__ void product(const float *w, const float *x, float *y, int columns, int stride, bool activation) {
    float sum = 0;
    for (int k = threadIdx.x; k < columns; k += 32) sum += w[blockIdx.x * stride + k] * x[k];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
    if (threadIdx.x == 0) y[blockIdx.x] = activation ? sum / (1 + expf(-sum)) : sum;
}

__global__ void add(const float *a, const float *b, float *sum, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum[i] = a[i] + b[i];  // in the order of the ranks
}

float *to_device(const std::vector<float> &host) {
    float *found;
    CHECK(cudaMalloc(&found, host.size() * sizeof(float)));
    CHECK(cudaMemcpy(found, host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice));
    return found;
}

int main() {
    std::vector<float> up(kInner * kOuter), down(kOuter * kInner), x(kOuter), y(kOuter);
    for (size_t i = 0; i < up.size(); ++i) up[i] = (i * 37 % 101 - 50.0f) / 300;
    for (size_t i = 0; i < down.size(); ++i) down[i] = (i * 53 % 103 - 51.0f) / 300;
    for (int i = 0; i < kOuter; ++i) x[i] = i % 7 - 3;
    std::vector<double> inner(kInner), expected(kOuter);
    for (int row = 0; row < kInner; ++row) {
        for (int k = 0; k < kOuter; ++k) inner[row] += double(up[row * kOuter + k]) * x[k];
        inner[row] /= 1 + std::exp(-inner[row]);
    }
    for (int row = 0; row < kOuter; ++row)
        for (int k = 0; k < kInner; ++k) expected[row] += double(down[row * kInner + k]) * inner[k];

    float *d_up = to_device(up), *d_down = to_device(down), *d_x = to_device(x), *d_y = to_device(y);
    float *middle[kRanks], *partial[kRanks];
    for (int rank = 0; rank < kRanks; ++rank) {
        const int begin = begin_of(rank), own = begin_of(rank + 1) - begin;
        printf("rank %d: rows %d to %d of the first matrix, the same columns of the second, %d groups\n", rank, begin,
               begin + own - 1, own / kGroup);
        CHECK(cudaMalloc(&middle[rank], own * sizeof(float)));
        CHECK(cudaMalloc(&partial[rank], kOuter * sizeof(float)));
        product<<<own, 32>>>(d_up + begin * kOuter, d_x, middle[rank], kOuter, kOuter, true);
        product<<<kOuter, 32>>>(d_down + begin, middle[rank], partial[rank], own, kInner, false);
    }
    add<<<1, 256>>>(partial[0], partial[1], d_y, kOuter);  // the all-reduce
    CHECK_LAUNCH();
    CHECK(cudaMemcpy(y.data(), d_y, kOuter * sizeof(float), cudaMemcpyDeviceToHost));
    int wrong = 0;
    for (int i = 0; i < kOuter; ++i) wrong += !(std::fabs(y[i] - expected[i]) <= 1e-4 * (1 + std::fabs(expected[i])));
    printf(wrong ? "%d elements are wrong\n" : "the sum of both: all match the CPU\n", wrong);
    for (float *each : {d_up, d_down, d_x, d_y, middle[0], middle[1], partial[0], partial[1]}) CHECK(cudaFree(each));
    return wrong != 0;
}

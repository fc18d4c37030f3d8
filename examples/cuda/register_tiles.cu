// C = A B in float32 with register tiles: a block computes 128 x 128 elements, each of its 256 threads 8 x 8 of them.
//
//     warpbus cuda run examples/cuda/register_tiles.cu            # n = 150, compared with the CPU
//     warpbus cuda run examples/cuda/register_tiles.cu 4096 time  # on a GPU: also TFLOP/s
#include "check.h"

#include <cmath>
#include <vector>

constexpr int kTile = 128, kStep = 8, kSide = 16, kEach = kTile / kSide;

// Thread (x, y) has rows y, y + 16, ... and columns x, x + 16, ... of the tile: neighbours read neighbouring words.
__global__ void __launch_bounds__(kSide *kSide) multiply(const float *a, const float *b, float *c, int n) {
    __shared__ float tile_a[kStep][kTile + 4], tile_b[kStep][kTile];
    const int row0 = blockIdx.y * kTile, column0 = blockIdx.x * kTile;
    const int thread = threadIdx.y * kSide + threadIdx.x;
    float sum[kEach][kEach] = {};
    for (int first = 0; first < n; first += kStep) {
        for (int i = thread; i < kTile * kStep; i += kSide * kSide) {
            const int row = i / kStep, k = i % kStep;  // 8 neighbours of a row of A
            tile_a[k][row] = row0 + row < n && first + k < n ? a[(row0 + row) * n + first + k] : 0;
        }
        for (int i = thread; i < kTile * kStep; i += kSide * kSide) {
            const int k = i / kTile, column = i % kTile;  // 128 neighbours of a row of B
            tile_b[k][column] = first + k < n && column0 + column < n ? b[(first + k) * n + column0 + column] : 0;
        }
        __syncthreads();
        for (int k = 0; k < kStep; ++k) {
            float left[kEach], right[kEach];
            for (int i = 0; i < kEach; ++i) left[i] = tile_a[k][threadIdx.y + i * kSide];
            for (int j = 0; j < kEach; ++j) right[j] = tile_b[k][threadIdx.x + j * kSide];
            for (int i = 0; i < kEach; ++i)
                for (int j = 0; j < kEach; ++j) sum[i][j] += left[i] * right[j];  // 64 multiply-adds for 16 loads
        }
        __syncthreads();
    }
    for (int i = 0; i < kEach; ++i)
        for (int j = 0; j < kEach; ++j) {
            const int row = row0 + threadIdx.y + i * kSide, column = column0 + threadIdx.x + j * kSide;
            if (row < n && column < n) c[row * n + column] = sum[i][j];
        }
}

int main(int argc, char **argv) {
    const int n = argc > 1 ? atoi(argv[1]) : 150;
    const size_t bytes = size_t(n) * n * sizeof(float);
    std::vector<float> a(size_t(n) * n), b(a.size()), c(a.size());
    for (size_t i = 0; i < a.size(); ++i) {
        a[i] = (i * 7 % 13 - 6.0f) / 6;
        b[i] = (i * 5 % 11 - 5.0f) / 5;
    }
    float *d_a, *d_b, *d_c;
    CHECK(cudaMalloc(&d_a, bytes));
    CHECK(cudaMalloc(&d_b, bytes));
    CHECK(cudaMalloc(&d_c, bytes));
    CHECK(cudaMemcpy(d_a, a.data(), bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_b, b.data(), bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(d_c, 0xFF, bytes));
    const dim3 threads(kSide, kSide), blocks((n + kTile - 1) / kTile, (n + kTile - 1) / kTile);
    multiply<<<blocks, threads>>>(d_a, d_b, d_c, n);
    CHECK_LAUNCH();
    CHECK(cudaMemcpy(c.data(), d_c, bytes, cudaMemcpyDeviceToHost));

    // Every element of the small product; of a large one, one in `step`, so that the CPU does not take minutes.
    const size_t step = a.size() / 40000 + 1;
    int wrong = 0;
    for (size_t at = 0; at < a.size(); at += step) {
        const size_t row = at / n, column = at % n;
        double expected = 0;
        for (int k = 0; k < n; ++k) expected += double(a[row * n + k]) * b[size_t(k) * n + column];
        wrong += !(std::fabs(c[at] - expected) <= 1e-4 * n);
    }
    printf("n = %d, %u x %u blocks, 8 x 8 elements per thread: ", n, blocks.x, blocks.y);
    printf(wrong ? "%d elements are wrong\n" : "all match the CPU\n", wrong);

    if (argc > 2) {
        cudaEvent_t begin, end;
        float milliseconds;
        CHECK(cudaEventCreate(&begin));
        CHECK(cudaEventCreate(&end));
        CHECK(cudaEventRecord(begin));
        for (int i = 0; i < 10; ++i) multiply<<<blocks, threads>>>(d_a, d_b, d_c, n);
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
        printf("%.2f TFLOP/s\n", 10 * 2.0 * n * n * n / milliseconds / 1e9);
        CHECK(cudaEventDestroy(begin));
        CHECK(cudaEventDestroy(end));
    }
    CHECK(cudaFree(d_a));
    CHECK(cudaFree(d_b));
    CHECK(cudaFree(d_c));
    return wrong != 0;
}

// C = A B: one thread per element, tiles in shared memory, many small products at once; compared with three loops.
//
//     warpbus cuda run examples/cuda/matrix_multiply.cu
#include "check.h"

#include <cmath>
#include <vector>

constexpr int kTile = 16, kSmall = 8;

// Reads a whole row of A and a whole column of B from device memory for each element.
__global__ void naive(const float *a, const float *b, float *c, int n) {
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n || column >= n) return;
    float sum = 0;
    for (int k = 0; k < n; ++k) sum += a[row * n + k] * b[k * n + column];
    c[row * n + column] = sum;
}

// A block reads tiles of 16 x 16 together and uses each number 16 times.
__global__ void tiled(const float *a, const float *b, float *c, int n) {
    __shared__ float tile_a[kTile][kTile], tile_b[kTile][kTile];
    const int row = blockIdx.y * kTile + threadIdx.y;
    const int column = blockIdx.x * kTile + threadIdx.x;
    float sum = 0;
    for (int first = 0; first < n; first += kTile) {
        const int k_a = first + threadIdx.x, k_b = first + threadIdx.y;
        // No thread may return early: all of them have to reach the barriers.
        tile_a[threadIdx.y][threadIdx.x] = row < n && k_a < n ? a[row * n + k_a] : 0;
        tile_b[threadIdx.y][threadIdx.x] = column < n && k_b < n ? b[k_b * n + column] : 0;
        __syncthreads();  // the tiles are complete before anybody reads them
        for (int k = 0; k < kTile; ++k) sum += tile_a[threadIdx.y][k] * tile_b[k][threadIdx.x];
        __syncthreads();  // everybody has read them before they are overwritten
    }
    if (row < n && column < n) c[row * n + column] = sum;
}

// Many small products in one launch, a batch: blockIdx.z says which one.
__global__ void batched(const float *a, const float *b, float *c) {
    const int first = blockIdx.z * kSmall * kSmall, row = threadIdx.y, column = threadIdx.x;
    float sum = 0;
    for (int k = 0; k < kSmall; ++k) sum += a[first + row * kSmall + k] * b[first + k * kSmall + column];
    c[first + row * kSmall + column] = sum;
}

// The three loops, on the CPU.
void multiply(const float *a, const float *b, float *c, int n) {
    for (int row = 0; row < n; ++row)
        for (int column = 0; column < n; ++column) {
            double sum = 0;
            for (int k = 0; k < n; ++k) sum += double(a[row * n + k]) * b[k * n + column];
            c[row * n + column] = float(sum);
        }
}

int main(int argc, char **argv) {
    const int n = argc > 1 ? atoi(argv[1]) : 100;
    const size_t bytes = n * n * sizeof(float);
    std::vector<float> a(n * n), b(n * n), c(n * n), expected(n * n);
    for (int i = 0; i < n * n; ++i) {
        a[i] = (i * 7 % 13 - 6) / 6.0f;
        b[i] = (i * 5 % 11 - 5) / 5.0f;
    }
    multiply(a.data(), b.data(), expected.data(), n);

    float *d_a, *d_b, *d_c;
    CHECK(cudaMalloc(&d_a, bytes));
    CHECK(cudaMalloc(&d_b, bytes));
    CHECK(cudaMalloc(&d_c, bytes));
    CHECK(cudaMemcpy(d_a, a.data(), bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_b, b.data(), bytes, cudaMemcpyHostToDevice));
    const dim3 threads(kTile, kTile), blocks((n + kTile - 1) / kTile, (n + kTile - 1) / kTile);
    bool right = true;
    for (int version = 0; version < 2; ++version) {
        CHECK(cudaMemset(d_c, 0xFF, bytes));  // NaN: an element that is not written shows
        if (version == 0)
            naive<<<blocks, threads>>>(d_a, d_b, d_c, n);
        else
            tiled<<<blocks, threads>>>(d_a, d_b, d_c, n);
        CHECK_LAUNCH();
        CHECK(cudaMemcpy(c.data(), d_c, bytes, cudaMemcpyDeviceToHost));
        int wrong = 0;
        for (int i = 0; i < n * n; ++i) wrong += !(std::fabs(c[i] - expected[i]) <= 1e-4f * n);
        printf("%s, n = %d: ", version ? "tiled" : "naive", n);
        printf(wrong ? "%d elements are wrong\n" : "all match the CPU\n", wrong);
        right = right && !wrong;
    }

    // The same numbers as many matrices of 8 x 8.
    const int count = n * n / (kSmall * kSmall);
    if (count > 0) {
        batched<<<dim3(1, 1, count), dim3(kSmall, kSmall)>>>(d_a, d_b, d_c);
        CHECK_LAUNCH();
        CHECK(cudaMemcpy(c.data(), d_c, bytes, cudaMemcpyDeviceToHost));
        int wrong = 0;
        for (int i = 0; i < count * kSmall * kSmall; i += kSmall * kSmall) {
            multiply(&a[i], &b[i], &expected[i], kSmall);
            for (int j = i; j < i + kSmall * kSmall; ++j) wrong += !(std::fabs(c[j] - expected[j]) <= 1e-4f);
        }
        printf("%d products of %d x %d in one launch: ", count, kSmall, kSmall);
        printf(wrong ? "%d elements are wrong\n" : "all match the CPU\n", wrong);
        right = right && !wrong;
    }
    CHECK(cudaFree(d_a));
    CHECK(cudaFree(d_b));
    CHECK(cudaFree(d_c));
    return !right;
}

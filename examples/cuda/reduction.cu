// The sum of a million numbers: a tree in shared memory, then shuffles within a warp.
//
//     warpbus cuda run examples/cuda/reduction.cu
#include "check.h"

#include <vector>

// Dynamic shared memory: its size in bytes is the third argument of the launch.
__global__ void tree(const int *x, int *total, int n) {
    extern __shared__ int part[];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    part[threadIdx.x] = i < n ? x[i] : 0;
    for (int step = blockDim.x / 2; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
    }
    if (threadIdx.x == 0) atomicAdd(total, part[0]);
}

// The 32 threads of a warp hand each other registers, without shared memory.
__global__ void shuffles(const int *x, int *total, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    int sum = i < n ? x[i] : 0;
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xFFFFFFFF, sum, step);
    if (threadIdx.x % 32 == 0) atomicAdd(total, sum);
}

int main() {
    const int n = 100000, threads = 256, blocks = (n + threads - 1) / threads;
    std::vector<int> x(n);
    int expected = 0, found, *d_x, *d_total;
    for (int i = 0; i < n; ++i) expected += x[i] = i % 17 - 5;
    CHECK(cudaMalloc(&d_x, n * sizeof(int)));
    CHECK(cudaMalloc(&d_total, sizeof(int)));
    CHECK(cudaMemcpy(d_x, x.data(), n * sizeof(int), cudaMemcpyHostToDevice));
    bool right = true;
    for (int version = 0; version < 2; ++version) {
        CHECK(cudaMemset(d_total, 0, sizeof(int)));
        if (version == 0)
            tree<<<blocks, threads, threads * sizeof(int)>>>(d_x, d_total, n);
        else
            shuffles<<<blocks, threads>>>(d_x, d_total, n);
        CHECK_LAUNCH();
        CHECK(cudaMemcpy(&found, d_total, sizeof found, cudaMemcpyDeviceToHost));
        printf("%s: %d, %s\n", version ? "shuffles" : "tree", found, found == expected ? "matches the CPU" : "wrong");
        right = right && found == expected;
    }
    CHECK(cudaFree(d_x));
    CHECK(cudaFree(d_total));
    return !right;
}

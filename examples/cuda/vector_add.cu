// c = a + b for a million numbers: memory on the device, copies there and back, a kernel, and a check on the CPU.
//
//     warpbus cuda run examples/cuda/vector_add.cu          # on a GPU with nvcc, else on the CPU
//     nvcc -o vector_add examples/cuda/vector_add.cu && ./vector_add
#include "check.h"

#include <cstring>

// __global__: runs on the device, called from the host. Each thread adds one element.
__global__ void add(const float *a, const float *b, float *c, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];  // the last block has more threads than elements
}

int main(int argc, char **argv) {
    const int n = argc > 1 ? atoi(argv[1]) : 1000000;
    const size_t bytes = n * sizeof(float);

    // Host memory, and the numbers to add.
    float *a = (float *)malloc(bytes), *b = (float *)malloc(bytes), *c = (float *)malloc(bytes);
    for (int i = 0; i < n; ++i) {
        a[i] = i;
        b[i] = i + 1;
    }

    // Device memory. A device pointer is an address on the GPU: host code may pass it on, but not dereference it.
    float *d_a, *d_b, *d_c;
    CHECK(cudaMalloc(&d_a, bytes));
    CHECK(cudaMalloc(&d_b, bytes));
    CHECK(cudaMalloc(&d_c, bytes));
    CHECK(cudaMemcpy(d_a, a, bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_b, b, bytes, cudaMemcpyHostToDevice));

    // As many blocks of 256 threads as cover n elements.
    const int threads = 256, blocks = (n + threads - 1) / threads;
    add<<<blocks, threads>>>(d_a, d_b, d_c, n);
    CHECK_LAUNCH();

    CHECK(cudaMemcpy(c, d_c, bytes, cudaMemcpyDeviceToHost));
    int wrong = 0;
    for (int i = 0; i < n; ++i) wrong += c[i] != a[i] + b[i];
    printf("%d elements, %d blocks of %d threads: ", n, blocks, threads);
    printf(wrong ? "%d elements are wrong\n" : "all match the CPU\n", wrong);

    CHECK(cudaFree(d_a));
    CHECK(cudaFree(d_b));
    CHECK(cudaFree(d_c));
    free(a);
    free(b);
    free(c);
    return wrong != 0;
}

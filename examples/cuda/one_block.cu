// The first attempt of everybody: all threads in one block, <<<1, n>>>. A block has at most 1,024 threads.
//
//     warpbus cuda run examples/cuda/one_block.cu
#include <cuda_runtime.h>

#include <cstdio>

__global__ void square(int *x) { x[threadIdx.x] = threadIdx.x * threadIdx.x; }

int main() {
    int *x, last;
    if (cudaMalloc(&x, 500000 * sizeof(int)) != cudaSuccess) return 1;
    for (int n : {1, 1000, 1024, 1025, 500000}) {
        square<<<1, n>>>(x);
        // A launch that the device cannot do is no exception: it is a status, and the kernel did not run.
        const cudaError_t status = cudaGetLastError();
        printf("<<<1, %d>>>: %s", n, cudaGetErrorString(status));
        if (status == cudaSuccess) {
            if (cudaMemcpy(&last, x + n - 1, sizeof last, cudaMemcpyDeviceToHost) != cudaSuccess) return 1;
            printf(", the last element is %d", last);
        }
        printf("\n");
    }
    return cudaFree(x) != cudaSuccess;
}

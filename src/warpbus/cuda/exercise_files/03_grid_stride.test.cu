#include <cuda_runtime.h>
#include <cstdio>
#include <vector>

int main() {
    for (int n : {1, 100, 256, 257, 10000}) {
        std::vector<float> x(n), found(n);
        for (int i = 0; i < n; ++i) x[i] = i + 1;
        float *d_x;
        cudaMalloc(&d_x, n * sizeof(float));
        cudaMemcpy(d_x, x.data(), n * sizeof(float), cudaMemcpyHostToDevice);
        scale<<<4, 64>>>(d_x, 3, n);
        const cudaError_t status = cudaDeviceSynchronize();
        if (status != cudaSuccess) return printf("n = %d: %s\n", n, cudaGetErrorString(status)), 1;
        cudaMemcpy(found.data(), d_x, n * sizeof(float), cudaMemcpyDeviceToHost);
        for (int i = 0; i < n; ++i)
            if (found[i] != 3 * x[i])
                return printf("n = %d: x[%d] is %g, expected %g%s\n", n, i, found[i], 3 * x[i],
                              found[i] == 9 * x[i] ? ": two threads took it" : found[i] == x[i] ? ": no thread took it" : ""), 1;
        cudaFree(d_x);
    }
    return 0;
}

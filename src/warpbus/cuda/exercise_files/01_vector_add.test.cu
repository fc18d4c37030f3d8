#include <cuda_runtime.h>
#include <cstdio>
#include <vector>

int main() {
    for (int n : {1, 255, 256, 1000, 5000}) {
        std::vector<float> a(n), b(n), c(n);
        for (int i = 0; i < n; ++i) {
            a[i] = i;
            b[i] = 2 * i + 1;
        }
        float *d_a, *d_b, *d_c;
        cudaMalloc(&d_a, n * sizeof(float));
        cudaMalloc(&d_b, n * sizeof(float));
        cudaMalloc(&d_c, n * sizeof(float));
        cudaMemcpy(d_a, a.data(), n * sizeof(float), cudaMemcpyHostToDevice);
        cudaMemcpy(d_b, b.data(), n * sizeof(float), cudaMemcpyHostToDevice);
        cudaMemset(d_c, 0xFF, n * sizeof(float));
        add<<<(n + 255) / 256, 256>>>(d_a, d_b, d_c, n);
        const cudaError_t status = cudaDeviceSynchronize();
        if (status != cudaSuccess) return printf("n = %d: %s\n", n, cudaGetErrorString(status)), 1;
        cudaMemcpy(c.data(), d_c, n * sizeof(float), cudaMemcpyDeviceToHost);
        for (int i = 0; i < n; ++i)
            if (!(c[i] == a[i] + b[i]))
                return printf("n = %d: c[%d] is %g, expected %g (block %d, thread %d)\n", n, i, c[i], a[i] + b[i], i / 256,
                              i % 256), 1;
        cudaFree(d_a);
        cudaFree(d_b);
        cudaFree(d_c);
    }
    return 0;
}

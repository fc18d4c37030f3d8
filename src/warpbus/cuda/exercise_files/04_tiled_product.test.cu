#include <cuda_runtime.h>
#include <cmath>
#include <cstdio>
#include <vector>

int main() {
    for (int n : {1, 16, 32, 50}) {
        std::vector<float> a(n * n), b(n * n), c(n * n);
        for (int i = 0; i < n * n; ++i) {
            a[i] = i % 7 - 3;
            b[i] = i % 5 - 2;
        }
        float *d_a, *d_b, *d_c;
        cudaMalloc(&d_a, n * n * sizeof(float));
        cudaMalloc(&d_b, n * n * sizeof(float));
        cudaMalloc(&d_c, n * n * sizeof(float));
        cudaMemcpy(d_a, a.data(), n * n * sizeof(float), cudaMemcpyHostToDevice);
        cudaMemcpy(d_b, b.data(), n * n * sizeof(float), cudaMemcpyHostToDevice);
        cudaMemset(d_c, 0xFF, n * n * sizeof(float));
        product<<<dim3((n + 15) / 16, (n + 15) / 16), dim3(16, 16)>>>(d_a, d_b, d_c, n);
        const cudaError_t status = cudaDeviceSynchronize();
        if (status != cudaSuccess) return printf("n = %d: %s\n", n, cudaGetErrorString(status)), 1;
        cudaMemcpy(c.data(), d_c, n * n * sizeof(float), cudaMemcpyDeviceToHost);
        for (int row = 0; row < n; ++row)
            for (int column = 0; column < n; ++column) {
                float sum = 0;
                for (int k = 0; k < n; ++k) sum += a[row * n + k] * b[k * n + column];
                if (!(std::fabs(c[row * n + column] - sum) < 1e-3f))
                    return printf("n = %d: row %d, column %d is %g, expected %g\n", n, row, column, c[row * n + column],
                                  sum), 1;
            }
        cudaFree(d_a);
        cudaFree(d_b);
        cudaFree(d_c);
    }
    return 0;
}

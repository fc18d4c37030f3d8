#include <cuda_runtime.h>
#include <cmath>
#include <cstdio>
#include <vector>

int main() {
    const int sizes[][2] = {{1, 1}, {8, 32}, {9, 33}, {100, 7}, {5, 200}};
    for (auto [rows, columns] : sizes) {
        const int n = rows * columns;
        std::vector<float> x(n), y(n);
        for (int i = 0; i < n; ++i) x[i] = (i % 23 - 11) / 2.0f;
        float *d_x, *d_y;
        cudaMalloc(&d_x, n * sizeof(float));
        cudaMalloc(&d_y, n * sizeof(float));
        cudaMemcpy(d_x, x.data(), n * sizeof(float), cudaMemcpyHostToDevice);
        cudaMemset(d_y, 0xFF, n * sizeof(float));
        sigmoid_matrix<<<dim3((columns + 31) / 32, (rows + 7) / 8), dim3(32, 8)>>>(d_x, d_y, rows, columns);
        const cudaError_t status = cudaDeviceSynchronize();
        if (status != cudaSuccess) return printf("%d x %d: %s\n", rows, columns, cudaGetErrorString(status)), 1;
        cudaMemcpy(y.data(), d_y, n * sizeof(float), cudaMemcpyDeviceToHost);
        for (int i = 0; i < n; ++i) {
            const double expected = 1 / (1 + std::exp(-double(x[i])));
            if (!(std::fabs(y[i] - expected) < 1e-5))
                return printf("%d x %d: row %d, column %d is %g, expected %g\n", rows, columns, i / columns, i % columns,
                              y[i], expected), 1;
        }
        cudaFree(d_x);
        cudaFree(d_y);
    }
    return 0;
}

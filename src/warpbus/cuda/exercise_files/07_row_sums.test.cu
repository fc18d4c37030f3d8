#include <cuda_runtime.h>
#include <cmath>
#include <cstdio>
#include <vector>

int main() {
    const int rows = 20;
    for (int columns : {1, 31, 32, 33, 500}) {
        std::vector<float> x(rows * columns), sums(rows);
        for (int i = 0; i < rows * columns; ++i) x[i] = i % 9 - 3;
        float *d_x, *d_sums;
        cudaMalloc(&d_x, x.size() * sizeof(float));
        cudaMalloc(&d_sums, rows * sizeof(float));
        cudaMemcpy(d_x, x.data(), x.size() * sizeof(float), cudaMemcpyHostToDevice);
        cudaMemset(d_sums, 0xFF, rows * sizeof(float));
        row_sums<<<rows, 32>>>(d_x, d_sums, columns);
        const cudaError_t status = cudaDeviceSynchronize();
        if (status != cudaSuccess) return printf("%d columns: %s\n", columns, cudaGetErrorString(status)), 1;
        cudaMemcpy(sums.data(), d_sums, rows * sizeof(float), cudaMemcpyDeviceToHost);
        for (int row = 0; row < rows; ++row) {
            float expected = 0;
            for (int column = 0; column < columns; ++column) expected += x[row * columns + column];
            if (!(std::fabs(sums[row] - expected) < 1e-3f))
                return printf("%d columns: the sum of row %d is %g, expected %g\n", columns, row, sums[row], expected), 1;
        }
        cudaFree(d_x);
        cudaFree(d_sums);
    }
    return 0;
}

// C = A + B for matrices: threads in two dimensions, with dim3, in one block and in many.
//
//     warpbus cuda run examples/cuda/matrix_add.cu
#include "check.h"

#include <vector>

// One block: the thread's own coordinates are those of its element. At most 1,024 elements.
__global__ void add_in_one_block(const float *a, const float *b, float *c, int columns) {
    const int i = threadIdx.y * columns + threadIdx.x;
    c[i] = a[i] + b[i];
}

// The same on the CPU.
void add_on_cpu(const float *a, const float *b, float *c, int rows, int columns) {
    for (int row = 0; row < rows; ++row)
        for (int column = 0; column < columns; ++column) {
            const int i = row * columns + column;
            c[i] = a[i] + b[i];
        }
}

// Columns run along x: the 32 threads of a warp have neighbouring columns, which are neighbours in memory.
__global__ void add(const float *a, const float *b, float *c, int rows, int columns) {
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows && column < columns) {
        const int i = row * columns + column;
        c[i] = a[i] + b[i];
    }
}

int main() {
    const int rows = 300, columns = 500;
    const size_t bytes = rows * columns * sizeof(float);
    std::vector<float> a(rows * columns), b(rows * columns), c(rows * columns), expected(rows * columns);
    for (int i = 0; i < rows * columns; ++i) {
        a[i] = i % 7;
        b[i] = i % 11;
    }
    add_on_cpu(a.data(), b.data(), expected.data(), rows, columns);

    float *d_a, *d_b, *d_c;
    CHECK(cudaMalloc(&d_a, bytes));
    CHECK(cudaMalloc(&d_b, bytes));
    CHECK(cudaMalloc(&d_c, bytes));
    CHECK(cudaMemcpy(d_a, a.data(), bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_b, b.data(), bytes, cudaMemcpyHostToDevice));

    // The first 600 numbers as a matrix of 20 x 30.
    add_in_one_block<<<1, dim3(30, 20)>>>(d_a, d_b, d_c, 30);
    CHECK_LAUNCH();
    CHECK(cudaMemcpy(c.data(), d_c, bytes, cudaMemcpyDeviceToHost));
    int wrong = 0;
    for (int i = 0; i < 600; ++i) wrong += c[i] != expected[i];
    printf("20 x 30, one block: ");
    printf(wrong ? "%d elements are wrong\n" : "all match the CPU\n", wrong);

    CHECK(cudaMemset(d_c, 0xFF, bytes));  // NaN: an element that is not written shows
    const dim3 threads(32, 8);
    const dim3 blocks((columns + threads.x - 1) / threads.x, (rows + threads.y - 1) / threads.y);
    add<<<blocks, threads>>>(d_a, d_b, d_c, rows, columns);
    CHECK_LAUNCH();

    CHECK(cudaMemcpy(c.data(), d_c, bytes, cudaMemcpyDeviceToHost));
    int wrong_of_many = 0;
    for (int i = 0; i < rows * columns; ++i) wrong_of_many += c[i] != expected[i];
    printf("%d x %d, %u x %u blocks of %u x %u threads: ", rows, columns, blocks.x, blocks.y, threads.x, threads.y);
    printf(wrong_of_many ? "%d elements are wrong\n" : "all match the CPU\n", wrong_of_many);
    CHECK(cudaFree(d_a));
    CHECK(cudaFree(d_b));
    CHECK(cudaFree(d_c));
    return wrong + wrong_of_many != 0;
}

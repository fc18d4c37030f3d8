#include <cstdint>

__device__ void copy(float *to, const float *from) {
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int pending> __device__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

__global__ void sum_columns(const float *x, float *sums, int rows, int columns) {
    __shared__ __align__(16) float tile[2][8][128];
    const int first_column = blockIdx.x * 128;
    const auto fetch = [&](int stage, int row) {
        for (int i = threadIdx.x; row < rows && i < 256; i += 128)
            copy(&tile[stage][i / 32][i % 32 * 4], &x[(row + i / 32) * columns + first_column + i % 32 * 4]);
        commit();
    };
    float sum = 0;
    fetch(0, 0);
    for (int row = 0, stage = 0; row < rows; row += 8, stage ^= 1) {
        fetch(stage ^ 1, row + 8);
        wait<1>();
        __syncthreads();
        for (int i = 0; i < 8; ++i) sum += tile[stage][i][threadIdx.x];
        __syncthreads();
    }
    sums[first_column + threadIdx.x] = sum;
}

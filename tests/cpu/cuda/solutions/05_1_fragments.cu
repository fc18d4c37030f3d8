#include <cstdint>
#include <cuda_fp16.h>

__device__ void mma(float *sums, const uint32_t *left, const uint32_t *right) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

__device__ uint32_t pair(half low, half high) {
    return __half_as_ushort(low) | static_cast<uint32_t>(__half_as_ushort(high)) << 16;
}

__global__ void product(const half *a, const half *b, float *c, int n) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4, row = blockIdx.y * 16, column = blockIdx.x * 8;
    float sums[4] = {};
    for (int k = 0; k < n; k += 16) {
        uint32_t left[4] = {}, right[2] = {};
        for (int i = 0; i < 4; ++i) {
            const half *at = &a[(row + g + i % 2 * 8) * n + k + 2 * t + i / 2 * 8];
            left[i] = pair(at[0], at[1]);
        }
        for (int i = 0; i < 2; ++i) {
            const half *at = &b[(k + 2 * t + i * 8) * n + column + g];
            right[i] = pair(at[0], at[n]);
        }
        mma(sums, left, right);
    }
    for (int i = 0; i < 4; i += 2)
        *reinterpret_cast<float2 *>(&c[(row + g + i * 4) * n + column + 2 * t]) = make_float2(sums[i], sums[i + 1]);
}

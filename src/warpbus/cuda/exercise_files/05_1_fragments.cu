// Chapter 5: C = A B of n x n on tensor cores, one warp per 16 x 8 elements of C. n is a multiple of 16.
// 第 5 章：用张量核心计算 n x n 的 C = A B，每个线程束算 C 的 16 x 8 个元素。n 是 16 的倍数。
//
// `mma` multiplies 16 x 16 elements of A by 16 x 8 of B. Two elements share a register, the first one in the low half.
// Lane 4 g + t provides, counted from the corner of its matrix:
//   left:  rows g, g + 8 at k = 2 t, 2 t + 1; then the same rows at k = 2 t + 8, 2 t + 9
//   right: column g at k = 2 t, 2 t + 1; then at k = 2 t + 8, 2 t + 9
//   sums:  row g at columns 2 t, 2 t + 1; then row g + 8
// `mma` 把 A 的 16 x 16 个元素乘以 B 的 16 x 8 个元素。两个元素共用一个寄存器，第一个在低半部分。
// 第 4 g + t 号线程提供的元素（从各自矩阵的左上角数起）：
//   left：  第 g、g + 8 行，k = 2 t、2 t + 1；然后是同样两行，k = 2 t + 8、2 t + 9
//   right： 第 g 列，k = 2 t、2 t + 1；然后 k = 2 t + 8、2 t + 9
//   sums：  第 g 行的第 2 t、2 t + 1 列；然后是第 g + 8 行
//
// Check it with / 检查：  warpbus learn 05.1 --check
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
        // Fill the registers from a and b with `pair`. 用 `pair` 从 a 和 b 填入寄存器。
        mma(sums, left, right);
    }
    // Store the four sums. 写回四个和。
}

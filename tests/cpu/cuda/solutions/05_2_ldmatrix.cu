#include <cstdint>
#include <cuda_fp16.h>

__device__ int place(int row, int chunk) { return row * 32 + (chunk ^ row / 2 % 4) * 8; }

__device__ void load(uint32_t *registers, const half *row) {
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(shared)
                 : "memory");
}

__device__ void mma(float *sums, const uint32_t *left, const uint32_t *right) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

__global__ void product(const half *a, const half *b, float *c, int n) {
    __shared__ __align__(16) half tile_a[16 * 32], tile_b[16 * 32];
    const int lane = threadIdx.x, row = blockIdx.y * 16, column = blockIdx.x * 16;
    float sums[2][4] = {};  // columns 0 to 7, and 8 to 15
    for (int first = 0; first < n; first += 32) {
        for (int i = lane; i < 64; i += 32) {
            const int at = i / 4 * n + first + i % 4 * 8;
            *reinterpret_cast<int4 *>(&tile_a[place(i / 4, i % 4)]) = *reinterpret_cast<const int4 *>(&a[row * n + at]);
            *reinterpret_cast<int4 *>(&tile_b[place(i / 4, i % 4)]) = *reinterpret_cast<const int4 *>(&b[column * n + at]);
        }
        __syncwarp();
        for (int k = 0; k < 32; k += 16) {
            uint32_t left[4], right[4];
            load(left, &tile_a[place(lane % 16, k / 8 + lane / 16)]);
            load(right, &tile_b[place(lane / 16 * 8 + lane % 8, k / 8 + lane / 8 % 2)]);
            mma(sums[0], left, right);
            mma(sums[1], left, right + 2);
        }
        __syncwarp();
    }
    for (int i = 0; i < 4; ++i) {
        float *at = &c[(row + lane / 4 + i / 2 * 8) * n + column + lane % 4 * 2];
        *reinterpret_cast<float2 *>(at + i % 2 * 8) = make_float2(sums[i % 2][i / 2 * 2], sums[i % 2][i / 2 * 2 + 1]);
    }
}

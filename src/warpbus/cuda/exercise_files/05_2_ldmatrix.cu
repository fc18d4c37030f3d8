// Chapter 5: C = A B^T of n x n with ldmatrix and without bank conflicts, one warp per 16 x 16 elements of C. n is a
// multiple of 32. The rows of A and of B lie along k.
// 第 5 章：用 ldmatrix 计算 n x n 的 C = A B^T，没有 bank 冲突，每个线程束算 C 的 16 x 16 个元素。n 是 32 的倍数。A 和 B 的行都沿 k 方向。
//
// A tile has 16 rows of 32 elements, in chunks of 8 elements (16 bytes). `load` is one ldmatrix: it reads four matrices
// of 8 x 8 elements, whose rows are chunks, and puts matrix i into register i of the fragment layout. Lane i gives the
// place of row i % 8 of matrix i / 8. For A, matrices 0 to 3 are: rows 0 to 7, rows 8 to 15 at the first 8 k, and the same
// rows at the next 8 k. For B: rows 0 to 7 at the first 8 k, at the next 8 k, then rows 8 to 15 likewise.
// 一个分块有 16 行，每行 32 个元素，分成 8 个元素（16 字节）一段。`load` 就是一条 ldmatrix：读入四个 8 x 8 矩阵（每行是一段），
// 矩阵 i 放进第 i 个寄存器。第 i 号线程给出矩阵 i / 8 的第 i % 8 行的位置。A 的四个矩阵依次是：前 8 个 k 的第 0～7 行、第 8～15 行，
// 然后是后 8 个 k 的同样两组行；B 依次是：第 0～7 行的前 8 个 k、后 8 个 k，然后第 8～15 行同样。
//
// 1. Give `load` the right places. 2. `place` stores a row as it is: the 8 rows of a matrix then lie in the same banks.
// Permute the chunks of each row.
// 1. 给 `load` 传入正确的位置。2. `place` 原样存放每一行，一个矩阵的 8 行会落在相同的 bank 里：请把每行的各段换个次序存放。
//
// Check it with / 检查：  warpbus learn 05.2 --check
#include <cstdint>
#include <cuda_fp16.h>

// Where a chunk of a row begins in a tile, in elements. 一行中某一段在分块里的起点（以元素计）。
__device__ int place(int row, int chunk) { return row * 32 + chunk * 8; }

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
            load(left, &tile_a[0]);   // the place for this lane 这里填入本线程的位置
            load(right, &tile_b[0]);  // the place for this lane 这里填入本线程的位置
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

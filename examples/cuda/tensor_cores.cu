// C = A B on tensor cores, float16 with float32 sums: by WMMA, by mma with fragments that are loaded element by element,
// and by mma with ldmatrix and asynchronous copies.
//
//     warpbus cuda run examples/cuda/tensor_cores.cu
//     warpbus cuda run examples/cuda/tensor_cores.cu 4096 time    # TFLOP/s on a GPU of compute capability 8.0 or later
#include "check.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include <cuda_fp16.h>
#include <mma.h>

// One warp per 16 x 16 elements of C. Which lane holds which element is the compiler's business.
__global__ void by_wmma(const half *a, const half *b, float *c, int n) {
    using namespace nvcuda::wmma;
    const int row = blockIdx.y * 16, column = blockIdx.x * 16;
    fragment<matrix_a, 16, 16, 16, half, row_major> left;
    fragment<matrix_b, 16, 16, 16, half, row_major> right;
    fragment<accumulator, 16, 16, 16, float> sums;
    fill_fragment(sums, 0.0f);
    for (int k = 0; k < n; k += 16) {
        load_matrix_sync(left, a + row * n + k, n);
        load_matrix_sync(right, b + k * n + column, n);
        mma_sync(sums, left, right, sums);
    }
    store_matrix_sync(c + row * n + column, sums, n, mem_row_major);
}

// D = A B + D for 16 x 16 elements of A and 16 x 8 of B. Lane 4 g + t has, two elements per register:
//   a: rows g, g + 8 at k = 2 t, 2 t + 1; then the same rows at k = 2 t + 8, 2 t + 9
//   b: column g at k = 2 t, 2 t + 1; then at k = 2 t + 8, 2 t + 9
//   d: row g at columns 2 t, 2 t + 1; then row g + 8
__device__ void mma(float *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ uint32_t pair(half low, half high) {
    return __half_as_ushort(low) | static_cast<uint32_t>(__half_as_ushort(high)) << 16;
}

// One warp per 16 x 8 elements of C, which loads its fragments from device memory, element by element.
__global__ void by_mma(const half *a, const half *b, float *c, int n) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4, row = blockIdx.y * 16 + g, column = blockIdx.x * 8;
    float d[4] = {};
    for (int k = 2 * t; k < n; k += 16) {
        uint32_t left[4], right[2];
        for (int i = 0; i < 4; ++i) {
            const half *at = a + (row + i % 2 * 8) * n + k + i / 2 * 8;
            left[i] = pair(at[0], at[1]);
        }
        for (int i = 0; i < 2; ++i) {
            const half *at = b + (k + i * 8) * n + column + g;
            right[i] = pair(at[0], at[n]);
        }
        mma(d, left, right[0], right[1]);
    }
    for (int i = 0; i < 4; ++i) c[(row + i / 2 * 8) * n + column + 2 * t + i % 2] = d[i];
}

// A block of 4 warps computes 64 x 64 elements in steps of 32 along k. While one pair of tiles is multiplied, the next
// one is copied. Rows are stored in chunks of 8 elements, 16 bytes, at permuted places: ldmatrix reads 8 rows of a chunk,
// which then lie in different banks.
constexpr int kTile = 64, kStep = 32, kThreads = 128;

__device__ int place_a(int row, int chunk) { return row * kStep + (chunk ^ row / 2 % 4) * 8; }
__device__ int place_b(int row, int chunk) { return row * kTile + (chunk ^ row % 8) * 8; }

__device__ void copy_async(half *to, const half *from) {
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

// Four matrices of 8 x 8 elements: lane i has the address of row i % 8 of matrix i / 8.
__device__ void load_matrices(uint32_t *to, const half *row) {
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared)
                 : "memory");
}
__device__ void load_transposed(uint32_t *to, const half *row) {
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared)
                 : "memory");
}

__global__ void by_ldmatrix(const half *a, const half *b, float *c, int n) {
    __shared__ __align__(16) half tile_a[2][kTile * kStep], tile_b[2][kStep * kTile];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row0 = blockIdx.y * kTile, column0 = blockIdx.x * kTile;
    const int warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
    const auto fetch = [&](int stage, int k) {
        for (int i = threadIdx.x; i < kTile * kStep / 8; i += kThreads) {
            copy_async(&tile_a[stage][place_a(i / 4, i % 4)], a + (row0 + i / 4) * n + k + i % 4 * 8);
            copy_async(&tile_b[stage][place_b(i / 8, i % 8)], b + (k + i / 8) * n + column0 + i % 8 * 8);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float sums[2][4][4] = {};
    fetch(0, 0);
    for (int k = 0, stage = 0; k < n; k += kStep, stage ^= 1) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");  // this thread's copies of the stage
        __syncthreads();                                        // everybody's; and nobody reads the other stage any more
        if (k + kStep < n) fetch(stage ^ 1, k + kStep);
        for (int step = 0; step < kStep; step += 16) {
            uint32_t left[2][4];
            for (int i = 0; i < 2; ++i)
                load_matrices(left[i], &tile_a[stage][place_a(warp_row + i * 16 + lane % 16, step / 8 + lane / 16)]);
            for (int j = 0; j < 4; j += 2) {
                uint32_t right[4];  // two blocks of 8 columns
                load_transposed(right, &tile_b[stage][place_b(step + lane % 16, warp_column / 8 + j + lane / 16)]);
                for (int i = 0; i < 2; ++i) {
                    mma(sums[i][j], left[i], right[0], right[1]);
                    mma(sums[i][j + 1], left[i], right[2], right[3]);
                }
            }
        }
    }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 4; ++j)
            for (int half_of = 0; half_of < 2; ++half_of) {
                const int row = row0 + warp_row + i * 16 + half_of * 8 + lane / 4;
                const int column = column0 + warp_column + j * 8 + lane % 4 * 2;
                *reinterpret_cast<float2 *>(c + row * n + column) =
                    make_float2(sums[i][j][half_of * 2], sums[i][j][half_of * 2 + 1]);
            }
}

int main(int argc, char **argv) {
    const int n = argc > 1 ? atoi(argv[1]) : 128;
    const bool timed = argc > 2 && !strcmp(argv[2], "time");
    if (n < kTile || n % kTile || n > 16384) {
        fprintf(stderr, "n has to be a multiple of %d, up to 16384\n", kTile);
        return 1;
    }
    std::vector<half> a(size_t(n) * n), b(a.size());
    for (size_t i = 0; i < a.size(); ++i) {  // small integers: each sum is exact
        a[i] = __float2half(float(int(i * 7 % 11) - 5));
        b[i] = __float2half(float(int(i * 5 % 13) - 6));
    }
    half *d_a, *d_b;
    float *d_c;
    std::vector<float> c(a.size());
    CHECK(cudaMalloc(&d_a, a.size() * sizeof(half)));
    CHECK(cudaMalloc(&d_b, b.size() * sizeof(half)));
    CHECK(cudaMalloc(&d_c, c.size() * sizeof(float)));
    CHECK(cudaMemcpy(d_a, a.data(), a.size() * sizeof(half), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_b, b.data(), b.size() * sizeof(half), cudaMemcpyHostToDevice));
    const char *names[] = {"wmma", "mma", "mma, ldmatrix, cp.async"};
    for (int kernel = 0; kernel < 3; ++kernel) {
        const auto run = [&] {
            if (kernel == 0) by_wmma<<<dim3(n / 16, n / 16), 32>>>(d_a, d_b, d_c, n);
            if (kernel == 1) by_mma<<<dim3(n / 8, n / 16), 32>>>(d_a, d_b, d_c, n);
            if (kernel == 2) by_ldmatrix<<<dim3(n / kTile, n / kTile), kThreads>>>(d_a, d_b, d_c, n);
            CHECK(cudaGetLastError());
        };
        CHECK(cudaMemset(d_c, 0xFF, c.size() * sizeof(float)));
        run();
        CHECK(cudaMemcpy(c.data(), d_c, c.size() * sizeof(float), cudaMemcpyDeviceToHost));
        size_t wrong = 0;
        for (int i = 0; i < n; i += n > 512 ? 97 : 1)  // of large matrices some rows
            for (int j = 0; j < n; ++j) {
                float sum = 0;
                for (int k = 0; k < n; ++k) sum += __half2float(a[size_t(i) * n + k]) * __half2float(b[size_t(k) * n + j]);
                wrong += c[size_t(i) * n + j] != sum;
            }
        printf("%-24s n = %d, wrong: %zu", names[kernel], n, wrong);
        if (timed) {
            cudaEvent_t begin, end;
            CHECK(cudaEventCreate(&begin));
            CHECK(cudaEventCreate(&end));
            CHECK(cudaEventRecord(begin));
            for (int i = 0; i < 10; ++i) run();
            CHECK(cudaEventRecord(end));
            CHECK(cudaEventSynchronize(end));
            float milliseconds;
            CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
            printf(", %.1f TFLOP/s", 20.0 * n * n * n / milliseconds / 1e9);
        }
        printf("\n");
    }
    CHECK(cudaFree(d_a));
    CHECK(cudaFree(d_b));
    CHECK(cudaFree(d_c));
}

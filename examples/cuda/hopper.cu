// C = A B on a Hopper, float16 with float32 sums: the copy engine (TMA) brings tiles, mbarriers hand them over, and wgmma
// multiplies them.
//
//     warpbus cuda run examples/cuda/hopper.cu
//     warpbus cuda run examples/cuda/hopper.cu 4096 time    # TFLOP/s on a GPU of compute capability 9.0
//
// nvcc compiles it with -arch=sm_90a: wgmma belongs to Hopper alone. On another GPU the program says so.
#include "check.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include <cuda.h>
#include <cuda_fp16.h>

// A block computes 128 x 128 elements of C. One warp, the producer, brings tiles of A (128 x 64) and B (64 x 128) into a
// ring of stages; two warpgroups of four warps, the consumers, multiply 64 rows each. Rows in shared memory are 64
// elements, 128 bytes, long: that is the width of the swizzle, so B comes in two halves of 64 columns.
constexpr int kTile = 128, kDepth = 64, kHalf = 64, kStages = 4;
constexpr int kConsumers = 2, kThreads = kConsumers * 128 + 32;
constexpr int kBytesA = kTile * kDepth * 2, kBytesB = kDepth * kHalf * 2;  // of a tile of A, and of a half of B
constexpr int kStageBytes = kBytesA + 2 * kBytesB;

__device__ uint32_t shared_address(const void *pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// ---- mbarriers: a phase ends when `count` threads have arrived and all announced bytes are there

__device__ void init(uint64_t *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ void arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ void arrive_and_expect(uint64_t *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
// Phases have the parities 0, 1, 0, ...: to wait for 1 on a new barrier returns at once.
__device__ void wait(uint64_t *barrier, int parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

// ---- TMA: one thread asks for a box of 64 columns, whose bytes are counted at the barrier

__device__ void load_box(void *to, const CUtensorMap *map, int column, int row, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     shared_address(to)),
                 "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
                 : "memory");
}

// ---- wgmma: 128 threads multiply tiles that lie in shared memory

// A tile with the swizzle over 128 bytes: bits 62 and 63 say so. Groups of 8 rows lie 1024 bytes apart; all offsets are in
// units of 16 bytes.
__device__ uint64_t descriptor(const char *tile) {
    return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | (shared_address(tile) & 0x3FFFF) >> 4;
}

// D += A B for 64 rows of A and 64 columns of B, 16 deep. Thread t has in d[4 j + 2 h + i] the element of row
// 16 (t / 32) + t % 32 / 4 + 8 h and column 8 j + 2 (t % 4) + i. The last operand, 1, says that the rows of B in shared
// memory run along its columns (N-major); those of A run along k.
__device__ void multiply(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        "setp.ne.b32 accumulate, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, accumulate, 1, 1, 0, 1;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b));
}

__device__ void produce(char *stages, uint64_t *full, uint64_t *empty, const CUtensorMap *a, const CUtensorMap *b, int steps) {
    for (int step = 0; step < steps; ++step) {
        const int stage = step % kStages, round = step / kStages;
        char *tile_a = stages + stage * kStageBytes, *tile_b = tile_a + kBytesA;
        wait(&empty[stage], (round & 1) ^ 1);  // in the first round nobody has to free the stage
        arrive_and_expect(&full[stage], kStageBytes);
        load_box(tile_a, a, step * kDepth, blockIdx.y * kTile, &full[stage]);
        for (int half = 0; half < 2; ++half)
            load_box(tile_b + half * kBytesB, b, blockIdx.x * kTile + half * kHalf, step * kDepth, &full[stage]);
    }
}

__device__ void consume(char *stages, uint64_t *full, uint64_t *empty, float *c, int n, int steps) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    float left[32] = {}, right[32] = {};  // the sums of the two halves of the columns
    for (int step = 0; step < steps; ++step) {
        const int stage = step % kStages, round = step / kStages;
        const char *tile_a = stages + stage * kStageBytes + group * 64 * 128, *tile_b = stages + stage * kStageBytes + kBytesA;
        wait(&full[stage], round & 1);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int k = 0; k < kDepth; k += 16) {
            const uint64_t a = descriptor(tile_a + k * 2);        // 16 k on: 32 bytes on in each row
            const uint64_t b = descriptor(tile_b + k * 128);      // 16 k on: 16 rows on
            multiply(left, a, b);
            multiply(right, a, b + (kBytesB >> 4));
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        // While these products are made, those of the step before are complete: its stage may be filled again.
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (step > 0 && lane == 0) arrive(&empty[(step - 1) % kStages]);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");  // before it, the sums must not be read
    for (int i = 0; i < 32; i += 2) {
        const int row = blockIdx.y * kTile + group * 64 + thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
        float *at = c + static_cast<size_t>(row) * n + blockIdx.x * kTile + i / 4 * 8 + lane % 4 * 2;
        *reinterpret_cast<float2 *>(at) = make_float2(left[i], left[i + 1]);
        *reinterpret_cast<float2 *>(at + kHalf) = make_float2(right[i], right[i + 1]);
    }
}

__global__ void __launch_bounds__(kThreads) product(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                                                    float *c, int n) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // other GPUs do not have the instructions
    extern __shared__ __align__(1024) char stages[];
    __shared__ uint64_t full[kStages], empty[kStages];
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            init(&full[stage], 1);                 // the producer, and its bytes
            init(&empty[stage], kConsumers * 4);   // one lane of each warp
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // for the copy engine, too
    }
    __syncthreads();
    const int steps = n / kDepth;
    if (threadIdx.x < kConsumers * 128) consume(stages, full, empty, c, n, steps);
    else if (threadIdx.x == kConsumers * 128) produce(stages, full, empty, &a, &b, steps);
#endif
}

// A matrix [n, n] by rows, which is copied in boxes of `rows` x 64 elements.
CUtensorMap tensor_map(const half *matrix, int n, int rows) {
    // A function of the driver, which the runtime finds: so the program needs not be linked with the driver's library.
    static const auto encode = [] {
        void *found = nullptr;
        cudaDriverEntryPointQueryResult result;
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
    }();
    CUtensorMap map;
    const cuuint64_t sides[] = {cuuint64_t(n), cuuint64_t(n)}, strides[] = {cuuint64_t(n) * sizeof(half)};
    const cuuint32_t box[] = {64, cuuint32_t(rows)}, steps[] = {1, 1};
    const CUresult status =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<half *>(matrix), sides, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        fprintf(stderr, "cuTensorMapEncodeTiled: error %d\n", status);
        exit(1);
    }
    return map;
}

int main(int argc, char **argv) {
    const int n = argc > 1 ? atoi(argv[1]) : 384;
    const bool timed = argc > 2 && !strcmp(argv[2], "time");
    if (n < kTile || n % kTile || n > 16384) {
        fprintf(stderr, "n has to be a multiple of %d, up to 16384\n", kTile);
        return 1;
    }
    int major;
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    if (major != 9) {
        printf("this program needs a Hopper (compute capability 9.0); this GPU has %d.x\n", major);
        return 0;
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
    CHECK(cudaMemset(d_c, 0xFF, c.size() * sizeof(float)));
    CHECK(cudaFuncSetAttribute(product, cudaFuncAttributeMaxDynamicSharedMemorySize, kStages * kStageBytes));
    const CUtensorMap map_a = tensor_map(d_a, n, kTile), map_b = tensor_map(d_b, n, kDepth);
    const auto run = [&] {
        product<<<dim3(n / kTile, n / kTile), kThreads, kStages * kStageBytes>>>(map_a, map_b, d_c, n);
        CHECK(cudaGetLastError());
    };
    run();
    CHECK(cudaMemcpy(c.data(), d_c, c.size() * sizeof(float), cudaMemcpyDeviceToHost));
    size_t wrong = 0;
    for (int i = 0; i < n; i += n > 512 ? 97 : 1)  // of large matrices some rows
        for (int j = 0; j < n; ++j) {
            float sum = 0;
            for (int k = 0; k < n; ++k) sum += __half2float(a[size_t(i) * n + k]) * __half2float(b[size_t(k) * n + j]);
            wrong += c[size_t(i) * n + j] != sum;
        }
    printf("TMA, wgmma, n = %d, wrong: %zu", n, wrong);
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
    CHECK(cudaFree(d_a));
    CHECK(cudaFree(d_b));
    CHECK(cudaFree(d_c));
}

// Matrix product with Hopper's own instructions, one tile a block: out [m, n] = a [m, k] b [k, n] (sm_90a).
//
// The copy engine (TMA) writes tiles of a and b into shared memory, swizzled; a barrier counts their bytes; the tensor cores
// read them from there by wgmma, without a detour through registers. One thread asks for the tile after next while two
// warpgroups multiply. What it does not do yet is in gemm/sm90_hgemm.cu: a warp that only copies, blocks that stay for many
// tiles, clusters that share what they fetch, a store through the copy engine.
//
// a and b are row-major (b's tile is therefore MN-major), their rows a multiple of 16 bytes; out is row-major. Any m, n, k.
#include "common/numeric.cuh"
#include "common/wgmma.cuh"

constexpr int kTileM = 128;
constexpr int kTileN = 128;
constexpr int kTileK = 64;
constexpr int kStages = 3;
constexpr int kBox = 64 * 64 * 2;  // bytes of a box of 64 by 64 elements
constexpr int kBytesA = kTileM * kTileK * 2;
constexpr int kBytesB = kTileN * kTileK * 2;

extern "C" __global__ void __launch_bounds__(256)
    matmul_wgmma(const __grid_constant__ ptx::TensorMap map_a, const __grid_constant__ ptx::TensorMap map_b, ELEMENT* out,
                 int m, int n, int k) {
    extern __shared__ unsigned char memory[];
    const ptx::uint32 a = (ptx::shared_address(memory) + 1023) & ~1023u;
    const ptx::uint32 b = a + kStages * kBytesA;
    const ptx::uint32 full = b + kStages * kBytesB;
    const int row = blockIdx.y * kTileM;
    const int column = blockIdx.x * kTileN;
    const int depths = (k + kTileK - 1) / kTileK;

    auto fetch = [&](int depth) {
        const int stage = depth % kStages;
        const ptx::uint32 barrier = full + 8 * stage;
        ptx::mbarrier_expect(barrier, kBytesA + kBytesB);
        ptx::tma_load(a + stage * kBytesA, &map_a, barrier, depth * kTileK, row);
        for (int i = 0; i < kTileN / 64; ++i) {
            ptx::tma_load(b + stage * kBytesB + i * kBox, &map_b, barrier, column + 64 * i, depth * kTileK);
        }
    };

    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(full + 8 * i, 1);
        ptx::mbarrier_fence_init();
        for (int depth = 0; depth < min(kStages - 1, depths); ++depth) fetch(depth);
    }
    __syncthreads();

    const int warpgroup = threadIdx.x / 128;
    float d[kTileN / 2];
    for (int depth = 0; depth < depths; ++depth) {
        const int stage = depth % kStages;
        ptx::mbarrier_wait(full + 8 * stage, depth / kStages % 2);
        const ptx::uint64 from_a = ptx::wgmma_descriptor(a + stage * kBytesA + warpgroup * kBox, 0, 1024);
        const ptx::uint64 from_b = ptx::wgmma_descriptor(b + stage * kBytesB, kBox, 1024);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kTileK / 16; ++step) {
            ptx::wgmma<ELEMENT, kTileN, 0, 1>(d, from_a + step * 32 / ptx::kDescriptorUnit,
                                              from_b + step * 2048 / ptx::kDescriptorUnit, depth > 0 || step > 0);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        // All have read the stage before this one: its buffer may be filled again.
        __syncthreads();
        if (threadIdx.x == 0 && depth + kStages - 1 < depths) fetch(depth + kStages - 1);
    }

    const int lane = threadIdx.x % 32;
    const int first_row = row + 64 * warpgroup + 16 * (threadIdx.x % 128 / 32) + lane / 4;
#pragma unroll
    for (int j = 0; j < kTileN / 2; ++j) {
        const int y = first_row + (j & 2 ? 8 : 0);
        const int x = column + 8 * (j / 4) + 2 * (lane % 4) + (j & 1);
        if (y < m && x < n) out[static_cast<long long>(y) * n + x] = from_float<ELEMENT>(d[j]);
    }
}

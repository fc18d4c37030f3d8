// Writing the transpose of a product on Hopper: a warpgroup has D [64 rows of the weight, tokens] as wgmma leaves it, four
// values of a thread per 8 tokens, and `out` [tokens, n] takes it as columns. Either by ordinary stores, or 16 tokens at a
// time by stmatrix into a box [tokens][64] in shared memory with the 128-byte swizzle, which the copy engine stores.
#pragma once
#include "common/numeric.cuh"
#include "common/wgmma.cuh"

// Ordinary stores of tokens [token, end) and rows of the weight [row, n), all that `d` has of them.
template <typename T, int Count>
__device__ __forceinline__ void store_directly(const float (&d)[Count], T* out, int token, int row, int end, int n) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        const int mine = token + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        const int column = row + 16 * warp + lane / 4 + (i & 2 ? 8 : 0);
        if (mine < end && column < n) out[static_cast<long long>(mine) * n + column] = from_float<T>(d[i]);
    }
}

// 16 tokens, eight values of a thread, into a box from its row `token` on.
template <typename T>
__device__ __forceinline__ void transpose(const float* from, ptx::uint32 box, int token) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    // Lanes 8 i to 8 i + 7 address the rows of the i-th matrix: 8 tokens by 8 rows of the weight.
    const int mine = token + lane / 16 * 8 + lane % 8;
    const int chunk = 2 * warp + lane / 8 % 2;
    ptx::stmatrix_x4_trans(box + mine * 128 + ((chunk ^ (mine & 7)) << 4), pack_pair<T>(from[0], from[1]),
                           pack_pair<T>(from[2], from[3]), pack_pair<T>(from[4], from[5]),
                           pack_pair<T>(from[6], from[7]));
}

// A box of out: all threads of the warpgroup, which is consumer number `consumer`, write it between begin_box and end_box.
__device__ __forceinline__ void begin_box(int consumer) {
    if (threadIdx.x % 128 == 0) ptx::tma_store_wait_read<0>();
    ptx::named_barrier(1 + consumer, 128);
}
__device__ __forceinline__ void end_box(const ptx::TensorMap& map_out, ptx::uint32 box, int row, int token,
                                        int consumer) {
    ptx::fence_proxy_async();
    ptx::named_barrier(1 + consumer, 128);
    if (threadIdx.x % 128 == 0) {
        ptx::tma_store(&map_out, box, row, token);
        ptx::tma_store_commit();
    }
}

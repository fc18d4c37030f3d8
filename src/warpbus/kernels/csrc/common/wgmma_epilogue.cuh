// The epilogue of a product on Hopper: a warpgroup has D [64 rows of the weight, tokens] as wgmma leaves it, and `out`
// [tokens, n] takes it transposed, as columns. With a gate, `join_gate` computes SwiGLU first. The stores are ordinary ones, or
// stmatrix writes 16 tokens at a time into a box [tokens][Columns] in shared memory, swizzled over the bytes of its row, which
// the copy engine stores.
//
// Columns = 64: a thread has four values per 8 tokens, as wgmma leaves them. Columns = 32: `join_gate` has joined 32 rows of
// the gate and the same rows of up, and a thread has four values per 16 tokens.
#pragma once
#include "common/numeric.cuh"
#include "common/wgmma.cuh"

// Where a warp's 16 rows begin among the columns of out that its warpgroup has: with a gate, 32 rows of the gate by its first
// two warps, and the same rows of up by the others.
template <bool Gated>
__device__ __forceinline__ int row_of_warp() {
    const int warp = threadIdx.x % 128 / 32;
    return 16 * (Gated ? warp % 2 : warp);
}

// The tile of 16 rows that a warp multiplies, among those of all warpgroups. With a gate, all those of the gate come first. The
// first warpgroup of a block does not multiply.
template <bool Gated, int Warpgroups>
__device__ __forceinline__ int packed_tile_of_warp() {
    const int warp = threadIdx.x / 32 - 4;
    return Gated ? warp / 4 * 2 + warp % 2 + warp % 4 / 2 * (2 * Warpgroups) : warp;
}

// Of every 16 tokens, the first two warps of a warpgroup have the first 8 and the others the last 8 once a gate is joined.
__device__ __forceinline__ bool has_last_tokens() { return threadIdx.x % 128 >= 64; }

// The warpgroup's buffer in shared memory may be written once this has been called by all its threads.
__device__ __forceinline__ void wait_for_stores(int consumer) {
    if (threadIdx.x % 128 == 0) ptx::tma_store_wait_read<0>();
    ptx::named_barrier(1 + consumer, 128);
}

// silu(gate) * up, where the first two warps of a warpgroup have 32 rows of the gate and the others the same rows of up. Warps
// exchange half of their sums through `buffer` in shared memory, 2 KB per 16 tokens or 8 KB, so that all have as much to do.
// The results take the place of the first half of `d`; those of tokens from `tokens` on are not needed. `d` is in units of
// `unit`, the results in those of 1.
template <int Count>
__device__ __forceinline__ void join_gate(float (&d)[Count], ptx::uint32 buffer, int consumer, int tokens = 2 * Count,
                                          float unit = 1.0f) {
    constexpr int kUnits = Count / 8;  // of 16 tokens
    constexpr int kAtOnce = kUnits < 4 ? kUnits : 4;
    static_assert(kUnits % kAtOnce == 0, "units are exchanged kAtOnce at a time");
    int thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread));  // else what follows from it would take registers during the products
    const bool is_up = thread >= 64;
    const ptx::uint32 mine = buffer + thread * 16, theirs = buffer + (thread ^ 64) * 16;
    wait_for_stores(consumer);
#pragma unroll
    for (int first = 0; first < kUnits; first += kAtOnce) {
        if (first > 0 && 16 * first >= tokens) continue;
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
            const float* const sums = d + 8 * (first + u);
            ptx::store_shared_16(mine + 2048 * u, is_up ? sums[0] : sums[4], is_up ? sums[1] : sums[5],
                                 is_up ? sums[2] : sums[6], is_up ? sums[3] : sums[7]);
        }
        ptx::named_barrier(1 + consumer, 128);
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
            ptx::uint32 given[4];
            ptx::load_shared_16(given, theirs + 2048 * u);
            const float* const sums = d + 8 * (first + u);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float own = is_up ? sums[4 + i] : sums[i], other = __uint_as_float(given[i]);
                const float gate = is_up ? other : own, up = is_up ? own : other;
                d[4 * (first + u) + i] = activate(kSilu, gate * unit) * (up * unit);
            }
        }
        ptx::named_barrier(1 + consumer, 128);
    }
}

// Ordinary stores of tokens [token, end) and columns [column, n), all that `d` has of them.
template <typename T, int Columns, int Count>
__device__ __forceinline__ void store_directly(const float (&d)[Count], T* out, int token, int column, int end, int n) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int strip = Columns == 64 ? warp : warp % 2;  // of 16 columns
    if (Columns == 32 && has_last_tokens()) token += 8;
#pragma unroll
    for (int i = 0; i < Count * Columns / 64; ++i) {
        const int mine = token + (Columns == 64 ? 8 : 16) * (i / 4) + 2 * (lane % 4) + i % 2;
        const int place = column + 16 * strip + lane / 4 + (i & 2 ? 8 : 0);
        if (mine < end && place < n) out[static_cast<long long>(mine) * n + place] = from_float<T>(d[i]);
    }
}

// 16 tokens into a box from its row `token` on: eight values of a thread, or four with a gate.
template <typename T, int Columns>
__device__ __forceinline__ void transpose(const float* from, ptx::uint32 box, int token) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    // Lanes 8 i to 8 i + 7 address the rows of the i-th matrix: 8 tokens by 8 columns.
    if constexpr (Columns == 64) {
        const int mine = token + lane / 16 * 8 + lane % 8;
        const int chunk = 2 * warp + lane / 8 % 2;
        ptx::stmatrix_x4_trans(box + mine * 128 + ((chunk ^ (mine & 7)) << 4), pack_pair<T>(from[0], from[1]),
                               pack_pair<T>(from[2], from[3]), pack_pair<T>(from[4], from[5]),
                               pack_pair<T>(from[6], from[7]));
    } else {
        static_assert(Columns == 32, "a box has 64 columns, or 32");
        const int mine = token + warp / 2 * 8 + lane % 8;
        const int chunk = warp % 2 * 2 + lane / 8 % 2;
        ptx::stmatrix_x2_trans(box + mine * 64 + ((chunk ^ (mine / 2 & 3)) << 4), pack_pair<T>(from[0], from[1]),
                               pack_pair<T>(from[2], from[3]));
    }
}

// A box of out: all threads of the warpgroup, which is consumer number `consumer`, write it between begin_box and end_box.
__device__ __forceinline__ void begin_box(int consumer) { wait_for_stores(consumer); }
__device__ __forceinline__ void end_box(const ptx::TensorMap& map_out, ptx::uint32 box, int row, int token,
                                        int consumer) {
    ptx::fence_proxy_async();
    ptx::named_barrier(1 + consumer, 128);
    if (threadIdx.x % 128 == 0) {
        ptx::tma_store(&map_out, box, row, token);
        ptx::tma_store_commit();
    }
}

// The first `rows` rows of a box, 16 bytes by each thread at a time. Rows of out begin at multiples of 16 bytes.
template <typename T, int Columns>
__device__ __forceinline__ void store_rows(ptx::uint32 box, T* out, int token, int rows, int column, int n) {
    constexpr int kChunks = Columns / 8;  // of a row
    for (int i = threadIdx.x % 128; i < rows * kChunks; i += 128) {
        const int row = i / kChunks, chunk = i % kChunks;
        ptx::uint32 words[4];
        ptx::load_shared_16(words, box + row * Columns * 2 + ((chunk ^ (Columns == 64 ? row & 7 : row / 2 & 3)) << 4));
        if (column + chunk * 8 >= n) continue;
        *reinterpret_cast<uint4*>(out + static_cast<long long>(token + row) * n + column + chunk * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
}

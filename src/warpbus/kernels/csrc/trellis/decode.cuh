// The numbers of a trellis as A fragments of mma.m16n8k32 (warpbus/qtensor/trellis.py, warpbus/kernels/ops/trellis_packed.py).
//
// Needs the macro BITS: of a weight, 2 or 3.
#pragma once
#include "common/ptx.cuh"

constexpr int kWidth = 2 * BITS;   // bits of a symbol, which stands for two weights
constexpr int kWindow = 14;        // bits of a state
constexpr int kWords = 8 * BITS;   // of a tile of 16 by 16 weights
constexpr int kBlock = 128;        // columns that lie together: two units of four tiles
constexpr int kUnits = 2;          // in a block
constexpr int kTiles = 4;          // in a unit, whose words alternate
constexpr int kVectors = kUnits * kWords;  // of 16 bytes, in 16 rows of a block

// Where the 8 * BITS bits of a lane begin among the words of a tile. With the bits up to the end of its last state, 32 or
// fewer, they lie in that word and the next of the cyclic stream.
struct Window {
    int first, second, shift;

    __device__ __forceinline__ explicit Window(int lane)
        : first(BITS * lane / 4), second((first + 1) % kWords), shift(BITS * lane % 4 * 8) {}
};

constexpr ptx::uint32 kMultiplier = 0xAA44731Bu;
constexpr float kUnit = 1.0f / 128;  // of the numbers: qtensor/trellis.py

// State i of a lane, from the 32 bits at which its four states begin. The shift to the left is a multiplication, which leaves
// the unit that shifts and masks, the busiest one, an instruction instead of two.
__device__ __forceinline__ ptx::uint32 state(ptx::uint32 window, int i) {
    const int above = 32 - kWindow - kWidth * i;  // bits
    if (i == 0) return window & (1u << kWindow) - 1;
    if (above == 0) return window >> 32 - kWindow;
    ptx::uint32 high;
    asm("mul.lo.u32 %0, %1, %2;" : "=r"(high) : "r"(window), "r"(1u << above));  // the compiler would shift and mask
    return high >> 32 - kWindow;
}

// Four signed bytes for each state: a number, in the unit kUnit, is the sum of two of them, and the next number that of the
// others. As an A fragment of mma.m16n8k32, where they meet the same x twice, they need no other instruction.
__device__ __forceinline__ void bytes_of(ptx::uint32 (&a)[4], ptx::uint32 window) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = state(window, i) * kMultiplier;
}

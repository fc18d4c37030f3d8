// The numbers of a trellis as A fragments of mma.m16n8k16 (warpbus/qtensor/trellis.py, warpbus/kernels/ops/trellis_packed.py).
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

// The constants of the code: of the states' products, of the bits of a float16 that are kept and set, and of shifts to the left.
struct Constants {
    ptx::uint32 first, second, first_added, second_added, kept, exponent, left[2];
};
constexpr Constants kCode = {0x9E3779B1u, 0x85EBCA77u, 0x00012345u, 0x00777777u, 0x8FFF8FFFu, 0x30003000u,
                             {1u << 32 - kWindow - kWidth, 1u << 32 - kWindow - 2 * kWidth}};

// They stay in registers, because an instruction takes at most one number of its own. Those that the compiler knows it
// would move into a register again wherever they are used, so they are read from shared memory: Constants at `address`.
struct Code : Constants {
    __device__ __forceinline__ explicit Code(ptx::uint32 address)
        : Constants{ptx::load_shared(address),      ptx::load_shared(address + 4),  ptx::load_shared(address + 8),
                    ptx::load_shared(address + 12), ptx::load_shared(address + 16), ptx::load_shared(address + 20),
                    {ptx::load_shared(address + 24), ptx::load_shared(address + 28)}} {}

    __device__ __forceinline__ ptx::uint32 halves(ptx::uint32 product) const { return (product & kept) | exponent; }

    // State i of a lane, from the 32 bits at which its four states begin. Shifting left by a multiplication leaves the unit
    // that shifts and masks, which is the busiest, one instruction instead of two.
    __device__ __forceinline__ ptx::uint32 state(ptx::uint32 window, int i) const {
        const int above = 32 - kWindow - kWidth * i;  // bits
        if (above == 0) return window >> 32 - kWindow;
        if (i == 1 || i == 2) return window * left[i - 1] >> 32 - kWindow;
        return window >> kWidth * i & (1u << kWindow) - 1;
    }

    // The A fragment of a tile: register i holds the two numbers of state i.
    __device__ __forceinline__ void numbers(ptx::uint32 (&a)[4], ptx::uint32 window) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const ptx::uint32 own = state(window, i);
            const ptx::uint32 p = halves(own * first + first_added), q = halves(own * second + second_added);
            const __half2 sum = __hadd2(*reinterpret_cast<const __half2*>(&p), *reinterpret_cast<const __half2*>(&q));
            a[i] = *reinterpret_cast<const ptx::uint32*>(&sum);
        }
    }
};

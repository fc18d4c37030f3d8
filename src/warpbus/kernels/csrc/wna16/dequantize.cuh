// Packed weights of 4 or 8 bits: from words in registers to fragments of mma.m16n8k16 in registers.
//
// The layout is that of kernels/ops/packed.py: 512 bytes, 4 words per lane, hold 16 rows of the weight and 64 columns (4
// bits) or 32 (8 bits). Lane 4 g + t has rows g and g + 8. For each step of 16 columns it has kWords consecutive words, from
// which `integers` makes the operand A of ptx::mma_m16n8k16, pairs of columns in T = __half or __nv_bfloat16:
//   a[0] (row g, 2t and 2t+1)  a[1] (row g+8, 2t and 2t+1)  a[2] (row g, 2t+8 and 2t+9)  a[3] (row g+8, 2t+8 and 2t+9)
//
// A lane loads the scales, or the zero points, of its two rows in a group as one register of two T: row g in the low half,
// row g + 8 in the high half. Example:
//   using Packed = Codes<T, 4>;
//   const auto zeros = Packed::zeros(zero_pair);          // once per group; pack_pair<T>(8, 8) if symmetric
//   const RowPairs scales = spread_rows(scale_pair);
//   Packed::integers(a, words, zeros);                    // code - zero, exact
//   scale_fragment<T>(a, scales);                         // times scale, rounded to T
// The result has the bits of QTensor.dequantize(T): a code minus a zero point has at most 9 bits with its sign, which both
// types represent exactly, so the product with the scale is the only rounding.
//
// Where instructions per product matter, even the subtraction can be avoided:
//   Packed::spread(a, words)                              (kBase + code) times kUpper or kLower, exact
// The caller then subtracts (kBase + zero) times the sum of the other operand from the sums. In half precision the result is
// the code's own bits: read as a half, they are a subnormal number, which tensor cores multiply exactly.
//
// No conversion instructions are used, because they run at a quarter of the arithmetic rate or less. Instead, the bits of a
// code are inserted into those of a power of two whose last mantissa bit is worth 1: that gives the sum of both, and a
// subtraction leaves the code.
#pragma once
#include "common/numeric.cuh"
#include "common/ptx.cuh"

// One value for each of a lane's two rows, duplicated in a register for both columns.
struct RowPairs {
    ptx::uint32 upper, lower;  // row g, row g + 8
};

// From (row g, row g + 8) in one register.
__device__ __forceinline__ RowPairs spread_rows(ptx::uint32 pair) {
    return {__byte_perm(pair, 0, 0x1010), __byte_perm(pair, 0, 0x3232)};
}

// a b + c for both elements of a pair, each rounded once.
template <typename T>
__device__ __forceinline__ ptx::uint32 fma_pair(ptx::uint32 a, ptx::uint32 b, ptx::uint32 c);
template <>
__device__ __forceinline__ ptx::uint32 fma_pair<__half>(ptx::uint32 a, ptx::uint32 b, ptx::uint32 c) {
    const __half2 sum = __hfma2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b),
                                *reinterpret_cast<__half2*>(&c));
    return *reinterpret_cast<const ptx::uint32*>(&sum);
}
template <>
__device__ __forceinline__ ptx::uint32 fma_pair<__nv_bfloat16>(ptx::uint32 a, ptx::uint32 b, ptx::uint32 c) {
    const __nv_bfloat162 sum = __hfma2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b),
                                       *reinterpret_cast<__nv_bfloat162*>(&c));
    return *reinterpret_cast<const ptx::uint32*>(&sum);
}

// The same value in both halves of a register: the bits of a T.
__device__ __forceinline__ constexpr ptx::uint32 twice(ptx::uint32 bits) { return bits << 16 | bits; }

// bits & mask | base in one instruction. The compiler emits two for this expression, because an instruction has room for one
// constant; the asm keeps the other constant in a register.
__device__ __forceinline__ ptx::uint32 join_bits(ptx::uint32 bits, ptx::uint32 mask, ptx::uint32 base) {
    ptx::uint32 joined;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(joined) : "r"(bits), "r"(mask), "r"(base));
    return joined;
}

// Multiplies a fragment by the scales of its rows, in T. Adding -0 changes no value, not even the sign of a zero; sm_80 has
// fma for bfloat16 but no multiplication.
template <typename T>
__device__ __forceinline__ void scale_fragment(ptx::uint32 (&a)[4], RowPairs scales) {
    constexpr ptx::uint32 kMinusZero = twice(0x8000);
    a[0] = fma_pair<T>(a[0], scales.upper, kMinusZero);
    a[1] = fma_pair<T>(a[1], scales.lower, kMinusZero);
    a[2] = fma_pair<T>(a[2], scales.upper, kMinusZero);
    a[3] = fma_pair<T>(a[3], scales.lower, kMinusZero);
}

// Codes of `Bits` bits to integers in T:
//   kWords                                a lane's words for one step of 16 columns
//   Zeros zeros(pair)                     the zero points of a lane's rows, exact integers in T, in the form subtracted
//   void integers(a, words, zeros)        the fragment of code - zero, exact; `words` points to registers
//   void spread(a, words)                 the fragment of kBase + code, times kUpper in rows g and kLower in rows g + 8
template <typename T, int Bits>
struct Codes;

// Codes of row g are at bits 0 and 8 of each half of the word, those of row g + 8 at bits 4 and 12. With 0x6400, the low
// position gives 1024 + code and the high position 1024 + 16 code, of which 1/16 is 64 + code.
template <>
struct Codes<__half, 4> {
    using Zeros = RowPairs;
    static constexpr int kWords = 1;

    static __device__ __forceinline__ Zeros zeros(ptx::uint32 pair) {
        const RowPairs zero = spread_rows(pair);
        constexpr ptx::uint32 kMinusOne = twice(0xbc00);
        return {fma_pair<__half>(zero.upper, kMinusOne, twice(0xe400)),   // -1024 - zero
                fma_pair<__half>(zero.lower, kMinusOne, twice(0xd400))};  // -64 - zero
    }

    static __device__ __forceinline__ void integers(ptx::uint32 (&a)[4], const ptx::uint32* words, Zeros zeros) {
        constexpr ptx::uint32 kBase = twice(0x6400), kOne = twice(0x3c00), kSixteenth = twice(0x2c00);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const ptx::uint32 word = words[0] >> 8 * i;
            a[2 * i] = fma_pair<__half>(join_bits(word, twice(0x000f), kBase), kOne, zeros.upper);
            a[2 * i + 1] = fma_pair<__half>(join_bits(word, twice(0x00f0), kBase), kSixteenth, zeros.lower);
        }
    }

    static constexpr float kBase = 0.0f, kUpper = 0x1p-24f, kLower = 0x1p-20f;

    static __device__ __forceinline__ void spread(ptx::uint32 (&a)[4], const ptx::uint32* words) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const ptx::uint32 word = words[0] >> 8 * i;
            a[2 * i] = word & twice(0x000f);
            a[2 * i + 1] = word & twice(0x00f0);
        }
    }
};

// 0x4300 is 128 with 7 mantissa bits: too few for a code in the high position, so each code is shifted down: 128 + code.
template <>
struct Codes<__nv_bfloat16, 4> {
    using Zeros = RowPairs;
    static constexpr int kWords = 1;

    static __device__ __forceinline__ Zeros zeros(ptx::uint32 pair) {
        const RowPairs zero = spread_rows(pair);
        constexpr ptx::uint32 kMinusOne = twice(0xbf80), kMinusBase = twice(0xc300);
        return {fma_pair<__nv_bfloat16>(zero.upper, kMinusOne, kMinusBase),
                fma_pair<__nv_bfloat16>(zero.lower, kMinusOne, kMinusBase)};
    }

    static __device__ __forceinline__ void integers(ptx::uint32 (&a)[4], const ptx::uint32* words, Zeros zeros) {
        constexpr ptx::uint32 kBase = twice(0x4300), kOne = twice(0x3f80);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const ptx::uint32 sum = join_bits(words[0] >> 4 * i, twice(0x000f), kBase);
            a[i] = fma_pair<__nv_bfloat16>(sum, kOne, i % 2 == 0 ? zeros.upper : zeros.lower);
        }
    }

    static constexpr float kBase = 16.0f, kUpper = 1.0f, kLower = 1.0f;

    // 0x4180 is 16, whose fourth mantissa bit is worth 1. A base smaller than 128 leaves the sums more precision.
    static __device__ __forceinline__ void spread(ptx::uint32 (&a)[4], const ptx::uint32* words) {
        a[0] = join_bits(words[0] << 3, twice(0x0078), twice(0x4180));
#pragma unroll
        for (int i = 1; i < 4; ++i) a[i] = join_bits(words[0] >> (4 * i - 3), twice(0x0078), twice(0x4180));
    }
};

// Codes of row g are in the low byte of each half, those of row g + 8 in the high byte: 1024 + code has room for 8 bits.
template <>
struct Codes<__half, 8> {
    using Zeros = RowPairs;
    static constexpr int kWords = 2;

    static __device__ __forceinline__ Zeros zeros(ptx::uint32 pair) {
        const RowPairs zero = spread_rows(pair);
        constexpr ptx::uint32 kMinusOne = twice(0xbc00), kMinusBase = twice(0xe400);
        return {fma_pair<__half>(zero.upper, kMinusOne, kMinusBase),
                fma_pair<__half>(zero.lower, kMinusOne, kMinusBase)};
    }

    static __device__ __forceinline__ void integers(ptx::uint32 (&a)[4], const ptx::uint32* words, Zeros zeros) {
        constexpr ptx::uint32 kBase = twice(0x6400), kOne = twice(0x3c00);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            a[2 * i] = fma_pair<__half>(join_bits(words[i], twice(0x00ff), kBase), kOne, zeros.upper);
            a[2 * i + 1] = fma_pair<__half>(join_bits(words[i] >> 8, twice(0x00ff), kBase), kOne, zeros.lower);
        }
    }

    static constexpr float kBase = 0.0f, kUpper = 0x1p-24f, kLower = 0x1p-24f;

    static __device__ __forceinline__ void spread(ptx::uint32 (&a)[4], const ptx::uint32* words) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            a[2 * i] = words[i] & twice(0x00ff);
            a[2 * i + 1] = words[i] >> 8 & twice(0x00ff);
        }
    }
};

// No bfloat16 has 8 mantissa bits below a power of two, but a float has: 0x4b000000 is 2^23. The difference is an integer of
// at most 8 bits and a sign, so the upper half of the float is the bfloat16.
template <>
struct Codes<__nv_bfloat16, 8> {
    struct Zeros {
        float upper, lower;
    };
    static constexpr int kWords = 2;

    static __device__ __forceinline__ Zeros zeros(ptx::uint32 pair) {
        const float2 zero = unpack_pair<__nv_bfloat16>(pair);
        return {8388608.0f + zero.x, 8388608.0f + zero.y};
    }

    static __device__ __forceinline__ void integers(ptx::uint32 (&a)[4], const ptx::uint32* words, Zeros zeros) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const ptx::uint32 word = words[i / 2];
            const float zero = i % 2 == 0 ? zeros.upper : zeros.lower;
            const float first = code(word, i % 2 == 0 ? 0x7440 : 0x7441) - zero;
            const float second = code(word, i % 2 == 0 ? 0x7442 : 0x7443) - zero;
            a[i] = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
        }
    }

    static constexpr float kBase = 0.0f, kUpper = 1.0f, kLower = 1.0f;

    static __device__ __forceinline__ void spread(ptx::uint32 (&a)[4], const ptx::uint32* words) {
        integers(a, words, {8388608.0f, 8388608.0f});
    }

private:
    // 2^23 + the byte of the word that the selector names last.
    static __device__ __forceinline__ float code(ptx::uint32 word, ptx::uint32 selector) {
        return __uint_as_float(__byte_perm(word, 0x4b000000, selector));
    }
};

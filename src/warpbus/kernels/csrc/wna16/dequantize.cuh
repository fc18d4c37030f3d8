// Packed weights of 2, 3, 4 or 8 bits: from words in registers to fragments of mma.m16n8k16 in registers.
//
// The layout is that of kernels/ops/packed.py. Lane 4 g + t has rows g and g + 8 of 16. From the words that it reads in one
// load, of 64 columns (with 8 bits, 32), `integers` makes the operand A of ptx::mma_m16n8k16 for each step of 16 columns,
// pairs of columns in T = __half or __nv_bfloat16:
//   a[0] (row g, 2t and 2t+1)  a[1] (row g+8, 2t and 2t+1)  a[2] (row g, 2t+8 and 2t+9)  a[3] (row g+8, 2t+8 and 2t+9)
//
// A lane loads the scales, or the zero points, of its two rows in a group as one register of two T: row g in the low half,
// row g + 8 in the high half. Example:
//   using Packed = Codes<T, 4>;
//   const auto zeros = Packed::zeros(zero_pair);          // once per group; pack_pair<T>(8, 8) if symmetric
//   const RowPairs scales = Packed::scales(scale_pair);
//   Packed::integers(a, words, step, zeros);              // (code - zero) times a power of two, exact
//   scale_fragment<T>(a, scales);                         // (code - zero) times the scale, rounded to T
// The result has the bits of QTensor.dequantize(T): a code minus a zero point has at most 9 bits with its sign, which both
// types represent exactly, so the product with the scale is the only rounding.
//
// `SymmetricWeights` does the same where all zero points are 2^(Bits - 1), in bfloat16 with one instruction less.
//
// Where instructions per product matter, even the subtraction can be avoided:
//   Packed::spread(a, words, step)                        (base + code) times kUpper or kLower, exact
// The caller then subtracts (base + zero) times the sum of the other operand from the sums. In half precision the result is
// the code's own bits: read as a half, they are a subnormal number, which tensor cores multiply exactly.
//
// No conversion instructions are used, because they run at a quarter of the arithmetic rate or less. In half precision the
// bits of a code are inserted into those of a power of two of which a certain mantissa bit is worth 1: that gives the sum of
// both, and a subtraction leaves the code. In bfloat16 that would take a shift for each code of 4 bits, since only 7 mantissa
// bits are below a power of two. There the code's own bits are a subnormal number: the lowest 8 bits of a bfloat16 are an
// integer times 2^-133, because numbers with the exponents 0 and 1 are equally far apart.
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

// 2^exponent in both halves, in bfloat16.
__device__ __forceinline__ constexpr ptx::uint32 power_of_two(int exponent) { return twice(127 + exponent << 7); }

// a b, where b has a power of two in each half, with any sign: without rounding.
__device__ __forceinline__ ptx::uint32 scale_pair(ptx::uint32 a, ptx::uint32 b) {
    return fma_pair<__nv_bfloat16>(a, b, twice(0x8000));
}

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

// Reads a lane's words of one load, which begins at `load`: see kernels/ops/packed.py.
template <int Words>
__device__ __forceinline__ void read_codes(ptx::uint32 (&words)[Words], const ptx::uint32* load, int lane) {
    if constexpr (Words == 4) {
        const uint4 read = reinterpret_cast<const uint4*>(load)[lane];
        words[0] = read.x, words[1] = read.y, words[2] = read.z, words[3] = read.w;
    } else {
        const uint2 read = reinterpret_cast<const uint2*>(load)[lane];
        words[0] = read.x, words[1] = read.y;
        if constexpr (Words == 3) words[2] = load[64 + lane];
    }
}

// The same from an address in shared memory, which takes fewer registers than a pointer.
template <int Words>
__device__ __forceinline__ void read_codes(ptx::uint32 (&words)[Words], ptx::uint32 load, int lane) {
    if constexpr (Words == 4) {
        ptx::load_shared_16(words, load + 16 * lane);
    } else {
        ptx::load_shared_8(words, load + 8 * lane);
        if constexpr (Words == 3) words[2] = ptx::load_shared(load + 256 + 4 * lane);
    }
}

// The same from this lane's own address: that of the load plus 16 bytes per lane, or 8 if a lane reads fewer than four words.
template <int Words>
__device__ __forceinline__ void read_lane_codes(ptx::uint32 (&words)[Words], ptx::uint32 own) {
    if constexpr (Words == 4) {
        ptx::load_shared_16(words, own);
    } else {
        ptx::load_shared_8(words, own);
        if constexpr (Words == 3) words[2] = ptx::load_shared(own + 256 - 4 * (threadIdx.x % 32));
    }
}

// How codes lie in loads, which each lane reads at once:
//   kLoads      loads of 16 rows and 64 columns
//   kLoadWords  words that a lane reads per load
//   kLoadSteps  steps of 16 columns per load
template <int Bits>
struct Loads {
    static constexpr int kLoads = Bits == 8 ? 2 : 1;
    static constexpr int kLoadWords = Bits / kLoads;
    static constexpr int kLoadSteps = 4 / kLoads;
};

// The codes of a step of 16 columns: those of row g are the lowest bits of each byte, those of row g + 8 the next. The bits
// above are not zero.
template <int Bits>
__device__ __forceinline__ ptx::uint32 word_of_step(const ptx::uint32 (&words)[Bits], int step) {
    if constexpr (Bits == 2) return words[step / 2] >> 4 * (step % 2);
    if constexpr (Bits == 3) {
        if (step == 3) {
            const ptx::uint32 low = join_bits(words[1] >> 4, 0x0c0c0c0c, words[0] >> 6 & 0x03030303);
            return join_bits(words[2] >> 2, 0x30303030, low);
        }
    }
    return words[step];
}

// Codes of `Bits` bits to numbers in T:
//   Zeros zeros(pair)                     the zero points of a lane's rows, exact integers in T, in the form subtracted
//   RowPairs scales(pair)                 the scales of these rows, in the form that `integers` are multiplied by
//   void integers(a, words, step, zeros)  the fragment of code - zero, exact; `words` are those of a load, `step` is known
//                                         to the compiler
//   void spread(a, words, step)           the fragment of kUpperBase + code, times kUpper, in rows g and of kLowerBase +
//                                         code, times kLower, in rows g + 8
template <typename T, int Bits>
struct Codes;

// 2 to 4 bits. With 0x6400, the low position gives 1024 + code and the high position 1024 + 2^Bits code, of which 2^-Bits is
// 1024 / 2^Bits + code.
template <int Bits>
struct Codes<__half, Bits> : Loads<Bits> {
    using Zeros = RowPairs;
    static constexpr ptx::uint32 kMask = twice((1 << Bits) - 1);

    static __device__ __forceinline__ Zeros zeros(ptx::uint32 pair) {
        const RowPairs zero = spread_rows(pair);
        constexpr ptx::uint32 kMinusOne = twice(0xbc00);
        return {fma_pair<__half>(zero.upper, kMinusOne, twice(0xe400)),                  // -1024 - zero
                fma_pair<__half>(zero.lower, kMinusOne, twice(0xe400 - Bits * 0x400))};  // -1024 / 2^Bits - zero
    }
    static __device__ __forceinline__ RowPairs scales(ptx::uint32 pair) { return spread_rows(pair); }

    static __device__ __forceinline__ void integers(ptx::uint32 (&a)[4], const ptx::uint32 (&words)[Bits], int step,
                                                    Zeros zeros) {
        constexpr ptx::uint32 kBase = twice(0x6400), kOne = twice(0x3c00), kPart = twice(0x3c00 - Bits * 0x400);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const ptx::uint32 word = word_of_step(words, step) >> 8 * i;
            a[2 * i] = fma_pair<__half>(join_bits(word, kMask, kBase), kOne, zeros.upper);
            a[2 * i + 1] = fma_pair<__half>(join_bits(word, kMask << Bits, kBase), kPart, zeros.lower);
        }
    }

    static constexpr float kUpperBase = 0.0f, kLowerBase = 0.0f, kUpper = 0x1p-24f, kLower = kUpper * (1 << Bits);

    static __device__ __forceinline__ void spread(ptx::uint32 (&a)[4], const ptx::uint32 (&words)[Bits], int step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const ptx::uint32 word = word_of_step(words, step) >> 8 * i;
            a[2 * i] = word & kMask;
            a[2 * i + 1] = word & kMask << Bits;
        }
    }
};

// All widths. The bits of a code are an integer times 2^kUpperOne in row g, and times 2^kLowerOne in row g + 8, whose codes
// follow those of row g, except that with 8 bits they are shifted to their place.
template <int Bits>
struct Codes<__nv_bfloat16, Bits> : Loads<Bits> {
    static constexpr int kShift = Bits == 8 ? 0 : Bits;  // from the codes of row g to those of row g + 8
    static constexpr int kUpperOne = -133, kLowerOne = kUpperOne + kShift;
    static constexpr int kIntegerOne = -7;  // `integers` are code - zero times 2^-7, since no bfloat16 is 2^133
    static constexpr ptx::uint32 kMask = twice((1 << Bits) - 1), kMinus = twice(0x8000);

    using Zeros = RowPairs;

    static __device__ __forceinline__ Zeros zeros(ptx::uint32 pair) {
        return spread_rows(scale_pair(pair, kMinus | power_of_two(kIntegerOne)));
    }
    static __device__ __forceinline__ RowPairs scales(ptx::uint32 pair) {
        return spread_rows(scale_pair(pair, power_of_two(-kIntegerOne)));
    }

    static __device__ __forceinline__ void integers(ptx::uint32 (&a)[4], const ptx::uint32 (&words)[Loads<Bits>::kLoadWords],
                                                    int step, Zeros zeros) {
        constexpr ptx::uint32 kUpper = power_of_two(kIntegerOne - kUpperOne), kLower = power_of_two(kIntegerOne - kLowerOne);
        codes(a, words, step);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] = fma_pair<__nv_bfloat16>(a[i], i % 2 == 0 ? kUpper : kLower, i % 2 == 0 ? zeros.upper : zeros.lower);
        }
    }

    // The codes' own bits.
    static __device__ __forceinline__ void codes(ptx::uint32 (&a)[4], const ptx::uint32 (&words)[Loads<Bits>::kLoadWords],
                                                 int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (Bits == 8) a[i] = words[2 * step + i / 2] >> 8 * (i % 2) & kMask;
            else a[i] = word_of_step(words, step) >> 8 * (i / 2) & kMask << kShift * (i % 2);
        }
    }

    // What is inserted into a power of two leaves the sums more precision the smaller that is: with 4 bits 16, whose fourth
    // mantissa bit is worth 1.
    static constexpr float kUpperBase = Bits == 8 ? 0.0f : Bits == 4 ? 16.0f : 128.0f;
    static constexpr float kLowerBase = Bits > 3 ? kUpperBase : 128.0f / (1 << Bits);
    static constexpr float kUpper = Bits == 8 ? 0x1p-7f : 1.0f, kLower = kUpper;

    static __device__ __forceinline__ void spread(ptx::uint32 (&a)[4], const ptx::uint32 (&words)[Loads<Bits>::kLoadWords],
                                                  int step) {
        if constexpr (Bits == 8) {
            integers(a, words, step, {kMinus, kMinus});
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (Bits == 4) {
                    const ptx::uint32 word = i == 0 ? words[step] << 3 : words[step] >> (4 * i - 3);
                    a[i] = join_bits(word, twice(0x0078), twice(0x4180));
                } else {
                    const ptx::uint32 base = twice(i % 2 == 0 ? 0x4300 : 0x4300 - Bits * 0x80);
                    a[i] = join_bits(word_of_step(words, step) >> 8 * (i / 2), kMask << Bits * (i % 2), base);
                }
            }
        }
    }
};

// Codes of row g are in the low byte of each half, those of row g + 8 in the high byte: 1024 + code has room for 8 bits.
template <>
struct Codes<__half, 8> : Loads<8> {
    using Zeros = RowPairs;

    static __device__ __forceinline__ Zeros zeros(ptx::uint32 pair) {
        const RowPairs zero = spread_rows(pair);
        constexpr ptx::uint32 kMinusOne = twice(0xbc00), kMinusBase = twice(0xe400);
        return {fma_pair<__half>(zero.upper, kMinusOne, kMinusBase),
                fma_pair<__half>(zero.lower, kMinusOne, kMinusBase)};
    }
    static __device__ __forceinline__ RowPairs scales(ptx::uint32 pair) { return spread_rows(pair); }

    static __device__ __forceinline__ void integers(ptx::uint32 (&a)[4], const ptx::uint32 (&words)[4], int step, Zeros zeros) {
        constexpr ptx::uint32 kBase = twice(0x6400), kOne = twice(0x3c00);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            a[2 * i] = fma_pair<__half>(join_bits(words[2 * step + i], twice(0x00ff), kBase), kOne, zeros.upper);
            a[2 * i + 1] = fma_pair<__half>(join_bits(words[2 * step + i] >> 8, twice(0x00ff), kBase), kOne, zeros.lower);
        }
    }

    static constexpr float kUpperBase = 0.0f, kLowerBase = 0.0f, kUpper = 0x1p-24f, kLower = 0x1p-24f;

    static __device__ __forceinline__ void spread(ptx::uint32 (&a)[4], const ptx::uint32 (&words)[4], int step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            a[2 * i] = words[2 * step + i] & twice(0x00ff);
            a[2 * i + 1] = words[2 * step + i] >> 8 & twice(0x00ff);
        }
    }
};

// Weights of a symmetric scheme, where all zero points are 2^(Bits - 1):
//   const SymmetricWeights<T, Bits> weights(scale_pair);  // once per group
//   weights.fragment(a, words, step);                     // (code - zero) times the scale over kUnit, rounded once
// The caller multiplies sums of products by kUnit, a power of two.
template <typename T, int Bits>
struct SymmetricWeights {
    using Packed = Codes<T, Bits>;
    static constexpr float kUnit = 1.0f;

    __device__ __forceinline__ explicit SymmetricWeights(ptx::uint32 pair)
        : scales(Packed::scales(pair)), zeros(Packed::zeros(pack_pair<T>(1 << (Bits - 1), 1 << (Bits - 1)))) {}

    __device__ __forceinline__ void fragment(ptx::uint32 (&a)[4], const ptx::uint32 (&words)[Packed::kLoadWords], int step) const {
        Packed::integers(a, words, step, zeros);
        scale_fragment<T>(a, scales);
    }

private:
    RowPairs scales;
    typename Packed::Zeros zeros;
};

// In bfloat16 the zero point times the scale is exact, so a weight is its code times a factor plus an offset: one instruction.
// Factors are scales times 2^101, because codes are so small, and weights are scaled by 2^-32 to leave them the room: both
// are exact for scales from 2^-94 to 2^26.
template <int Bits>
struct SymmetricWeights<__nv_bfloat16, Bits> {
    using Packed = Codes<__nv_bfloat16, Bits>;
    static constexpr int kOne = -32;
    static constexpr float kUnit = 0x1p32f;

    __device__ __forceinline__ explicit SymmetricWeights(ptx::uint32 pair) {
        constexpr ptx::uint32 kMinusZero = Packed::kMinus | power_of_two(Bits - 1 + kOne);
        const RowPairs scales = spread_rows(pair);
        factors = {scale_pair(scales.upper, power_of_two(kOne - Packed::kUpperOne)),
                   scale_pair(scales.lower, power_of_two(kOne - Packed::kLowerOne))};
        offsets = {scale_pair(scales.upper, kMinusZero), scale_pair(scales.lower, kMinusZero)};
    }

    __device__ __forceinline__ void fragment(ptx::uint32 (&a)[4], const ptx::uint32 (&words)[Packed::kLoadWords], int step) const {
        Packed::codes(a, words, step);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] = fma_pair<__nv_bfloat16>(a[i], i % 2 == 0 ? factors.upper : factors.lower,
                                           i % 2 == 0 ? offsets.upper : offsets.lower);
        }
    }

private:
    RowPairs factors, offsets;
};

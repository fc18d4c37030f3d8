// The layout of keys and values in the cache, and how they become operands of mma.
//
// 16-bit elements are used directly. 8-bit codes have a float32 scale per token and head, which the kernel multiplies into
// scores and weights, so that the codes themselves become 16-bit elements, exactly in either element type. So do 4-bit codes
// minus 7.5, of vectors that were multiplied by the Hadamard matrix: queries are multiplied by it too, which leaves scores as
// they are, and another kernel multiplies the output by it.
#pragma once
#include "common/cache_codes.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"

namespace attention {

// The compiler has no macro for it.
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

// Copies 4 bytes from global to shared memory, of which `valid` (0 or 4) are read and the others written as zero. Complete
// after ptx::cp_async_wait.
__device__ __forceinline__ void cp_async_4(ptx::uint32 shared, const void* global, int valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
}

// 2^exponent for an integer exponent up to 0, by its bits. Values below the smallest normal number are 0, and so is NaN, the
// difference of two exponents of empty sums. 2^23 * 1.5 + 127 moves the biased exponent to the lowest bits of the sum's
// mantissa, which avoids a conversion at a quarter of the rate.
__device__ __forceinline__ float power_of_two(float exponent) {
    return __int_as_float(__float_as_int(fmaxf(exponent, -127.0f) + 12583039.0f) << 23);
}

// 2^x, or 0 if the result would not be a normal number.
__device__ __forceinline__ float exp2_flushed(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// The type of two elements in 32 bits, and the bits of their mantissas.
template <typename T>
struct PairType;
template <>
struct PairType<__half> {
    using Type = __half2;
    static constexpr int kMantissa = 10;
};
template <>
struct PairType<__nv_bfloat16> {
    using Type = __nv_bfloat162;
    static constexpr int kMantissa = 7;
};
template <typename T>
using PairOf = typename PairType<T>::Type;

template <typename Pair>
__device__ __forceinline__ Pair as_pair(ptx::uint32 bits) {
    return *reinterpret_cast<Pair*>(&bits);
}

template <typename Pair>
__device__ __forceinline__ ptx::uint32 as_bits(Pair pair) {
    return *reinterpret_cast<ptx::uint32*>(&pair);
}

// The two codes as the upper bytes of two halves.
template <int First, int Second>
__device__ __forceinline__ ptx::uint32 upper_bytes(ptx::uint32 codes) {
    return __byte_perm(codes, 0, 0x0404 | First << 4 | Second << 12);
}

// The two codes as the lower bytes of two halves, below the byte `upper`.
template <int First, int Second>
__device__ __forceinline__ ptx::uint32 lower_bytes(ptx::uint32 codes, int upper) {
    return __byte_perm(codes, upper, 0x4040 | First | Second << 8);
}

// How e4m3 becomes an element: sign, exponent and mantissa move to their positions, `kShift` bits to the right, and a
// multiplication by `kUnit`, 2^8 or 2^120, corrects the bias of the exponent, also for subnormal numbers.
template <typename T>
struct E4m3;
template <>
struct E4m3<__half> {
    static constexpr int kShift = 1;
    static constexpr ptx::uint32 kMask = 0x3F803F80;
    static constexpr ptx::uint32 kUnit = 0x5C005C00;
};
template <>
struct E4m3<__nv_bfloat16> {
    static constexpr int kShift = 4;
    static constexpr ptx::uint32 kMask = 0x07F007F0;
    static constexpr ptx::uint32 kUnit = 0x7B807B80;
};

// Bytes `First` and `Second` of `codes`, e4m3, as a pair of elements times `factor`, a pair of scales times kUnit.
template <typename T, int First, int Second>
__device__ __forceinline__ ptx::uint32 scaled_e4m3(ptx::uint32 codes, ptx::uint32 factor) {
    const ptx::uint32 wide = upper_bytes<First, Second>(codes);
    const ptx::uint32 small = (wide & 0x80008000) | (wide >> E4m3<T>::kShift & E4m3<T>::kMask);
    return as_bits(__hmul2(as_pair<PairOf<T>>(small), as_pair<PairOf<T>>(factor)));
}

// int8: 0x6400 + u is the half 1024 + u, here with u = code + 128.
template <typename T, int Code, int First, int Second>
struct Dequantizer;

template <int Code, int First, int Second>
struct Dequantizer<__half, Code, First, Second> {
    static __device__ __forceinline__ ptx::uint32 of(ptx::uint32 codes) {
        if constexpr (Code == kInt8) {
            const ptx::uint32 shifted = lower_bytes<First, Second>(codes ^ 0x80808080, 0x64);
            return as_bits(__hsub2(as_pair<__half2>(shifted), as_pair<__half2>(0x64806480)));
        }
        return scaled_e4m3<__half, First, Second>(codes, E4m3<__half>::kUnit);
    }
};

// int8: the mantissa has 7 bits, so the value is 128 + (the lower 7 bits) minus 128, or minus 256 if the code is negative.
template <int Code, int First, int Second>
struct Dequantizer<__nv_bfloat16, Code, First, Second> {
    static __device__ __forceinline__ ptx::uint32 of(ptx::uint32 codes) {
        if constexpr (Code == kInt8) {
            const ptx::uint32 wide = lower_bytes<First, Second>(codes, 0x43);
            const ptx::uint32 subtrahend = wide & 0xFF80FF80;
            return as_bits(__hsub2(as_pair<__nv_bfloat162>(wide & 0xFF7FFF7F), as_pair<__nv_bfloat162>(subtrahend)));
        }
        return scaled_e4m3<__nv_bfloat16, First, Second>(codes, E4m3<__nv_bfloat16>::kUnit);
    }
};

// Bytes `First` and `Second` of `codes`, all of the CacheCode `Code`, as a pair of 16-bit elements.
template <typename T, int Code, int First, int Second>
__device__ __forceinline__ ptx::uint32 dequantize(ptx::uint32 codes) {
    return Dequantizer<T, Code, First, Second>::of(codes);
}

// The 4-bit codes number `index` (0 to 3) of the lower and of the upper half of a word, minus 7.5, as a pair of elements. Bits
// of the mantissa of 64 (half) or 16 (bfloat16) become the code, so that a subtraction is exact.
template <typename T>
__device__ __forceinline__ ptx::uint32 dequantize_packed(ptx::uint32 codes, int index) {
    constexpr bool kHalf = PairType<T>::kMantissa == 10;
    constexpr int kPlace = kHalf ? 4 : 3;  // of the code in the mantissa
    constexpr ptx::uint32 kMask = kHalf ? 0x00F000F0 : 0x00780078;
    constexpr ptx::uint32 kBase = kHalf ? 0x54005400 : 0x41804180;       // 64, 16
    constexpr ptx::uint32 kSubtrahend = kHalf ? 0x54785478 : 0x41BC41BC;  // 71.5, 23.5
    const int right = 4 * index - kPlace;
    const ptx::uint32 wide = ((right < 0 ? codes << -right : codes >> right) & kMask) | kBase;
    using Pair = PairOf<T>;
    return as_bits(__hsub2(as_pair<Pair>(wide), as_pair<Pair>(kSubtrahend)));
}

}  // namespace attention

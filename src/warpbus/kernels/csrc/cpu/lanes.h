// Vectors of the instruction set that a build is for, one of the macros LANES_AVX512_VNNI, LANES_AVX_VNNI, LANES_AVX2;
// without any of them, plain C++.
//
// Floats and Ints have kLanes elements. dot<kBits>(sums, codes, x) adds to each element of `sums` the products of four
// codes, unsigned and below 2^kBits, with the four int8 of x: exactly, in int32.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(LANES_AVX512_VNNI) || defined(LANES_AVX_VNNI) || defined(LANES_AVX2)
#include <immintrin.h>
#endif

#if defined(LANES_AVX512_VNNI)

constexpr int kLanes = 16;
using Floats = __m512;
using Ints = __m512i;

inline Ints zero_ints() { return _mm512_setzero_si512(); }
inline Floats zero_floats() { return _mm512_setzero_ps(); }
inline Ints load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a); }
inline Ints load(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store(uint8_t* p, Ints a) { _mm512_storeu_si512(p, a); }
inline Ints spread(int32_t a) { return _mm512_set1_epi32(a); }
inline Floats spread(float a) { return _mm512_set1_ps(a); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats least(Floats a, Floats b) { return _mm512_min_ps(b, a); }    // NaN where a is NaN
inline Floats largest(Floats a, Floats b) { return _mm512_max_ps(b, a); }  // NaN where a is NaN
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints multiply(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Ints widen(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline Floats from_bfloat16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline Floats from_float16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
// 2^a for integers a, which are floats
inline Floats power_of_two(Floats a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(a), spread(127)), 23));
}

template <int kBits>
inline Ints field(Ints codes, int which) {
    if constexpr (kBits == 8) return codes;
    else return _mm512_and_si512(_mm512_srli_epi16(codes, which * kBits), _mm512_set1_epi8((1 << kBits) - 1));
}

template <int kBits>
inline Ints dot(Ints sums, Ints codes, Ints x) {
    return _mm512_dpbusd_epi32(sums, codes, x);
}

#elif defined(LANES_AVX_VNNI) || defined(LANES_AVX2)

constexpr int kLanes = 8;
using Floats = __m256;
using Ints = __m256i;

inline Ints zero_ints() { return _mm256_setzero_si256(); }
inline Floats zero_floats() { return _mm256_setzero_ps(); }
inline Ints load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats a) { _mm256_storeu_ps(p, a); }
inline Ints spread(int32_t a) { return _mm256_set1_epi32(a); }
inline Floats spread(float a) { return _mm256_set1_ps(a); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats least(Floats a, Floats b) { return _mm256_min_ps(b, a); }
inline Floats largest(Floats a, Floats b) { return _mm256_max_ps(b, a); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
inline Ints subtract(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
inline Ints multiply(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
inline Ints widen(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline Floats from_bfloat16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline Floats from_float16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline Floats power_of_two(Floats a) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(a), spread(127)), 23));
}

template <int kBits>
inline Ints field(Ints codes, int which) {
    if constexpr (kBits == 8) return codes;
    else return _mm256_and_si256(_mm256_srli_epi16(codes, which * kBits), _mm256_set1_epi8((1 << kBits) - 1));
}

template <int kBits>
inline Ints dot(Ints sums, Ints codes, Ints x) {
#if defined(LANES_AVX_VNNI)
    return _mm256_dpbusd_avx_epi32(sums, codes, x);
#else
    if (kBits < 8) {  // pairs of products, at most 2 * 15 * 127, fit into int16
        const __m256i pairs = _mm256_maddubs_epi16(codes, x);
        return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    // Pairs of products of 8 bits do not: codes and x are widened, those of even columns apart from those of odd ones.
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
#endif
}

#else

// Compilers turn these into whatever vectors the processor has.
constexpr int kLanes = 4;
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

inline Ints zero_ints() { return Ints{}; }
inline Floats zero_floats() { return Floats{}; }
template <typename Vector, typename Element>
inline Vector loaded(const Element* p) {
    Vector a;
    std::memcpy(&a, p, sizeof(a));
    return a;
}
inline Ints load(const uint8_t* p) { return loaded<Ints>(p); }
inline Floats load(const float* p) { return loaded<Floats>(p); }
inline void store(float* p, Floats a) { std::memcpy(p, &a, sizeof(a)); }
inline Ints spread(int32_t a) { return Ints{a, a, a, a}; }
inline Floats spread(float a) { return Floats{a, a, a, a}; }
inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats multiply(Floats a, Floats b) { return a * b; }
inline Floats divide(Floats a, Floats b) { return a / b; }
inline Floats least(Floats a, Floats b) {
    for (int i = 0; i < kLanes; ++i) a[i] = b[i] < a[i] ? b[i] : a[i];
    return a;
}
inline Floats largest(Floats a, Floats b) {
    for (int i = 0; i < kLanes; ++i) a[i] = b[i] > a[i] ? b[i] : a[i];
    return a;
}
inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats to_floats(Ints a) {
    Floats b;
    for (int i = 0; i < kLanes; ++i) b[i] = static_cast<float>(a[i]);
    return b;
}
inline Ints subtract(Ints a, Ints b) { return a - b; }
inline Ints multiply(Ints a, Ints b) { return a * b; }
inline Ints widen(const uint8_t* p) { return Ints{p[0], p[1], p[2], p[3]}; }
inline float as_float(uint32_t bits) {
    float a;
    std::memcpy(&a, &bits, sizeof(a));
    return a;
}
inline Floats from_bfloat16(const uint16_t* p) {
    Floats a;
    for (int i = 0; i < kLanes; ++i) a[i] = as_float(static_cast<uint32_t>(p[i]) << 16);
    return a;
}
inline Floats from_float16(const uint16_t* p) {
    Floats a;
    for (int i = 0; i < kLanes; ++i) {
        const uint32_t sign = (p[i] & 0x8000u) << 16, rest = p[i] & 0x7fffu;
        // The exponent moves from a bias of 15 to 127 by a product, which is right for subnormal numbers too.
        const float magnitude = rest >= 0x7c00u ? as_float(0x7f800000u | rest << 13) : as_float(rest << 13) * 0x1p112f;
        a[i] = sign ? -magnitude : magnitude;
    }
    return a;
}
inline Floats power_of_two(Floats a) {
    Floats b;
    for (int i = 0; i < kLanes; ++i) b[i] = as_float(static_cast<uint32_t>(static_cast<int32_t>(a[i]) + 127) << 23);
    return b;
}

template <int kBits>
inline Ints field(Ints codes, int which) {
    if constexpr (kBits == 8) return codes;
    else return (codes >> (which * kBits)) & spread(0x01010101 * ((1 << kBits) - 1));
}

template <int kBits>
inline Ints dot(Ints sums, Ints codes, Ints x) {
    int8_t signed_x[16];
    uint8_t bytes[16];
    std::memcpy(signed_x, &x, 16);
    std::memcpy(bytes, &codes, 16);
    for (int i = 0; i < kLanes; ++i) {
        for (int j = 0; j < 4; ++j) sums[i] += bytes[4 * i + j] * signed_x[j];
    }
    return sums;
}

#endif

// Unlike a cast of `a` itself, the sum rounds to the nearest integer, for |a| < 2^22.
inline Floats nearest(Floats a) {
    const Floats magic = spread(12582912.0f);
    return add(add(a, magic), spread(-12582912.0f));
}

// e^a to 2 units in the last place: 2^n times a polynomial of what is left, which is at most ln(2) / 2.
inline Floats exponential(Floats a) {
    a = largest(least(a, spread(88.0f)), spread(-87.0f));
    const Floats n = nearest(multiply(a, spread(1.44269504f)));
    Floats rest = multiply_add(n, spread(-0.693359375f), a);
    rest = multiply_add(n, spread(2.12194440e-4f), rest);
    Floats sum = spread(1.9875691500e-4f);
    for (const float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f}) {
        sum = multiply_add(sum, rest, spread(coefficient));
    }
    sum = add(multiply_add(sum, multiply(rest, rest), rest), spread(1.0f));
    return multiply(sum, power_of_two(n));
}

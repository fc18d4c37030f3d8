// Vector types and functions of the device that need nothing of the runtime: a part of `cuda_runtime.h`.
#pragma once

#define WARPBUS_VECTORS(name, type) \
    struct name##1 { type x; }; \
    struct alignas(2 * sizeof(type)) name##2 { type x, y; }; \
    struct name##3 { type x, y, z; }; \
    struct alignas(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) name##4 { type x, y, z, w; }; \
    inline name##1 make_##name##1(type x) { return {x}; } \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
WARPBUS_VECTORS(char, signed char)
WARPBUS_VECTORS(uchar, unsigned char)
WARPBUS_VECTORS(short, short)
WARPBUS_VECTORS(ushort, unsigned short)
WARPBUS_VECTORS(int, int)
WARPBUS_VECTORS(uint, unsigned)
WARPBUS_VECTORS(longlong, long long)
WARPBUS_VECTORS(ulonglong, unsigned long long)
WARPBUS_VECTORS(float, float)
WARPBUS_VECTORS(double, double)
#undef WARPBUS_VECTORS

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    dim3(uint3 of) : x(of.x), y(of.y), z(of.z) {}
    operator uint3() const { return {x, y, z}; }
};

namespace warpbus {

// A whole number as an integer type has it: the nearest one that it can hold, and 0 for NaN.
template <class To> To saturated(float whole) {
    constexpr float kBits = 8 * sizeof(To) - std::is_signed<To>::value;
    const float end = exp2f(kBits);  // one more than the largest
    if (whole != whole) return 0;
    if (whole >= end) return std::numeric_limits<To>::max();
    if (whole < (std::is_signed<To>::value ? -end : 0)) return std::numeric_limits<To>::min();
    return static_cast<To>(whole);
}

template <class To, class From> To same_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To found;
    memcpy(&found, &value, sizeof found);
    return found;
}

inline float reciprocal_root(float x) { return 1.0f / sqrtf(x); }
inline double reciprocal_root(double x) { return 1.0 / sqrt(x); }

}  // namespace warpbus

// Macros, because newer C libraries declare functions of these names.
#define rsqrtf warpbus::reciprocal_root
#define rsqrt warpbus::reciprocal_root

inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0 ? fminf(x, 1) : 0; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline double __drcp_rn(double x) { return 1 / x; }
inline double __dsqrt_rn(double x) { return sqrt(x); }
inline float __frsqrt_rn(float x) { return warpbus::reciprocal_root(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline int __float2int_rn(float x) { return warpbus::saturated<int>(nearbyintf(x)); }
inline int __float2int_rz(float x) { return warpbus::saturated<int>(truncf(x)); }
inline int __float2int_rd(float x) { return warpbus::saturated<int>(floorf(x)); }
inline int __float2int_ru(float x) { return warpbus::saturated<int>(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return warpbus::saturated<unsigned>(nearbyintf(x)); }
inline unsigned __float2uint_rz(float x) { return warpbus::saturated<unsigned>(truncf(x)); }
inline unsigned __float2uint_rd(float x) { return warpbus::saturated<unsigned>(floorf(x)); }
inline unsigned __float2uint_ru(float x) { return warpbus::saturated<unsigned>(ceilf(x)); }
inline int __float_as_int(float x) { return warpbus::same_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return warpbus::same_bits<unsigned>(x); }
inline float __int_as_float(int x) { return warpbus::same_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return warpbus::same_bits<float>(x); }
inline long long __double_as_longlong(double x) { return warpbus::same_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return warpbus::same_bits<double>(x); }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(static_cast<unsigned>(bits)) : 32; }
inline int __clzll(long long bits) { return bits ? __builtin_clzll(static_cast<unsigned long long>(bits)) : 64; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline unsigned __brev(unsigned bits) {
    unsigned found = 0;
    for (unsigned i = 0; i < 32; ++i) found |= (bits >> i & 1) << (31 - i);
    return found;
}
inline int __mulhi(int x, int y) { return static_cast<int>(static_cast<long long>(x) * y >> 32); }
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(uint64_t{x} * y >> 32); }
inline int __mul24(int x, int y) { return (x << 8 >> 8) * (y << 8 >> 8); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return static_cast<unsigned>((uint64_t{high} << 32 | low) << (by & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (by & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = uint64_t{y} << 32 | x;
    unsigned found = 0;
    for (unsigned i = 0; i < 4; ++i) found |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
    return found;
}
// The products of four signed bytes, and a sum.
inline int __dp4a(int x, int y, int sum) {
    for (unsigned i = 0; i < 4; ++i) sum += static_cast<signed char>(x >> 8 * i) * static_cast<signed char>(y >> 8 * i);
    return sum;
}

// Half precision on a CPU: numbers of 16 bits, rounded to the nearest after each operation, as on a GPU.
#pragma once

#include "cuda_runtime.h"

namespace warpbus {

inline unsigned short half_bits(float value) {
    const unsigned bits = same_bits<unsigned>(value), sign = bits >> 16 & 0x8000;
    unsigned rest = bits & 0x7FFFFFFF;
    if (rest > 0x7F800000) return 0x7FFF;
    if (rest >= 0x47800000) rest = 0x7C00;  // 65536 and more
    else if (rest < 0x38800000) rest = same_bits<unsigned>(same_bits<float>(rest) + 0.5f) - 0x3F000000;  // below 2^-14
    else rest = (rest + (rest >> 13 & 1) + 0xFFF - (112u << 23)) >> 13;
    return static_cast<unsigned short>(sign | rest);
}

inline float half_value(unsigned short bits) {
    const unsigned exponent = bits >> 10 & 31, digits = bits & 1023, sign = (bits & 0x8000u) << 16;
    if (exponent == 0) return same_bits<float>(sign | same_bits<unsigned>(static_cast<float>(digits) * 0x1p-24f));
    return same_bits<float>(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | digits << 13);
}

}  // namespace warpbus

struct __half_raw { unsigned short x; };

class __half {
  public:
    __half() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    __half(T value) : bits_(warpbus::half_bits(static_cast<float>(value))) {}
    __half(__half_raw raw) : bits_(raw.x) {}
    operator float() const { return warpbus::half_value(bits_); }
    operator __half_raw() const { return {bits_}; }

  private:
    unsigned short bits_;
};
using half = __half;

struct alignas(4) __half2 { __half x, y; };
using half2 = __half2;
inline __half2 make_half2(__half x, __half y) { return {x, y}; }

inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline __half __double2half(double x) { return static_cast<float>(x); }
inline float __half2float(__half x) { return x; }
inline __half __int2half_rn(int x) { return x; }
inline __half __uint2half_rn(unsigned x) { return x; }
inline int __half2int_rn(__half x) { return static_cast<int>(nearbyintf(x)); }
inline int __half2int_rz(__half x) { return static_cast<int>(static_cast<float>(x)); }
inline __half __ushort_as_half(unsigned short x) { return __half_raw{x}; }
inline unsigned short __half_as_ushort(__half x) { return static_cast<__half_raw>(x).x; }

// An operation on one number and on pairs, by float, which has more than twice the digits: so it is rounded once.
#define WARPBUS_HALF(name, result) \
    inline __half __h##name(__half a, __half b) { const float x = a, y = b; return result; } \
    inline __half2 __h##name##2(__half2 a, __half2 b) { return {__h##name(a.x, b.x), __h##name(a.y, b.y)}; }
WARPBUS_HALF(add, x + y)
WARPBUS_HALF(sub, x - y)
WARPBUS_HALF(mul, x * y)
WARPBUS_HALF(max, fmaxf(x, y))
WARPBUS_HALF(min, fminf(x, y))
#undef WARPBUS_HALF
inline __half __hdiv(__half a, __half b) { return static_cast<float>(a) / static_cast<float>(b); }
inline __half2 __h2div(__half2 a, __half2 b) { return {__hdiv(a.x, b.x), __hdiv(a.y, b.y)}; }
inline __half __hfma(__half a, __half b, __half c) {
    return static_cast<double>(static_cast<float>(a)) * static_cast<float>(b) + static_cast<float>(c);
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
inline __half __hneg(__half a) { return -static_cast<float>(a); }
inline __half __habs(__half a) { return fabsf(a); }
inline __half2 __hneg2(__half2 a) { return {__hneg(a.x), __hneg(a.y)}; }
inline bool __hisnan(__half a) { return std::isnan(static_cast<float>(a)); }

#define WARPBUS_HALF(operation, name) \
    inline __half operator operation(__half a, __half b) { return name(a, b); } \
    inline __half &operator operation##=(__half &a, __half b) { return a = name(a, b); }
WARPBUS_HALF(+, __hadd)
WARPBUS_HALF(-, __hsub)
WARPBUS_HALF(*, __hmul)
WARPBUS_HALF(/, __hdiv)
#undef WARPBUS_HALF
inline __half operator-(__half a) { return __hneg(a); }
inline __half2 operator+(__half2 a, __half2 b) { return __hadd2(a, b); }
inline __half2 operator-(__half2 a, __half2 b) { return __hsub2(a, b); }
inline __half2 operator*(__half2 a, __half2 b) { return __hmul2(a, b); }

#define WARPBUS_HALF(operation, name) \
    inline bool operator operation(__half a, __half b) { return static_cast<float>(a) operation static_cast<float>(b); } \
    inline bool name(__half a, __half b) { return a operation b; }
WARPBUS_HALF(==, __heq)
WARPBUS_HALF(!=, __hne)
WARPBUS_HALF(<, __hlt)
WARPBUS_HALF(<=, __hle)
WARPBUS_HALF(>, __hgt)
WARPBUS_HALF(>=, __hge)
#undef WARPBUS_HALF

#define WARPBUS_HALF(name) \
    inline __half h##name(__half a) { return name##f(a); } \
    inline __half2 h2##name(__half2 a) { return {h##name(a.x), h##name(a.y)}; }
WARPBUS_HALF(exp)
WARPBUS_HALF(exp2)
WARPBUS_HALF(log)
WARPBUS_HALF(log2)
WARPBUS_HALF(sqrt)
WARPBUS_HALF(sin)
WARPBUS_HALF(cos)
WARPBUS_HALF(floor)
WARPBUS_HALF(ceil)
WARPBUS_HALF(rsqrt)
#undef WARPBUS_HALF
inline __half hrcp(__half a) { return 1 / static_cast<float>(a); }

inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float2half2_rn(float x) { return {x, x}; }
inline __half2 __float22half2_rn(float2 x) { return {x.x, x.y}; }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half __low2half(__half2 x) { return x.x; }
inline __half __high2half(__half2 x) { return x.y; }
inline float __low2float(__half2 x) { return x.x; }
inline float __high2float(__half2 x) { return x.y; }

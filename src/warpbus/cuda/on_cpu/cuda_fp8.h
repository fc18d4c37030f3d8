// FP8 on a CPU: e4m3 (4 bits of exponent, 3 of digits, no infinity) and e5m2, and vectors of 2 and 4.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"

using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;
using __nv_fp8x4_storage_t = unsigned;
// What becomes of numbers that are too large: NaN in e4m3 and infinity in e5m2, or the largest number.
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

// Rounded to the nearest number, ties to even.
inline __nv_fp8_storage_t __nv_cvt_double_to_fp8(double x, __nv_saturation_t saturation, __nv_fp8_interpretation_t kind) {
    const bool wide = kind == __NV_E5M2;  // exponents
    const int digits = wide ? 2 : 3, bias = wide ? 15 : 7;
    const double most = wide ? 57344 : 448;
    if (x != x) return 0x7F;
    const auto sign = static_cast<__nv_fp8_storage_t>(std::signbit(x) ? 0x80 : 0);
    double size = std::fabs(x);
    if (size > most * 2) size = most * 2;
    const int exponent = max(size > 0 ? std::ilogb(size) : 0, 1 - bias);
    size = std::ldexp(std::nearbyint(std::ldexp(size, digits - exponent)), exponent - digits);
    if (size > most) return sign | static_cast<__nv_fp8_storage_t>(saturation == __NV_SATFINITE ? (wide ? 0x7B : 0x7E) : (wide ? 0x7C : 0x7F));
    if (size < std::ldexp(1, 1 - bias)) return sign | static_cast<__nv_fp8_storage_t>(std::ldexp(size, bias - 1 + digits));
    const int found = std::ilogb(size);
    return sign | static_cast<__nv_fp8_storage_t>((found + bias - 1 << digits) + static_cast<int>(std::ldexp(size, digits - found)));
}
inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t saturation, __nv_fp8_interpretation_t kind) {
    return __nv_cvt_double_to_fp8(x, saturation, kind);
}
inline __nv_fp8_storage_t __nv_cvt_halfraw_to_fp8(__half_raw x, __nv_saturation_t saturation, __nv_fp8_interpretation_t kind) {
    return __nv_cvt_float_to_fp8(__half(x), saturation, kind);
}
inline __nv_fp8_storage_t __nv_cvt_bfloat16raw_to_fp8(__nv_bfloat16_raw x, __nv_saturation_t saturation,
                                                      __nv_fp8_interpretation_t kind) {
    return __nv_cvt_float_to_fp8(__nv_bfloat16(x), saturation, kind);
}
// Each e5m2 is the upper half of a float16, and each e4m3 is one, too.
inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, __nv_fp8_interpretation_t kind) {
    const unsigned size = x & 0x7Fu;
    if (kind == __NV_E5M2) return {static_cast<unsigned short>(size > 0x7C ? 0x7FFF : x << 8)};
    if (size == 0x7F) return {0x7FFF};
    const unsigned digits = size & 7, exponent = size >> 3;
    const float found = exponent ? std::ldexp(8 + static_cast<float>(digits), static_cast<int>(exponent) - 10)
                                 : std::ldexp(static_cast<float>(digits), -9);
    return {warpbus::half_bits(x & 0x80 ? -found : found)};
}

namespace warpbus {

inline float fp8_value(__nv_fp8_storage_t x, __nv_fp8_interpretation_t kind) { return __half(__nv_cvt_fp8_to_halfraw(x, kind)); }
inline __nv_fp8x2_storage_t fp8_pair(float low, float high, __nv_saturation_t saturation, __nv_fp8_interpretation_t kind) {
    return static_cast<__nv_fp8x2_storage_t>(__nv_cvt_float_to_fp8(low, saturation, kind) |
                                             __nv_cvt_float_to_fp8(high, saturation, kind) << 8);
}

}  // namespace warpbus

inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t saturation, __nv_fp8_interpretation_t kind) {
    return warpbus::fp8_pair(x.x, x.y, saturation, kind);
}
inline __nv_fp8x2_storage_t __nv_cvt_double2_to_fp8x2(double2 x, __nv_saturation_t saturation, __nv_fp8_interpretation_t kind) {
    return static_cast<__nv_fp8x2_storage_t>(__nv_cvt_double_to_fp8(x.x, saturation, kind) |
                                             __nv_cvt_double_to_fp8(x.y, saturation, kind) << 8);
}

#define WARPBUS_FP8(name, kind) \
    struct __nv_fp8_##name { \
        __nv_fp8_storage_t __x; \
        __nv_fp8_##name() = default; \
        template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>> \
        explicit __nv_fp8_##name(T x) : __x(__nv_cvt_double_to_fp8(static_cast<double>(x), __NV_SATFINITE, kind)) {} \
        explicit __nv_fp8_##name(__half x) : __nv_fp8_##name(static_cast<float>(x)) {} \
        explicit __nv_fp8_##name(__nv_bfloat16 x) : __nv_fp8_##name(static_cast<float>(x)) {} \
        explicit operator __half() const { return __nv_cvt_fp8_to_halfraw(__x, kind); } \
        explicit operator __nv_bfloat16() const { return static_cast<float>(*this); } \
        template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>> explicit operator T() const { \
            return static_cast<T>(warpbus::fp8_value(__x, kind)); \
        } \
    }; \
    struct alignas(2) __nv_fp8x2_##name { \
        __nv_fp8x2_storage_t __x; \
        __nv_fp8x2_##name() = default; \
        explicit __nv_fp8x2_##name(float2 x) : __x(warpbus::fp8_pair(x.x, x.y, __NV_SATFINITE, kind)) {} \
        explicit __nv_fp8x2_##name(double2 x) : __x(__nv_cvt_double2_to_fp8x2(x, __NV_SATFINITE, kind)) {} \
        explicit __nv_fp8x2_##name(__half2 x) : __nv_fp8x2_##name(float2{x.x, x.y}) {} \
        explicit __nv_fp8x2_##name(__nv_bfloat162 x) : __nv_fp8x2_##name(float2{x.x, x.y}) {} \
        explicit operator float2() const { \
            return {warpbus::fp8_value(static_cast<__nv_fp8_storage_t>(__x), kind), \
                    warpbus::fp8_value(static_cast<__nv_fp8_storage_t>(__x >> 8), kind)}; \
        } \
        explicit operator __half2() const { const float2 x(*this); return {x.x, x.y}; } \
        explicit operator __nv_bfloat162() const { const float2 x(*this); return {x.x, x.y}; } \
    }; \
    struct alignas(4) __nv_fp8x4_##name { \
        __nv_fp8x4_storage_t __x; \
        __nv_fp8x4_##name() = default; \
        explicit __nv_fp8x4_##name(float4 x) \
            : __x(static_cast<unsigned>(warpbus::fp8_pair(x.x, x.y, __NV_SATFINITE, kind)) | \
                  static_cast<unsigned>(warpbus::fp8_pair(x.z, x.w, __NV_SATFINITE, kind)) << 16) {} \
        __nv_fp8x4_##name(__half2 low, __half2 high) : __nv_fp8x4_##name(float4{low.x, low.y, high.x, high.y}) {} \
        __nv_fp8x4_##name(__nv_bfloat162 low, __nv_bfloat162 high) : __nv_fp8x4_##name(float4{low.x, low.y, high.x, high.y}) {} \
        explicit operator float4() const { \
            const auto at = [this](unsigned i) { return warpbus::fp8_value(static_cast<__nv_fp8_storage_t>(__x >> 8 * i), kind); }; \
            return {at(0), at(1), at(2), at(3)}; \
        } \
    };
WARPBUS_FP8(e4m3, __NV_E4M3)
WARPBUS_FP8(e5m2, __NV_E5M2)
#undef WARPBUS_FP8

inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t kind) {
    return {__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(x), kind).x,
            __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(x >> 8), kind).x};
}
inline __nv_fp8x2_storage_t __nv_cvt_halfraw2_to_fp8x2(__half2_raw x, __nv_saturation_t saturation, __nv_fp8_interpretation_t kind) {
    return warpbus::fp8_pair(__half(__half_raw{x.x}), __half(__half_raw{x.y}), saturation, kind);
}

// Half precision (float16) on a CPU.
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

#define WARPBUS_NUMBER __half
#define WARPBUS_PAIR __half2
#define WARPBUS_RAW __half_raw
#define WARPBUS_RAW_PAIR __half2_raw
#define WARPBUS_BITS warpbus::half_bits
#define WARPBUS_VALUE warpbus::half_value
#include "small_float.h"

using half = __half;
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

inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float2half2_rn(float x) { return {x, x}; }
inline __half2 __float22half2_rn(float2 x) { return {x.x, x.y}; }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half __low2half(__half2 x) { return x.x; }
inline __half __high2half(__half2 x) { return x.y; }

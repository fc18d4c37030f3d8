// bfloat16 on a CPU: the upper half of a float.
#pragma once

#include "cuda_runtime.h"

namespace warpbus {

inline unsigned short bfloat16_bits(float value) {
    const unsigned bits = same_bits<unsigned>(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
    return static_cast<unsigned short>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float bfloat16_value(unsigned short bits) { return same_bits<float>(unsigned{bits} << 16); }

}  // namespace warpbus

#define WARPBUS_NUMBER __nv_bfloat16
#define WARPBUS_PAIR __nv_bfloat162
#define WARPBUS_RAW __nv_bfloat16_raw
#define WARPBUS_RAW_PAIR __nv_bfloat162_raw
#define WARPBUS_BITS warpbus::bfloat16_bits
#define WARPBUS_VALUE warpbus::bfloat16_value
#include "small_float.h"

using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }

inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline __nv_bfloat16 __double2bfloat16(double x) { return static_cast<float>(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __int2bfloat16_rn(int x) { return x; }
inline __nv_bfloat16 __uint2bfloat16_rn(unsigned x) { return x; }
inline int __bfloat162int_rn(__nv_bfloat16 x) { return static_cast<int>(nearbyintf(x)); }
inline int __bfloat162int_rz(__nv_bfloat16 x) { return static_cast<int>(static_cast<float>(x)); }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return __nv_bfloat16_raw{x}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return static_cast<__nv_bfloat16_raw>(x).x; }

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return {x, x}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {x.x, x.y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 x) { return x.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 x) { return x.y; }

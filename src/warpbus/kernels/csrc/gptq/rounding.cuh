// Rounding to a grid: division by a divisor that is used often, and the nearest code.
#pragma once
#include "common/ptx.cuh"

constexpr float kNoFraction = 12582912.0f;  // 1.5 * 2^23: floats of this size have no fraction

// A divisor with its reciprocal. `divide` gives the IEEE quotient a / b with two exceptions: it may be off by one unit in the
// last place if all bits of the divisor's mantissa are ones, which a 16-bit scale never has; and it is undefined, possibly
// NaN, if the divisor, its reciprocal or the remainder are not normal numbers. With the reciprocal precomputed it has a
// fraction of the latency of a / b, which determines the time of the loops.
struct Divisor {
    float value, reciprocal;

    Divisor() = default;
    __device__ __forceinline__ explicit Divisor(float divisor) : value(divisor) {
        const float rough = ptx::reciprocal(divisor);
        reciprocal = fmaf(rough, fmaf(-divisor, rough, 1.0f), rough);
    }

    __device__ __forceinline__ float divide(float x) const {
        float quotient = __fmul_rn(x, reciprocal);
        quotient = fmaf(fmaf(-value, quotient, x), reciprocal, quotient);
        return fmaf(fmaf(-value, quotient, x), reciprocal, quotient);
    }
};

// Rounds half to even below 2^22; larger values stay about as large.
__device__ __forceinline__ float round_even(float x) { return __fsub_rn(__fadd_rn(x, kNoFraction), kNoFraction); }

// The code nearest to x / scale + zero, minus zero. NaN gives code 0.
__device__ __forceinline__ float nearest_centred(float x, const Divisor& scale, float zero, float max_code) {
    return fminf(fmaxf(round_even(scale.divide(x)), 0.0f - zero), max_code - zero);
}

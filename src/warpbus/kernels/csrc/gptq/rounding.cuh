// Rounding to a grid: division by what is divided by often, and the nearest code.
#pragma once
#include "common/ptx.cuh"

constexpr float kNoFraction = 12582912.0f;  // 1.5 * 2^23: floats of this size have no fraction

// A divisor with its reciprocal. `divide` is the IEEE quotient, as a / b has it, with two exceptions: it may be off by one
// unit in the last place if all bits of the divisor's mantissa are ones, which a scale of 16 bits never has; and it may be
// anything, NaN too, if the divisor, its reciprocal or the remainder leave the range of normal numbers. With the reciprocal
// at hand it has a fraction of the latency of a / b, of which the loops are made.
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

// Half to even, below 2^22; what is larger stays about as large.
__device__ __forceinline__ float round_even(float x) { return __fsub_rn(__fadd_rn(x, kNoFraction), kNoFraction); }

// The code nearest to x / scale + zero, less zero. NaN gives code 0.
__device__ __forceinline__ float nearest_centred(float x, const Divisor& scale, float zero, float max_code) {
    return fminf(fmaxf(round_even(scale.divide(x)), 0.0f - zero), max_code - zero);
}

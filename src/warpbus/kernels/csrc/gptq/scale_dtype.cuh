// Rounding of scales to the dtype that they are stored in.
#pragma once
#include "common/numeric.cuh"

// The numbers are those of `_SCALE_DTYPES` in kernels/ops/gptq.py.
enum ScaleDtype { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

// A float after it was stored. The choice is the same for a whole grid.
__device__ __forceinline__ float as_stored(float x, int scale_dtype) {
    if (scale_dtype == kFloat16) return to_float(from_float<__half>(x));
    if (scale_dtype == kBfloat16) return to_float(from_float<__nv_bfloat16>(x));
    return x;
}

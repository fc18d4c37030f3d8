// The scales of a matrix, of the dtype that it has.
#pragma once

#include "cpu/lanes.h"
#include "cpu/matrix.h"

inline Floats load_scales(const Matrix& w, int64_t at) {
    if (w.scale_type == 0) return load(static_cast<const float*>(w.scales) + at);
    const uint16_t* halves = static_cast<const uint16_t*>(w.scales) + at;
    return w.scale_type == 1 ? from_bfloat16(halves) : from_float16(halves);
}

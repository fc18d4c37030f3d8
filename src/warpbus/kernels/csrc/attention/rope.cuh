// The rotary position embedding of a pair of dimensions.
#pragma once
#include "common/numeric.cuh"

namespace attention {

// Dimensions `dim` (even) and dim + 1 of a head, rotated in float32: the first `rotary` dimensions turn as pairs
// (2i, 2i+1) where `interleaved`, else (i, i + rotary / 2). `angles` has a position's rotary / 2 cosines, then its
// sines.
template <typename T>
__device__ __forceinline__ float2 rotated_pair(const T* head, int dim, const float* angles, int rotary,
                                               bool interleaved) {
    const float2 x = unpack_pair<T>(*reinterpret_cast<const unsigned int*>(head + dim));
    if (dim >= rotary) return x;
    const int half = rotary / 2;
    if (interleaved) {
        const float cosine = angles[dim / 2];
        const float sine = angles[half + dim / 2];
        return make_float2(x.x * cosine - x.y * sine, x.y * cosine + x.x * sine);
    }
    const auto turned = [&](float value, int at) {
        const int angle = at < half ? at : at - half;
        const float partner = to_float(head[at < half ? at + half : at - half]);
        return value * angles[angle] + partner * (at < half ? -angles[half + angle] : angles[half + angle]);
    };
    return make_float2(turned(x.x, dim), turned(x.y, dim + 1));
}

}  // namespace attention

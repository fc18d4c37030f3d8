// The rotary position embedding of a pair of dimensions.
#pragma once
#include "common/numeric.cuh"

namespace attention {

// How dimensions `dim` (even) and dim + 1 of a head turn: out = x * cosine + partner * sine, where the sine has the
// sign of the dimension's side. The first `rotary` dimensions turn as pairs (2i, 2i+1) where `interleaved`, else
// (i, i + rotary / 2); the others are their own partners. `angles` has a position's rotary / 2 cosines, then its sines.
struct Turn {
    float cosine[2], sine[2];
    int dim;
    int partner[2];

    __device__ __forceinline__ Turn(const float* angles, int first, int rotary, bool interleaved) : dim(first) {
        const int half = rotary / 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = first + i;
            const bool turns = at < rotary;
            const bool leads = interleaved ? i == 0 : at < half;
            const int angle = interleaved ? first / 2 : (leads ? at : at - half);
            const int distance = interleaved ? 1 : half;
            partner[i] = !turns ? at : leads ? at + distance : at - distance;
            cosine[i] = turns ? angles[angle] : 1.0f;
            sine[i] = !turns ? 0.0f : leads ? -angles[half + angle] : angles[half + angle];
        }
    }
};

// The pair, turned in float32. There is no branch, so that the loads of several pairs are under way together.
template <typename T>
__device__ __forceinline__ float2 turned_pair(const T* head, const Turn& turn) {
    const float2 x = unpack_pair<T>(*reinterpret_cast<const unsigned int*>(head + turn.dim));
    const float low = to_float(head[turn.partner[0]]);
    const float high = to_float(head[turn.partner[1]]);
    return make_float2(x.x * turn.cosine[0] + low * turn.sine[0], x.y * turn.cosine[1] + high * turn.sine[1]);
}

}  // namespace attention

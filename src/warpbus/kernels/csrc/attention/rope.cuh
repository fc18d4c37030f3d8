// The rotary position embedding of a pair of dimensions.
#pragma once
#include "common/numeric.cuh"

namespace attention {

// How dimensions `dim` (even) and dim + 1 of a head rotate: out = x * cosine + partner * sine, where the sine has the sign of
// the dimension's side. The first `rotary` dimensions rotate as pairs (2i, 2i+1) if `interleaved`, else (i, i + rotary / 2);
// the others are their own partners.
struct Pair {
    int dim;
    int partner[2];
    int angle[2];  // its index among a position's angles; -1: no rotation
    bool leads[2];

    __device__ __forceinline__ Pair(int first, int rotary, bool interleaved) : dim(first) {
        const int half = rotary / 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = first + i;
            const int distance = interleaved ? 1 : half;
            leads[i] = interleaved ? i == 0 : at < half;
            angle[i] = at >= rotary ? -1 : interleaved ? first / 2 : (leads[i] ? at : at - half);
            partner[i] = angle[i] < 0 ? at : leads[i] ? at + distance : at - distance;
        }
    }
};

// The cosines and sines of a pair. They are only loaded here; signs are applied when they are used, so that other loads can
// be issued before these arrive. `angles` has a position's rotary / 2 cosines, then its sines.
struct Angles {
    float cosine[2], sine[2];

    __device__ __forceinline__ Angles(const float* angles, const Pair& pair, int rotary) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            cosine[i] = pair.angle[i] < 0 ? 1.0f : angles[pair.angle[i]];
            sine[i] = pair.angle[i] < 0 ? 0.0f : angles[rotary / 2 + pair.angle[i]];
        }
    }
};

// A pair of a head and its partners, as loaded, which needs no position.
template <typename T>
struct Unturned {
    unsigned int pair;
    T low, high;

    __device__ __forceinline__ void load(const T* head, const Pair& at) {
        pair = *reinterpret_cast<const unsigned int*>(head + at.dim);
        low = head[at.partner[0]];
        high = head[at.partner[1]];
    }

    // Rotated in float32.
    __device__ __forceinline__ float2 turned(const Pair& at, const Angles& by) const {
        const float2 x = unpack_pair<T>(pair);
        return make_float2(x.x * by.cosine[0] + to_float(low) * (at.leads[0] ? -by.sine[0] : by.sine[0]),
                           x.y * by.cosine[1] + to_float(high) * (at.leads[1] ? -by.sine[1] : by.sine[1]));
    }
};

}  // namespace attention

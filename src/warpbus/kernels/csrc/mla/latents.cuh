// How the cache keeps the latents of multi-head latent attention, by the macro CODE, and how FP8 becomes elements.
//
//   kElement  a token is kKeyDim ELEMENT: the latent, then the rotary key
//   kFp8      kTokenBytes bytes: kRank codes (e4m3), a float32 scale for each kGroup of them, the rotary key as ELEMENT
//
// A scale is a power of two from 2^-24 to 2^7. Codes become elements by one multiplication of pairs, which rounds only
// below the smallest number of a half. kernels/reference/latent_cache.py has the same.
#pragma once
#include "attention/cache.cuh"
#include "mla/shape.cuh"

#if CODE
using Cache = unsigned char;
#else
using Cache = ELEMENT;
#endif
static_assert(CODE == kElement || CODE == kFp8, "latents are kept as elements or in e4m3");
constexpr bool kCoded = CODE != kElement;

constexpr int kGroup = 128;  // features with the same scale
constexpr int kGroups = kRank / kGroup;
constexpr int kScalesAt = kRank;  // byte of a token
constexpr int kRotaryAt = kScalesAt + kGroups * 4;
constexpr int kTokenBytes = kRotaryAt + kRope * 2;
static_assert(kTokenBytes == 656, "kernels/reference/latent_cache.py has other rows");

// The factor of `scaled_e4m3` for a scale: exact.
__device__ __forceinline__ unsigned int e4m3_factor(float scale) {
    const float unit = unpack_pair<ELEMENT>(attention::E4m3<ELEMENT>::kUnit).x;
    return pack_pair<ELEMENT>(scale * unit, scale * unit);
}

// Eight codes as elements.
__device__ __forceinline__ uint4 eight_elements(uint2 codes, unsigned int factor) {
    return {attention::scaled_e4m3<ELEMENT, 0, 1>(codes.x, factor), attention::scaled_e4m3<ELEMENT, 2, 3>(codes.x, factor),
            attention::scaled_e4m3<ELEMENT, 0, 1>(codes.y, factor), attention::scaled_e4m3<ELEMENT, 2, 3>(codes.y, factor)};
}

// FP8 tokens on their way from the cache to elements, in the registers of a warp: `Tokens` (up to 4) of one block of the
// cache. A lane has 8 codes of both halves of each token, so that loads and stores of a warp are contiguous.
template <int Tokens>
struct CodedTokens {
    static_assert(Tokens <= 4, "a lane has one piece of a rotary key and one scale");
    uint2 codes[Tokens][2];
    uint4 rotary;         // piece lane % 8 of the token lane / 8
    unsigned int factor;  // of the token lane / 4 and the group lane % 4

    // Begin to load tokens, of which `begin_of(i)` gives the first byte; from `count` on they are zeros, and nothing is read.
    // All lanes call it, and `begin_of` for tokens of their own, also past the last. Not by way of L1, which might hold what
    // was there before.
    template <typename BeginOf>
    __device__ __forceinline__ void load(const BeginOf& begin_of, int count) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < Tokens; ++i) {
            const uint2* from = reinterpret_cast<const uint2*>(begin_of(i)) + lane;
            codes[i][0] = i < count ? __ldcg(from) : uint2{};
            codes[i][1] = i < count ? __ldcg(from + 32) : uint2{};
        }
        const int limit = min(count, Tokens);
        const unsigned char* of_rotary = begin_of(lane / 8) + kRotaryAt;
        const unsigned char* of_scales = begin_of(lane / kGroups) + kScalesAt;
        rotary = uint4{};
        if (lane / 8 < limit) rotary = __ldcg(reinterpret_cast<const uint4*>(of_rotary) + lane % 8);
        float scale = 0.0f;
        if (lane / kGroups < limit) scale = __ldcg(reinterpret_cast<const float*>(of_scales) + lane % kGroups);
        factor = e4m3_factor(scale);
    }

    // Write the first `count` tokens as elements; `place(token, piece)` is where 16 bytes go. All lanes call it.
    template <typename Place>
    __device__ __forceinline__ void store(int count, const Place& place) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < Tokens; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned int own = __shfl_sync(0xffffffff, factor, kGroups * i + 2 * half + lane / 16);
                if (i < count) *place(i, 32 * half + lane) = eight_elements(codes[i][half], own);
            }
        }
        if (lane / 8 < min(count, Tokens)) *place(lane / 8, 64 + lane % 8) = rotary;
    }
};

// The products of a block of decode.cu per chunk: scores, weights, and the weighted sum of the values.
#pragma once
#include "attention/block.cuh"
#include "attention/cache.cuh"

constexpr int kScoreTiles = kWarpKeys / 8;  // accumulators of mma
constexpr int kOutTiles = kWarpDims / 8;

using Scores = float[kScoreTiles][4];

// Four 8 x 8 matrices side by side: eight rows, four chunks from `chunk` on.
__device__ __forceinline__ void load_strip(ptx::uint32 (&fragment)[4], const Unit* tile, int row0, int chunk) {
    const int lane = threadIdx.x % 32;
    ptx::ldmatrix_x4(fragment, ptx::shared_address(tile + chunk_offset<kColumns>(row0 + lane % 8, chunk + lane / 8)));
}

// Products of the tile's 16 queries with the warp's keys: one mma accumulator per 8 keys, and a second one for every other
// step, because a product waits for the previous one in its accumulator.
__device__ __forceinline__ void multiply_keys(Scores& scores, const ELEMENT* queries, const Unit* keys,
                                              const Place& place) {
    constexpr int kSteps = 32 / kBits;  // steps of 16 dimensions per strip
    Scores sums[2] = {};
#pragma unroll
    for (int strip = 0; strip < kPieces / 4; ++strip) {
        ptx::uint32 k[kScoreTiles][4];
#pragma unroll
        for (int j = 0; j < kScoreTiles; ++j) load_strip(k[j], keys, place.quarter * kWarpKeys + 8 * j, 4 * strip);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            ptx::uint32 q[4];
            load_block<HEAD_DIM, Second::below, false>(q, queries, 0, (strip * kSteps + step) * 16);
#pragma unroll
            for (int j = 0; j < kScoreTiles; ++j) {
                if constexpr (kPacked) {
                    const ptx::uint32 codes = k[j][step / 2];
                    const ptx::uint32 low = attention::dequantize_packed<ELEMENT>(codes, step % 2 * 2);
                    const ptx::uint32 high = attention::dequantize_packed<ELEMENT>(codes, step % 2 * 2 + 1);
                    ptx::mma_m16n8k16<ELEMENT>(sums[step % 2][j], q, low, high);
                } else if constexpr (kCoded) {
                    const ptx::uint32 low = attention::dequantize<ELEMENT, CODE, 0, 1>(k[j][step]);
                    const ptx::uint32 high = attention::dequantize<ELEMENT, CODE, 2, 3>(k[j][step]);
                    ptx::mma_m16n8k16<ELEMENT>(sums[step % 2][j], q, low, high);
                } else {
                    ptx::mma_m16n8k16<ELEMENT>(sums[step % 2][j], q, k[j][2 * step], k[j][2 * step + 1]);
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[j][i] = sums[0][j][i] + sums[1][j][i];
    }
}

// Scales and masks the scores, and finds the maximum of each of the two queries. `end` is the end of the keys, relative to
// the chunk; `scales` are those of the chunk's keys, for codes.
__device__ __forceinline__ void find_maxima(float (&largest)[2], Scores& scores, float scale, const float* scales,
                                            int end, const Place& place) {
    largest[0] = largest[1] = attention::minus_infinity();
#pragma unroll
    for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = place.key(j) + i % 2;
            const float factor = kCoded ? scale * scales[key] : scale;
            scores[j][i] = key < end ? scores[j][i] * factor : attention::minus_infinity();
            largest[i / 2] = fmaxf(largest[i / 2], scores[j][i]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAll, largest[r], 1));
        largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAll, largest[r], 2));
    }
}

// Factors that rescale the weights of each warp to one exponent, as pairs of elements, for the two queries of a thread.
using Factors = ptx::uint32[2][kWarps];

__device__ __forceinline__ ptx::uint32 multiply_pairs(ptx::uint32 x, ptx::uint32 y) {
    using Pair = attention::PairOf<ELEMENT>;
    return attention::as_bits(__hmul2(attention::as_pair<Pair>(x), attention::as_pair<Pair>(y)));
}

// The weights of 16 keys from `first` on, of all warps relative to one exponent.
__device__ __forceinline__ void load_weights(ptx::uint32 (&p)[4], const ELEMENT* weights, const Factors& factors,
                                             int first) {
    load_block<kKeys, Second::below, false>(p, weights, 0, first);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // i % 2: which query; i / 2: which eight keys
        p[i] = multiply_pairs(p[i], factors[i % 2][(first + i / 2 * 8) / kWarpKeys]);
    }
}

// As `multiply_values`, for packed codes: four accumulators have every fourth dimension of 32 each.
__device__ __forceinline__ void multiply_packed_values(float (&sums)[kOutTiles][4], const ELEMENT* weights,
                                                       const Factors& factors, const Unit* values, const Place& place) {
#pragma unroll
    for (int first = 0; first < kKeys; first += 32) {
        ptx::uint32 p[2][4];
        load_weights(p[0], weights, factors, first);
        load_weights(p[1], weights, factors, first + 16);
#pragma unroll
        for (int block = 0; block < kWarpDims / kBlockDims; ++block) {
            ptx::uint32 v[4];  // of eight keys each
            const int chunk = place.quarter * (kWarpDims / kBlockDims) + block;
            const Unit* from = values + chunk_offset<kColumns>(first + static_cast<int>(threadIdx.x % 32), chunk);
            ptx::ldmatrix_x4_trans(v, ptx::shared_address(from));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const ptx::uint32 low = attention::dequantize_packed<ELEMENT>(v[2 * half], j);
                    const ptx::uint32 high = attention::dequantize_packed<ELEMENT>(v[2 * half + 1], j);
                    ptx::mma_m16n8k16<ELEMENT>(sums[4 * block + j], p[half], low, high);
                }
            }
        }
    }
}

// Adds the products of the chunk's weights with the warp's dimensions of the values. Codes are in pairs, so that their
// accumulators have the even and the odd dimensions of each 16; see output_dim.
__device__ __forceinline__ void multiply_values(float (&sums)[kOutTiles][4], const ELEMENT* weights,
                                                const Factors& factors, const Unit* values, const Place& place) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
        ptx::uint32 p[4];
        load_weights(p, weights, factors, 16 * step);
#pragma unroll
        for (int block = 0; block < kWarpDims / kBlockDims; ++block) {
            ptx::uint32 v[4];
            const int column = 16 * (place.quarter * (kWarpDims / kBlockDims) + block);
            load_block<kColumns, Second::below, true>(v, values, 16 * step, column);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if constexpr (kCoded) {
                    float(*out)[4] = sums + 4 * block + 2 * half;
                    const ptx::uint32 low = v[2 * half], high = v[2 * half + 1];
                    ptx::mma_m16n8k16<ELEMENT>(out[0], p, attention::dequantize<ELEMENT, CODE, 0, 2>(low),
                                               attention::dequantize<ELEMENT, CODE, 0, 2>(high));
                    ptx::mma_m16n8k16<ELEMENT>(out[1], p, attention::dequantize<ELEMENT, CODE, 1, 3>(low),
                                               attention::dequantize<ELEMENT, CODE, 1, 3>(high));
                } else {
                    ptx::mma_m16n8k16<ELEMENT>(sums[2 * block + half], p, v[2 * half], v[2 * half + 1]);
                }
            }
        }
    }
}

// Pair number `pair` (0 or 1) of a thread's dimensions in the 16 from 16 `half` of its warp's on: its first dimension in the
// head, and its sums in row lane / 4 (`below` 0) or 8 below.
__device__ __forceinline__ int output_dim(const Place& place, int half, int pair) {
    if constexpr (kPacked) {
        return place.quarter * kWarpDims + half / 2 * 32 + 8 * place.t + 4 * (half % 2) + 2 * pair;
    }
    return place.quarter * kWarpDims + 16 * half + (kCoded ? 4 * place.t + 2 * pair : 8 * pair + 2 * place.t);
}
__device__ __forceinline__ float2 output_pair(const float (&sums)[kOutTiles][4], int half, int pair, int below) {
    if constexpr (kPacked) {
        const float(*four)[4] = sums + half / 2 * 4 + 2 * pair;
        return make_float2(four[0][2 * below + half % 2], four[1][2 * below + half % 2]);
    }
    const float* first = sums[2 * half];
    const float* second = sums[2 * half + 1];
    if constexpr (kCoded) return make_float2(first[2 * below + pair], second[2 * below + pair]);
    return pair == 0 ? make_float2(first[2 * below], first[2 * below + 1])
                     : make_float2(second[2 * below], second[2 * below + 1]);
}

// A thread's state for rows lane / 4 and 8 below: exponents, sums of weights, and accumulators of its dimensions.
struct Running {
    float exponent[2];
    float weight[2];
    float values[kOutTiles][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            exponent[r] = attention::minus_infinity();
            weight[r] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) values[n][i] = 0.0f;
        }
    }

    // Adds a unit; `factor`, a power of two, is applied to its values.
    __device__ __forceinline__ void add(const Running& unit, float factor) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float joined = fmaxf(exponent[r], unit.exponent[r]);
            const float keep = attention::power_of_two(exponent[r] - joined);
            const float take = attention::power_of_two(unit.exponent[r] - joined);
            exponent[r] = joined;
            weight[r] = fmaf(unit.weight[r], take, weight[r] * keep);
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; ++i) {
                    values[n][i] = fmaf(unit.values[n][i], take * factor, values[n][i] * keep);
                }
            }
        }
    }
};

// The exponent of the chunk's largest value scale, rounded down to a power of two. Weights are multiplied by scale / that
// power, so that they fit 16 bits. 0 for a chunk of zeros.
__device__ __forceinline__ float scale_exponent(const float* scales) {
    const int lane = threadIdx.x % 32;
    unsigned int largest = 0;
#pragma unroll
    for (int i = lane; i < kKeys; i += 32) largest = max(largest, __float_as_uint(scales[i]));
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) largest = max(largest, __shfl_xor_sync(kAll, largest, offset));
    const int exponent = static_cast<int>(largest >> 23);
    return exponent == 0 ? 0.0f : static_cast<float>(exponent - 127);
}

// 2^exponent for any integer exponent whose power is a normal number; otherwise the nearest normal number.
__device__ __forceinline__ float any_power_of_two(float exponent) {
    return __int_as_float(__float_as_int(fminf(fmaxf(exponent, -126.0f), 127.0f) + 12583039.0f) << 23);
}

// The unit that a block computes: the sums so far, relative to an exponent that grows with the maxima. With codes, the values
// are also relative to the exponent of the largest of their scales.
struct Unfinished {
    Running sums;
    float value_exponent;

    __device__ __forceinline__ void clear() {
        sums.clear();
        value_exponent = kCoded ? attention::minus_infinity() : 0.0f;
    }

    // For codes: raises the exponent of the values to that of the chunk's scales.
    __device__ __forceinline__ void raise(const float* value_scales) {
        if constexpr (kCoded) {
            const float joined = fmaxf(value_exponent, scale_exponent(value_scales));
            const float drop = attention::power_of_two(value_exponent - joined);
            value_exponent = joined;
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums.values[n][i] *= drop;
            }
        }
    }

    // Writes the weights of the warp's keys to shared memory, relative to this warp's own exponent.
    __device__ __forceinline__ void weigh(Weighed& to, const Scores& scores, const float (&largest)[2],
                                          const float* value_scales, const Place& place) const {
        const float inverse = kCoded ? any_power_of_two(-value_exponent) : 1.0f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float own = fmaxf(sums.exponent[r], ceilf(largest[r]));
            const float from = own == attention::minus_infinity() ? 0.0f : own;  // if all keys are masked
            float total = 0.0f;
#pragma unroll
            for (int j = 0; j < kScoreTiles; ++j) {
                float low = attention::exp2_flushed(scores[j][2 * r] - from);
                float high = attention::exp2_flushed(scores[j][2 * r + 1] - from);
                total += low + high;
                if constexpr (kCoded) {
                    low *= value_scales[place.key(j)] * inverse;
                    high *= value_scales[place.key(j) + 1] * inverse;
                }
                const int chunk = place.quarter * (kWarpKeys / kChunk) + j;
                ELEMENT* pair = to.weights + chunk_offset<kKeys>(place.row(r), chunk) + 2 * place.t;
                *reinterpret_cast<unsigned int*>(pair) = pack_pair<ELEMENT>(low, high);
            }
            total += __shfl_xor_sync(kAll, total, 1);
            total += __shfl_xor_sync(kAll, total, 2);
            if (place.t == 0) {
                to.exponents[place.row(r) * kWarps + place.quarter] = own;
                to.sums[place.row(r) * kWarps + place.quarter] = total;
            }
        }
    }

    // Adds the weights and values of all four warps.
    __device__ __forceinline__ void add(const Weighed& weighed, const Unit* values, const Place& place) {
        Factors factors;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int first = place.row(r) * kWarps;
            const float4 four = *reinterpret_cast<const float4*>(weighed.exponents + first);
            const float4 totals = *reinterpret_cast<const float4*>(weighed.sums + first);
            const float joined = fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));  // none is below sums.exponent
            const float keep = attention::power_of_two(sums.exponent[r] - joined);
            const float factor[kWarps] = {attention::power_of_two(four.x - joined),
                                          attention::power_of_two(four.y - joined),
                                          attention::power_of_two(four.z - joined),
                                          attention::power_of_two(four.w - joined)};
            sums.exponent[r] = joined;
            sums.weight[r] = sums.weight[r] * keep + ((totals.x * factor[0] + totals.y * factor[1]) +
                                                      (totals.z * factor[2] + totals.w * factor[3]));
#pragma unroll
            for (int i = 0; i < kWarps; ++i) factors[r][i] = pack_pair<ELEMENT>(factor[i], factor[i]);
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n) {
                sums.values[n][2 * r] *= keep;
                sums.values[n][2 * r + 1] *= keep;
            }
        }
        if (place.quarter * kWarpDims < HEAD_DIM) {
            if constexpr (kPacked) {
                multiply_packed_values(sums.values, weighed.weights, factors, values, place);
            } else {
                multiply_values(sums.values, weighed.weights, factors, values, place);
            }
        }
    }

    __device__ __forceinline__ void finish(Running& all) {
        all.add(sums, kCoded ? any_power_of_two(value_exponent) : 1.0f);
        clear();
    }
};

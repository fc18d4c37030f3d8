// The tree of sums of mla_attention: chunks of keys make units, units groups, groups a row.
//
// Weights are relative to an integer exponent, so that to bring two results to one exponent is exact: a sum depends on
// the order of its additions alone. Chunks of a unit are added one after another, then units of a group, then groups.
// A part, which a block hands over, is a unit or a group.
#pragma once
#include "mla/latents.cuh"

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kHeadTiles = HEADS / 8;
constexpr int kOwnHeads = HEADS / kWarps;                // that a warp weighs keys for: warp + kWarps * i
constexpr int kLaneKeys = KEYS < 32 ? 1 : KEYS / 32;     // of a chunk, neighbours
constexpr int kDimTiles = kRank / 16 / kWarps;           // of 16 features, of a warp's sums
constexpr unsigned int kAll = 0xffffffff;

// What a chunk's sums are multiplied with: those of the unit before its products; at the end of a unit those of its
// group, and those of the unit when it is added to the group.
struct Factors {
    float keep, group_keep, take, unused;
};

// Of the heads that a warp weighs keys for: the exponents so far, and the sums of weights, in a unit of a lane's keys.
struct Running {
    float unit_exponent[kOwnHeads], unit_weight[kOwnHeads];
    float group_exponent[kOwnHeads], group_weight[kOwnHeads];

    __device__ __forceinline__ void clear_unit(int i) {
        unit_exponent[i] = attention::minus_infinity();
        unit_weight[i] = 0.0f;
    }
    __device__ __forceinline__ void clear_group(int i) {
        group_exponent[i] = attention::minus_infinity();
        group_weight[i] = 0.0f;
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kOwnHeads; ++i) {
            clear_unit(i);
            clear_group(i);
        }
    }

    // Turn the scores of a chunk, minus infinity where a key does not count, into weights. Heads go side by side: each
    // step waits for the one before it.
    __device__ __forceinline__ void weigh(float (&scores)[kOwnHeads][kLaneKeys], Factors* factors_of_heads,
                                          bool ends_unit) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        Factors factors[kOwnHeads];
        float largest[kOwnHeads];
        bool grows = false;
#pragma unroll
        for (int i = 0; i < kOwnHeads; ++i) {
            factors[i] = {1.0f, 0.0f, 0.0f, 0.0f};
            largest[i] = scores[i][0];
#pragma unroll
            for (int k = 1; k < kLaneKeys; ++k) largest[i] = fmaxf(largest[i], scores[i][k]);
            grows = grows || largest[i] > unit_exponent[i];
        }
        if (__any_sync(kAll, grows)) {  // seldom behind the first chunks
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
                for (int i = 0; i < kOwnHeads; ++i) {
                    largest[i] = fmaxf(largest[i], __shfl_xor_sync(kAll, largest[i], offset));
                }
            }
#pragma unroll
            for (int i = 0; i < kOwnHeads; ++i) {
                const float exponent = fmaxf(unit_exponent[i], ceilf(largest[i]));
                const bool same = exponent == unit_exponent[i];  // also where both are minus infinity
                factors[i].keep = same ? 1.0f : attention::power_of_two(unit_exponent[i] - exponent);
                unit_exponent[i] = exponent;
            }
        }
#pragma unroll
        for (int i = 0; i < kOwnHeads; ++i) {
            const float from = unit_exponent[i] == attention::minus_infinity() ? 0.0f : unit_exponent[i];
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < kLaneKeys; ++k) {
                scores[i][k] = attention::exp2_flushed(scores[i][k] - from);
                sum += scores[i][k];
            }
            unit_weight[i] = fmaf(unit_weight[i], factors[i].keep, sum);
        }
        if (ends_unit) {
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
                for (int i = 0; i < kOwnHeads; ++i) {
                    unit_weight[i] += __shfl_xor_sync(kAll, unit_weight[i], offset);
                }
            }
#pragma unroll
            for (int i = 0; i < kOwnHeads; ++i) {
                const float joined = fmaxf(group_exponent[i], unit_exponent[i]);
                factors[i].group_keep = attention::power_of_two(group_exponent[i] - joined);
                factors[i].take = attention::power_of_two(unit_exponent[i] - joined);
                group_exponent[i] = joined;
                group_weight[i] = fmaf(unit_weight[i], factors[i].take, group_weight[i] * factors[i].group_keep);
                clear_unit(i);
            }
        }
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < kOwnHeads; ++i) factors_of_heads[warp + kWarps * i] = factors[i];
        }
    }
};

// A thread's sums: of 16 or 64 features (a tile) and all heads, a fragment of mma for each eight heads. Element i of a
// fragment has the feature lane / 4 + i / 2 * 8 of the warp's 16 and the head 2 * (lane % 4) + i % 2.
using Sums = float[kDimTiles][4 * kHeadTiles];

__device__ __forceinline__ int fragment_head(int n, int i) {
    return 8 * n + 2 * static_cast<int>(threadIdx.x % 4) + i % 2;
}
__device__ __forceinline__ int fragment_dim(int i) {
    return static_cast<int>(threadIdx.x % 32) / 4 + i / 2 * 8;
}

// Bring a unit's sums to the exponent of the chunk.
__device__ __forceinline__ void keep_unit(Sums& sums, const Factors* factors) {
    float keep[kHeadTiles][2];
    bool raised = false;
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            keep[n][i] = factors[fragment_head(n, i)].keep;
            raised = raised || keep[n][i] != 1.0f;
        }
    }
    if (__any_sync(kAll, raised)) {
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int d = 0; d < kDimTiles; ++d) sums[d][4 * n + i] *= keep[n][i % 2];
            }
        }
    }
}

// Add a unit to its group, and clear it.
__device__ __forceinline__ void finish_unit(Sums& group, Sums& unit, const Factors* of_heads) {
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Factors factors = of_heads[fragment_head(n, i)];
#pragma unroll
            for (int d = 0; d < kDimTiles; ++d) {
                group[d][4 * n + i] = fmaf(unit[d][4 * n + i], factors.take, group[d][4 * n + i] * factors.group_keep);
                unit[d][4 * n + i] = 0.0f;
            }
        }
    }
}

// Hand over a group, and clear it. `values` and `weights` are those of the part and the tile's first head; `first_dim` is
// the warp's first feature of tile 0, tiles are `tile` features apart.
__device__ __forceinline__ void store_part(Sums& group, Running& running, float* values, float2* weights, int parts,
                                           int heads, int first_dim, int tile) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int head = fragment_head(n, i);
                if (head < heads) values[head * parts * kRank + first_dim + d * tile + fragment_dim(i)] = group[d][4 * n + i];
                group[d][4 * n + i] = 0.0f;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i) {
        const int head = warp + kWarps * i;
        if (head < heads && lane == 0) {
            weights[head * parts] = make_float2(running.group_exponent[i], running.group_weight[i]);
        }
        running.clear_group(i);
    }
}

// How far a block is in its units and parts.
struct Progress {
    int chunks_per_unit, units_per_part;
    int unit_left, part_left;

    __device__ __forceinline__ Progress(int chunks_per_unit, int units_per_part)
        : chunks_per_unit(chunks_per_unit), units_per_part(units_per_part), unit_left(chunks_per_unit),
          part_left(units_per_part) {}

    // Whether a chunk ends a unit, and whether that unit ends a part; `last` is that of the block.
    __device__ __forceinline__ bool ends_unit(bool last) {
        const bool ends = --unit_left == 0 || last;
        if (ends) unit_left = chunks_per_unit;
        return ends;
    }
    __device__ __forceinline__ bool ends_part(bool last) {
        const bool ends = --part_left == 0 || last;
        if (ends) part_left = units_per_part;
        return ends;
    }
};

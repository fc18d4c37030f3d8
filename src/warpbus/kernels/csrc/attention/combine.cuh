// Partial results of attention, and how the last blocks of a row reduce them.
//
// A partial result of a query consists of the weighted sum of the values and the sum of the weights over some keys; a key
// with score s (a power of two) has the weight 2^(s - exponent). The exponent is an integer, so that rescaling two results to
// one exponent is exact: a sum depends only on the order of its additions, not on where blocks begin and end. The order is a
// fixed tree: up to four units of a group one after another, then up to four groups of a quarter, then up to four quarters. A
// part, which a block leaves in global memory, is a unit, a group or a quarter.
#pragma once
#include "attention/cache.cuh"

namespace attention {

constexpr int kFour = 4;  // results that are added at a time

// Four dimensions of a partial result.
struct Sum {
    float4 values;
    float weight;
    float exponent;
};

// The results that the blocks of one row and tile leave in global memory.
struct Parts {
    float* values;    // [parts, queries, head_dim]
    float2* weights;  // [parts, queries]: exponent, sum of weights
    int queries;
    int head_dim;

    __device__ __forceinline__ int index(int part, int query) const { return part * queries + query; }
};

// Iterates over the partial results of a query. It loads past L1, because other blocks have written them while this one ran.
struct Cursor {
    const float* values;
    const float2* weights;
    int values_stride;
    int weights_stride;

    __device__ __forceinline__ Cursor(const Parts& parts, int part, int query, int dim)
        : values(parts.values + parts.index(part, query) * parts.head_dim + dim),
          weights(parts.weights + parts.index(part, query)), values_stride(parts.queries * parts.head_dim),
          weights_stride(parts.queries) {}
    __device__ __forceinline__ void advance() {
        values += values_stride;
        weights += weights_stride;
    }
    __device__ __forceinline__ Sum load() const {
        const float2 weight = __ldcg(weights);
        return {__ldcg(reinterpret_cast<const float4*>(values)), weight.y, weight.x};
    }
};

// Starts loading up to four of `count` results and advances `at`. Beyond the end, the last result is loaded again and gets
// the weight 0.
__device__ __forceinline__ void load_four(Sum (&four)[kFour], int count, Cursor& at) {
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
        four[i] = at.load();
        if (i >= count) four[i].exponent = minus_infinity();
        if (i + 1 < count) at.advance();
    }
}

// The sum of four results, in order. If all have the weight 0, so does the sum.
__device__ __forceinline__ Sum in_order(const Sum (&four)[kFour]) {
    float exponent = minus_infinity();
#pragma unroll
    for (int i = 0; i < kFour; ++i) exponent = fmaxf(exponent, four[i].exponent);
    Sum sum = {{0.0f, 0.0f, 0.0f, 0.0f}, 0.0f, exponent};
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
        const float scale = power_of_two(four[i].exponent - exponent);
        sum.values.x = fmaf(four[i].values.x, scale, sum.values.x);
        sum.values.y = fmaf(four[i].values.y, scale, sum.values.y);
        sum.values.z = fmaf(four[i].values.z, scale, sum.values.z);
        sum.values.w = fmaf(four[i].values.w, scale, sum.values.w);
        sum.weight = fmaf(four[i].weight, scale, sum.weight);
    }
    return sum;
}

// The sum of up to sixteen groups, or of up to four quarters, which is the same tree: four at a time, then those sums. Eight
// loads are issued before the first addition.
__device__ __forceinline__ Sum sum_row(int count, Cursor at) {
    Sum quarters[kFour];
#pragma unroll
    for (int i = 0; i < kFour; i += 2) {
        Sum first[kFour], second[kFour];
        quarters[i] = quarters[i + 1] = {{0.0f, 0.0f, 0.0f, 0.0f}, 0.0f, minus_infinity()};
        const int left = count - kFour * i;
        if (left <= 0) continue;
        load_four(first, left, at);
        load_four(second, left - kFour, at);
        quarters[i] = in_order(first);
        quarters[i + 1] = in_order(second);
    }
    return in_order(quarters);
}

// The sum of a quarter from units: its groups of `in_group` units each, from unit `first` on. All loads are issued before the
// first addition. If no unit is left, the sum has the weight 0.
__device__ __forceinline__ Sum sum_quarter(const Parts& parts, int count, int in_group, int first, int query, int dim) {
    Sum units[kFour][kFour], groups[kFour];
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
        const int begin = first + i * in_group;
        Cursor at(parts, min(begin, count - 1), query, dim);
        load_four(units[i], min(in_group, count - begin), at);
    }
#pragma unroll
    for (int i = 0; i < kFour; ++i) groups[i] = in_order(units[i]);
    return in_order(groups);
}

// Four elements of the output, aligned to 8 bytes.
template <typename T>
__device__ __forceinline__ void store_normalized(T* out, const Sum& sum) {
    const float inverse = 1.0f / sum.weight;
    uint2 packed;
    packed.x = pack_pair<T>(sum.values.x * inverse, sum.values.y * inverse);
    packed.y = pack_pair<T>(sum.values.z * inverse, sum.values.w * inverse);
    *reinterpret_cast<uint2*>(out) = packed;
}

// Reduces `count` parts of a row and tile, and writes the output [queries, head_dim]. Parts are units, `in_group` (2 to 4)
// per group, or, if `in_group` is 1, groups or quarters. `combiners` blocks share the queries; this one is number `rank`.
// `scratch` has 4 (HeadDim + 2) floats. Loops that hold that many loads in registers are not unrolled.
template <int HeadDim, typename T>
__device__ __forceinline__ void combine(const Parts& parts, int count, int in_group, int rank, int combiners,
                                        float* scratch, T* out) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    if (in_group == 1) {  // one warp per query
#pragma unroll 1
        for (int query = rank + combiners * warp; query < parts.queries; query += combiners * kFour) {
#pragma unroll 1
            for (int dim = 4 * lane; dim < parts.head_dim; dim += 128) {
                const Sum sum = sum_row(count, Cursor(parts, 0, query, dim));
                store_normalized(out + query * parts.head_dim + dim, sum);
            }
        }
        return;
    }
    float* values = scratch;  // of the quarters, one per warp
    float2* weights = reinterpret_cast<float2*>(values + kFour * HeadDim);
#pragma unroll 1
    for (int query = rank; query < parts.queries; query += combiners) {
#pragma unroll 1
        for (int dim = 4 * lane; dim < parts.head_dim; dim += 128) {
            const Sum sum = sum_quarter(parts, count, in_group, warp * kFour * in_group, query, dim);
            *reinterpret_cast<float4*>(values + warp * HeadDim + dim) = sum.values;
            if (lane == 0) weights[warp] = make_float2(sum.exponent, sum.weight);
        }
        __syncthreads();
        const int dim = 4 * threadIdx.x;
        if (dim < parts.head_dim) {
            Sum quarters[kFour];
#pragma unroll
            for (int i = 0; i < kFour; ++i) {
                quarters[i].values = *reinterpret_cast<const float4*>(values + i * HeadDim + dim);
                quarters[i].weight = weights[i].y;
                quarters[i].exponent = weights[i].x;
            }
            store_normalized(out + query * parts.head_dim + dim, in_order(quarters));
        }
        __syncthreads();
    }
}

// ---- Which blocks are the last ----

// Called by one thread of a block after the block's part is written: the last `combiners` of `blocks` blocks get numbers from
// 0 on as soon as all parts are complete, the others get -1. With more than one combiner they wait for blocks that still run,
// so this needs a grid that the GPU can hold as a whole; beside other streams it relies on blocks starting in the order of
// their numbers, which GPUs do although CUDA does not guarantee it.
__device__ __forceinline__ int arrive(int* counter, int blocks, int combiners) {
    const int left = blocks - 1 - ptx::add_acquire_release(counter, 1);
    if (left >= combiners) return -1;
    if (left > 0) {
        while (ptx::load_acquire(counter) < blocks) {
        }
    }
    return left;
}

// Called by the same thread after its block has combined: the last one resets the counter to 0 for the next kernel. All
// blocks have arrived by then, so no block waits for it and no memory order is needed.
__device__ __forceinline__ void leave(int* counter, int blocks, int combiners) {
    if (combiners == 1 || atomicAdd(counter, 1) == blocks + combiners - 1) *counter = 0;
}

}  // namespace attention

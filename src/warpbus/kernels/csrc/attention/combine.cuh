// Partial results of attention, and how the last blocks of a row sum them.
//
// A partial result of a query is, over some keys, the weighted sum of the values and the sum of the weights, where a
// key with the score s (in powers of two) has the weight 2^(s - exponent). The exponent is an integer, so that to bring
// two results to one exponent is exact: a sum depends on the order of its additions alone, not on where blocks begin
// and end. The order is fixed: up to eight units of a group one after another, then up to eight groups.
#pragma once
#include "attention/cache.cuh"

namespace attention {

constexpr int kInGroup = 8;  // results that are summed at a time

// Four dimensions of a partial result.
struct Sum {
    float4 values;
    float weight;
    float exponent;
};

// The results that the blocks of one row and KV head leave in global memory, or one block in shared memory.
struct Parts {
    float* values;    // [parts, group, head_dim]
    float2* weights;  // [parts, group]: exponent, sum of weights
    int group;
    int head_dim;
    int stride;  // of queries in `values`: at least head_dim

    __device__ __forceinline__ int index(int part, int query) const { return part * group + query; }
};

// Walks from one partial result of a query to the next.
struct Cursor {
    const float* values;
    const float2* weights;
    int values_stride;
    int weights_stride;

    __device__ __forceinline__ void advance() {
        values += values_stride;
        weights += weights_stride;
    }
};

// Past L1: another block has written it while this one ran.
struct GlobalCursor : Cursor {
    __device__ __forceinline__ GlobalCursor(const Parts& parts, int part, int query, int dim)
        : Cursor{parts.values + parts.index(part, query) * parts.stride + dim,
                 parts.weights + parts.index(part, query), parts.group * parts.stride, parts.group} {}
    __device__ __forceinline__ Sum load() const {
        const float2 weight = __ldcg(weights);
        return {__ldcg(reinterpret_cast<const float4*>(values)), weight.y, weight.x};
    }
};

struct SharedCursor : Cursor {
    __device__ __forceinline__ SharedCursor(const float* values, const float2* weights, int stride)
        : Cursor{values, weights, stride, 1} {}
    __device__ __forceinline__ Sum load() const {
        return {*reinterpret_cast<const float4*>(values), weights->y, weights->x};
    }
};

#if __CUDA_ARCH__ >= 900
// From one block of the cluster to the next: each has its part in its own shared memory, at the same place.
struct ClusterCursor {
    const float* values;
    const float2* weights;
    int rank;

    __device__ __forceinline__ ClusterCursor(const Parts& own, int query, int dim)
        : values(own.values + query * own.stride + dim), weights(own.weights + query), rank(0) {}
    __device__ __forceinline__ void advance() { ++rank; }
    __device__ __forceinline__ Sum load() const {
        const float2 weight = *ptx::of_cluster_block(weights, rank);
        return {*ptx::of_cluster_block(reinterpret_cast<const float4*>(values), rank), weight.y, weight.x};
    }
};
#endif

// The sum of up to eight partial results, one after another. All loads are under way before the first addition: past
// the last result it is loaded again, and counts nothing.
template <typename Position>
__device__ __forceinline__ Sum in_order(int count, Position at) {
    Sum part[kInGroup];
    float exponent = minus_infinity();
#pragma unroll
    for (int i = 0; i < kInGroup; ++i) {
        part[i] = at.load();
        if (i + 1 < count) at.advance();
    }
#pragma unroll
    for (int i = 0; i < kInGroup; ++i) {
        if (i >= count) part[i].exponent = minus_infinity();
        exponent = fmaxf(exponent, part[i].exponent);
    }
    Sum sum = {{0.0f, 0.0f, 0.0f, 0.0f}, 0.0f, exponent};
#pragma unroll
    for (int i = 0; i < kInGroup; ++i) {
        const float scale = power_of_two(part[i].exponent - exponent);
        sum.values.x = fmaf(part[i].values.x, scale, sum.values.x);
        sum.values.y = fmaf(part[i].values.y, scale, sum.values.y);
        sum.values.z = fmaf(part[i].values.z, scale, sum.values.z);
        sum.values.w = fmaf(part[i].values.w, scale, sum.values.w);
        sum.weight = fmaf(part[i].weight, scale, sum.weight);
    }
    return sum;
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

#if __CUDA_ARCH__ >= 900
// Sum the parts of the first `count` blocks of a cluster, which all call this with their `own`, and write the output
// [group, head_dim]: each block a share of it.
template <typename T>
__device__ __forceinline__ void combine_cluster(const Parts& own, int count, int rank, T* out) {
    ptx::cluster_sync();
    const int pieces = own.head_dim / 4;
#pragma unroll 1
    for (int i = rank * blockDim.x + threadIdx.x; i < own.group * pieces; i += count * blockDim.x) {
        const Sum sum = in_order(count, ClusterCursor(own, i / pieces, i % pieces * 4));
        store_normalized(out + 4 * i, sum);
    }
    ptx::cluster_sync();  // nobody ends before all have read
}
#endif

// Sum `count` parts of a row and KV head, groups of `in_group` (8 at most), and write the output [group, head_dim].
// `combiners` blocks share the queries; this one is number `rank`. `scratch` has 8 (HeadDim + 2) floats, others for
// every four warps. Loops that hold eight loads in registers are not unrolled.
template <int HeadDim, typename T>
__device__ __forceinline__ void combine(const Parts& parts, int count, int in_group, int rank, int combiners,
                                        float* scratch, T* out) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int warps = blockDim.x / 32;
    if (in_group == 1) {  // a warp has a query to itself
#pragma unroll 1
        for (int query = rank + combiners * warp; query < parts.group; query += combiners * warps) {
#pragma unroll 1
            for (int dim = 4 * lane; dim < parts.head_dim; dim += 128) {
                const Sum sum = in_order(count, GlobalCursor(parts, 0, query, dim));
                store_normalized(out + query * parts.head_dim + dim, sum);
            }
        }
        return;
    }
    const int groups = (count + in_group - 1) / in_group;
    const int team = warp / 4;  // four warps have a query: each sums groups, then they sum those sums
    const int teams = warps / 4;
    float* values = scratch;
    float2* weights = reinterpret_cast<float2*>(values + kInGroup * HeadDim);
#pragma unroll 1
    for (int first = 0; first < parts.group; first += combiners * teams) {
        const int query = first + rank + combiners * team;
#pragma unroll 1
        for (int group = warp % 4; group < groups && query < parts.group; group += 4) {
#pragma unroll 1
            for (int dim = 4 * lane; dim < parts.head_dim; dim += 128) {
                const int begin = in_group * group;
                const Sum sum = in_order(min(in_group, count - begin), GlobalCursor(parts, begin, query, dim));
                *reinterpret_cast<float4*>(values + group * HeadDim + dim) = sum.values;
                if (lane == 0) weights[group] = make_float2(sum.exponent, sum.weight);
            }
        }
        __syncthreads();
        const int dim = 4 * (threadIdx.x % 128);
        if (dim < parts.head_dim && query < parts.group) {
            const Sum sum = in_order(groups, SharedCursor(values + dim, weights, HeadDim));
            store_normalized(out + query * parts.head_dim + dim, sum);
        }
        __syncthreads();
    }
}

// ---- Who comes last ----

__device__ __forceinline__ int add_acquire_release(int* counter, int value) {
    int old;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(value) : "memory");
    return old;
}

__device__ __forceinline__ int load_acquire(const int* counter) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

// One thread of a block calls it when the block's part is written: the last `combiners` of `blocks` blocks get numbers
// from 0 on as soon as all parts are there, the others -1. With more than one combiner they wait for the blocks still
// at work, so that is for grids which the GPU holds whole.
__device__ __forceinline__ int arrive(int* counter, int blocks, int combiners) {
    const int left = blocks - 1 - add_acquire_release(counter, 1);
    if (left >= combiners) return -1;
    if (left > 0) {
        while (load_acquire(counter) < blocks) {
        }
    }
    return left;
}

// The same thread, when its block has combined: the last one leaves the counter at 0 for the next kernel. All blocks
// have arrived, so nobody waits for it, and nothing is ordered by it.
__device__ __forceinline__ void leave(int* counter, int blocks, int combiners) {
    if (combiners == 1 || atomicAdd(counter, 1) == blocks + combiners - 1) *counter = 0;
}

}  // namespace attention

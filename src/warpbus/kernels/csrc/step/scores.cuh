// The scores of a row: as numbers of the same order, and visited by the blocks that share the row.
#pragma once
#include "common/numeric.cuh"
#include "step/cluster.cuh"

namespace step {

constexpr int kBlock = 1024;
constexpr int kWarps = kBlock / 32;
constexpr int kMostBlocks = 8;  // that share a row

// The bits of an element, and which of them are the sign, the exponent and the whole.
__device__ __forceinline__ unsigned int bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ unsigned int bits_of(__half x) { return __half_as_ushort(x); }
__device__ __forceinline__ unsigned int bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }

template <typename T>
struct Format;
template <>
struct Format<float> {
    static constexpr int kBits = 32;
    static constexpr unsigned int kInfinity = 0x7F800000u;
    static __device__ __forceinline__ float element(unsigned int bits) { return __uint_as_float(bits); }
};
template <>
struct Format<__half> {
    static constexpr int kBits = 16;
    static constexpr unsigned int kInfinity = 0x7C00u;
    static __device__ __forceinline__ __half element(unsigned int bits) { return __ushort_as_half(bits); }
};
template <>
struct Format<__nv_bfloat16> {
    static constexpr int kBits = 16;
    static constexpr unsigned int kInfinity = 0x7F80u;
    static __device__ __forceinline__ __nv_bfloat16 element(unsigned int bits) { return __ushort_as_bfloat16(bits); }
};

// A number of Format::kBits bits that is ordered as the scores are. The two zeros are equal and NaN is above all; 0
// belongs to no score.
template <typename T>
__device__ __forceinline__ unsigned int key_of(T score) {
    constexpr unsigned int kSign = 1u << (Format<T>::kBits - 1);
    constexpr unsigned int kAll = kSign | (kSign - 1);
    const unsigned int bits = bits_of(score);
    if ((bits & (kSign - 1)) > Format<T>::kInfinity) return kAll;
    if (bits & kSign) return bits == kSign ? kSign : ~bits & kAll;
    return bits | kSign;
}

// The score that a key stands for.
template <typename T>
__device__ __forceinline__ float score_of(unsigned int key) {
    constexpr unsigned int kSign = 1u << (Format<T>::kBits - 1);
    return to_float(Format<T>::element(key & kSign ? key & (kSign - 1) : ~key & (kSign | (kSign - 1))));
}

// One row, and the part of it that is this block's: chunks of 16 bytes, in the order of the blocks.
template <typename T>
struct Scores {
    static constexpr int kChunk = Vector16<T>::kSize;

    const T* row;
    int width;
    int begin, end;
    bool vectorised;

    __device__ __forceinline__ Scores(const T* row, int width, int rank, int blocks, bool vectorised)
        : row(row), width(width), vectorised(vectorised) {
        const int chunks = (width + kChunk - 1) / kChunk;
        const int share = (chunks + blocks - 1) / blocks;
        begin = min(rank * share, chunks);
        end = min(begin + share, chunks);
    }

    __device__ __forceinline__ Vector16<T> load(int chunk) const {
        if (vectorised) return reinterpret_cast<const Vector16<T>*>(row)[chunk];
        Vector16<T> value;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            const int at = kChunk * chunk + i;
            value.element[i] = at < width ? row[at] : from_float<T>(0.0f);
        }
        return value;
    }

    // Calls see(score, index) for the scores of this block, each by one thread, which sees its own in their order;
    // kBatch loads of a thread are in flight.
    template <int kBatch, typename See>
    __device__ __forceinline__ void visit(See see) const {
        for (int first = begin + threadIdx.x; first < end; first += kBatch * kBlock) {
            Vector16<T> value[kBatch];
#pragma unroll
            for (int u = 0; u < kBatch; ++u) {
                if (first + u * kBlock < end) value[u] = load(first + u * kBlock);
            }
#pragma unroll
            for (int u = 0; u < kBatch; ++u) {
                const int chunk = first + u * kBlock;
                if (chunk >= end) break;
#pragma unroll
                for (int i = 0; i < kChunk; ++i) {
                    if (kChunk * chunk + i < width) see(value[u].element[i], kChunk * chunk + i);
                }
            }
        }
    }
};

// A score's key over the complement of its index: the largest is that of the best score and, of equals, the first.
using Ranked = ptx::uint64;

__device__ __forceinline__ unsigned int key_of_ranked(Ranked ranked) { return static_cast<unsigned int>(ranked >> 32); }
__device__ __forceinline__ int index_of_ranked(Ranked ranked) {
    return static_cast<int>(~static_cast<unsigned int>(ranked));
}

__device__ __forceinline__ Ranked largest_of_warp(Ranked value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(0xffffffff, value, offset));
    return value;
}

struct BestShared {
    Ranked of_warp[kWarps];
    Ranked of_block;
    Ranked of_row;
};

// The row's best score, for all threads that share the row. A barrier of the cluster has to follow before a block ends.
template <typename T>
__device__ __forceinline__ Ranked best_of_row(const Scores<T>& scores, int blocks, BestShared& shared) {
    const int lane = threadIdx.x % 32;
    unsigned int key = 0;
    int first = 0;
    scores.template visit<3>([&](T score, int index) {  // a thread sees them in the order of their indices
        const unsigned int other = key_of(score);
        first = other > key ? index : first;
        key = max(key, other);
    });
    Ranked best = largest_of_warp(static_cast<Ranked>(key) << 32 | ~static_cast<unsigned int>(first));
    if (lane == 0) shared.of_warp[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x < 32) {
        best = largest_of_warp(shared.of_warp[lane]);
        if (lane == 0) shared.of_block = best;
    }
    row_sync();
    if (threadIdx.x < 32) {
        best = largest_of_warp(lane < blocks ? *of_block(&shared.of_block, lane) : 0);
        if (lane == 0) shared.of_row = best;
    }
    __syncthreads();
    return shared.of_row;
}

}  // namespace step

// Parts of a radix search: the key at which a sum over the better keys passes a target is found eight bits at a time, from
// a histogram of the keys that agree with the bits found so far.
#pragma once
#include "step/scores.cuh"

namespace step {

constexpr int kBins = 256;
constexpr int kCopies = 8;  // of each bin, by lane: scores of a warp often have the same bin

// Whether a key has the bits of `prefix` above the eight bits at `shift`.
__device__ __forceinline__ bool agrees(unsigned int key, unsigned int prefix, int shift) {
    return (key ^ prefix) >> shift >> 8 == 0;
}

// This lane's copy of the bin of the eight bits at `shift`.
__device__ __forceinline__ int copy_of_bin(unsigned int key, int shift) {
    return (key >> shift & (kBins - 1)) * kCopies + threadIdx.x % kCopies;
}

// One of the copies of a bin: no two lanes of eight read one bank for the same i.
__device__ __forceinline__ int copy_at(int bin, int i) { return bin * kCopies + (i + threadIdx.x) % kCopies; }

// The sum over the lanes of a warp up to this one.
template <typename T>
__device__ __forceinline__ T inclusive_sum(T value) {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const T before = __shfl_up_sync(0xffffffff, value, offset);
        if (threadIdx.x % 32 >= offset) value += before;
    }
    return value;
}

}  // namespace step

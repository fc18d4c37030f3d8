// The largest magnitude of a row of 16-bit floats, of either type, found in their bits.
#pragma once

// The larger of both halves, as bits: without its sign a 16-bit float has the order of an integer, NaN the largest.
__device__ __forceinline__ unsigned int larger(unsigned int best, uint4 chunk) {
    constexpr unsigned int kMagnitudes = 0x7fff7fff;
    best = __vmaxu2(best, __vmaxu2(chunk.x & kMagnitudes, chunk.y & kMagnitudes));
    return __vmaxu2(best, __vmaxu2(chunk.z & kMagnitudes, chunk.w & kMagnitudes));
}

// The maximum over a block of up to `MostThreads` threads, including the two halves of `best`.
template <int MostThreads>
__device__ __forceinline__ unsigned int largest(unsigned int best) {
    __shared__ unsigned int of_warp[MostThreads / 32];
    const int lane = threadIdx.x % 32;
    best = __reduce_max_sync(0xffffffff, max(best & 0xffff, best >> 16));
    if (lane == 0) of_warp[threadIdx.x / 32] = best;
    __syncthreads();
    return __reduce_max_sync(0xffffffff, lane < blockDim.x / 32 ? of_warp[lane] : 0);
}

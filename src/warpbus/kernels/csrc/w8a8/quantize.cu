// codes [rows, k] = x [rows, k] / scales, scales [rows] = absmax of the row / LARGEST: 8 bits, one scale per row.
//
// Macros
//   ELEMENT  of x: __half or __nv_bfloat16
//   E4M3     1: codes are e4m3, LARGEST = 448 (sm_89); 0: they are int8 of -127 to 127, LARGEST = 127
//
// x is contiguous; `whole`: its rows consist of whole chunks of 8 elements that start at multiples of 16 bytes (those of
// codes at multiples of 8). Any rows, k >= 1. Codes are rounded to nearest even after a multiplication by 1 / scale. A scale
// below the smallest normal float32 is 0, and so are its codes; a row with NaN or infinity has a scale of NaN or infinity.
//
// One block per row, of up to kMostThreads threads: as many as keep the row in registers, kKept chunks each, so that it is
// read once and rows of any length have the same number of bytes in flight. The part of a row beyond 16384 elements is read
// again.
#include "common/magnitude.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"

constexpr int kMostThreads = 256;
constexpr int kKept = 8;
constexpr float kLargest = E4M3 ? 448.0f : 127.0f;
constexpr float kSmallestNormal = 1.17549435e-38f;

// Loads 16 bytes that are not read again: they are evicted from L2 first, which leaves room for the codes.
__device__ __forceinline__ uint4 load_last(const uint4* global) {
    uint4 value;
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(global)
                 : "memory");
    return value;
}

// Stores the scale of the row's largest magnitude, and returns the factor for its elements.
__device__ __forceinline__ float inverse_scale(unsigned int best, float* scales) {
    float scale = unpack_pair<ELEMENT>(best).x / kLargest;
    if (scale < kSmallestNormal) scale = 0.0f;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    return scale == 0.0f ? 0.0f : 1.0f / scale;
}

// The codes of two elements; the first one is first in memory.
__device__ __forceinline__ unsigned int round_pair(unsigned int pair, float inverse) {
    const float2 value = unpack_pair<ELEMENT>(pair);
#if E4M3
    return ptx::pack_e4m3(value.x * inverse, value.y * inverse);
#else
    return __byte_perm(ptx::round_s8(value.x * inverse), ptx::round_s8(value.y * inverse), 0x0040);
#endif
}

__device__ __forceinline__ uint2 round_chunk(uint4 chunk, float inverse) {
    return {__byte_perm(round_pair(chunk.x, inverse), round_pair(chunk.y, inverse), 0x5410),
            __byte_perm(round_pair(chunk.z, inverse), round_pair(chunk.w, inverse), 0x5410)};
}

// A row of whole chunks. All loads of a thread are issued before the first chunk is used.
__device__ __forceinline__ void quantize_chunks(const uint4* row, uint2* codes, float* scales, int chunks) {
    uint4 kept[kKept];
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        const int chunk = threadIdx.x + i * blockDim.x;
        kept[i] = make_uint4(0, 0, 0, 0);
        if (chunk < chunks) kept[i] = load_last(row + chunk);
    }
    unsigned int best = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) best = larger(best, kept[i]);
    const int beyond = threadIdx.x + kKept * blockDim.x;
    for (int chunk = beyond; chunk < chunks; chunk += blockDim.x) best = larger(best, row[chunk]);

    const float inverse = inverse_scale(largest<kMostThreads>(best), scales);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        const int chunk = threadIdx.x + i * blockDim.x;
        if (chunk < chunks) codes[chunk] = round_chunk(kept[i], inverse);
    }
    for (int chunk = beyond; chunk < chunks; chunk += blockDim.x) codes[chunk] = round_chunk(row[chunk], inverse);
}

// Any other row, element by element.
__device__ __forceinline__ void quantize_elements(const unsigned short* row, unsigned char* codes, float* scales,
                                                  int k) {
    unsigned int best = 0;
    for (int i = threadIdx.x; i < k; i += blockDim.x) best = max(best, row[i] & 0x7fffu);
    const float inverse = inverse_scale(largest<kMostThreads>(best), scales);
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        codes[i] = static_cast<unsigned char>(round_pair(row[i], inverse));
    }
}

// The previous kernel may write x: no __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(kMostThreads, 4)
    quantize(const unsigned short* x, unsigned char* __restrict__ codes, float* __restrict__ scales, int k,
             int whole) {
#if __CUDA_ARCH__ >= 900
    // While more rows wait, the dependent product would occupy whole multiprocessors.
    constexpr int kAtOnce = 128;
    if (gridDim.x <= kAtOnce) ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const unsigned short* row = x + static_cast<long long>(blockIdx.x) * k;
    unsigned char* target = codes + static_cast<long long>(blockIdx.x) * k;
    if (whole) {
        quantize_chunks(reinterpret_cast<const uint4*>(row), reinterpret_cast<uint2*>(target), scales, k / 8);
    } else {
        quantize_elements(row, target, scales, k);
    }
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
#endif
}

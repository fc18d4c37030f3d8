// codes [rows, k] = x [rows, k] / scales, scales [rows] = absmax of the row / LARGEST: 8 bits a row with a scale of its own.
//
// Macros
//   ELEMENT  of x: __half or __nv_bfloat16
//   E4M3     1: codes are e4m3, LARGEST = 448 (sm_89); 0: they are int8 of -127 to 127, LARGEST = 127
//
// x is contiguous, `aligned` says that its rows begin at multiples of 16 bytes (those of codes then begin at 8). Any
// rows, k >= 1. Rounded to nearest even after a product with 1 / scale. A scale below the smallest normal float32 is 0,
// and its codes too; a row with NaN or infinity has a scale that shows it.
//
// A block takes a row. It keeps kKept chunks of 8 elements a thread in registers from the first reading, which is all of
// a row of up to 16384; what is beyond is read again.
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"

constexpr int kThreads = 256;
constexpr int kKept = 8;
constexpr float kLargest = E4M3 ? 448.0f : 127.0f;
constexpr float kSmallestNormal = 1.17549435e-38f;

struct Chunk {
    unsigned int pair[4];
};

__device__ __forceinline__ Chunk load(const ELEMENT* row, int chunk, int k, bool aligned) {
    const Vector16<ELEMENT> loaded = load_chunk(row + static_cast<long long>(chunk) * kChunk, k - chunk * kChunk, aligned);
    return *reinterpret_cast<const Chunk*>(&loaded);
}

// The largest of both halves, as bits: without its sign a 16-bit float is ordered as an integer is, NaN the largest.
__device__ __forceinline__ unsigned int larger(unsigned int best, const Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) best = __vmaxu2(best, chunk.pair[i] & 0x7fff7fff);
    return best;
}

// The largest over the block, of the two halves of `best` too.
__device__ __forceinline__ unsigned int largest(unsigned int best) {
    __shared__ unsigned int of_warp[kThreads / 32];
    best = __reduce_max_sync(0xffffffff, max(best & 0xffff, best >> 16));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) best = max(best, of_warp[i]);
    return best;
}

struct alignas(8) Codes {
    unsigned char code[kChunk];
};

__device__ __forceinline__ Codes round_chunk(const Chunk& chunk, float inverse) {
    Codes codes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 value = unpack_pair<ELEMENT>(chunk.pair[i]);
#if E4M3
        const unsigned int pair = ptx::pack_e4m3(value.x * inverse, value.y * inverse);
        codes.code[2 * i] = static_cast<unsigned char>(pair);
        codes.code[2 * i + 1] = static_cast<unsigned char>(pair >> 8);
#else
        codes.code[2 * i] = static_cast<unsigned char>(ptx::round_s8(value.x * inverse));
        codes.code[2 * i + 1] = static_cast<unsigned char>(ptx::round_s8(value.y * inverse));
#endif
    }
    return codes;
}

__device__ __forceinline__ void store(unsigned char* row, int chunk, int k, bool aligned, const Codes& codes) {
    unsigned char* target = row + static_cast<long long>(chunk) * kChunk;
    const int valid = k - chunk * kChunk;
    if (aligned && valid >= kChunk) {
        *reinterpret_cast<Codes*>(target) = codes;
        return;
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        if (i < valid) target[i] = codes.code[i];
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    quantize(const ELEMENT* __restrict__ x, unsigned char* __restrict__ codes, float* __restrict__ scales, int k,
             int aligned) {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const ELEMENT* row = x + static_cast<long long>(blockIdx.x) * k;
    unsigned char* target = codes + static_cast<long long>(blockIdx.x) * k;
    const int chunks = (k + kChunk - 1) / kChunk;
    Chunk kept[kKept];
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        const int chunk = threadIdx.x + i * kThreads;
        kept[i] = chunk < chunks ? load(row, chunk, k, aligned) : Chunk{};
    }
    unsigned int best = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) best = larger(best, kept[i]);
    for (int chunk = threadIdx.x + kKept * kThreads; chunk < chunks; chunk += kThreads) {
        best = larger(best, load(row, chunk, k, aligned));
    }

    const float absmax = unpack_pair<ELEMENT>(largest(best)).x;
    float scale = absmax / kLargest;
    if (scale < kSmallestNormal) scale = 0.0f;
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        const int chunk = threadIdx.x + i * kThreads;
        if (chunk < chunks) store(target, chunk, k, aligned, round_chunk(kept[i], inverse));
    }
    for (int chunk = threadIdx.x + kKept * kThreads; chunk < chunks; chunk += kThreads) {
        store(target, chunk, k, aligned, round_chunk(load(row, chunk, k, aligned), inverse));
    }
}

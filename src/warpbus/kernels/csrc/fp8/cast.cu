// A matrix rounded to 8-bit floating-point numbers with one scale, by rows and by columns.
//
//   fp8_scale: scale = max(largest |x|, 1e-12) / LARGEST; NaN where x has NaN
//   fp8_cast:  codes [m, n] = x [m, n] / scale, and transposed [n, padded] = codes.T with zeros beyond m
//
// Macros
//   ELEMENT  of x: float, __half or __nv_bfloat16
//   E4M3     1: codes are e4m3, LARGEST = 448; 0: they are e5m2, LARGEST = 57344 (both sm_89)
//
// x is contiguous and begins at a multiple of 16 bytes. Any m >= 1, n a multiple of 16, padded = m rounded up to a
// multiple of 16. transposed is null where it is not wanted. Codes are rounded to nearest even after a product with
// 1 / scale, in float32. NaN and infinity give codes of NaN: infinity is multiplied with 1 / infinity = 0.
#include "common/numeric.cuh"
#include "common/ptx.cuh"

constexpr int kBlock = 256;
constexpr int kWarps = kBlock / 32;
constexpr float kLargest = E4M3 ? 448.0f : 57344.0f;
constexpr float kSmallest = 1e-12f;  // a largest magnitude below is taken for this: zeros have a scale too

// The previous kernels may write x and the scale: no __restrict__ (see ptx::griddepcontrol_wait).
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
}

// ---- The scale ----

// The largest magnitudes so far, as bits: without its sign a float is ordered as an integer is, with infinity above all
// numbers and NaN above infinity. Of 16-bit elements both halves have their own.
__device__ __forceinline__ unsigned int larger(unsigned int best, uint4 chunk) {
    if constexpr (sizeof(ELEMENT) == 4) {
        constexpr unsigned int kMagnitude = 0x7fffffff;
        best = max(best, max(chunk.x & kMagnitude, chunk.y & kMagnitude));
        return max(best, max(chunk.z & kMagnitude, chunk.w & kMagnitude));
    } else {
        constexpr unsigned int kMagnitudes = 0x7fff7fff;
        best = __vmaxu2(best, __vmaxu2(chunk.x & kMagnitudes, chunk.y & kMagnitudes));
        return __vmaxu2(best, __vmaxu2(chunk.z & kMagnitudes, chunk.w & kMagnitudes));
    }
}

// The number that has these bits.
template <typename T>
__device__ __forceinline__ float as_float(unsigned int bits) {
    if constexpr (sizeof(T) == 4) {
        return __uint_as_float(bits);
    } else {
        return unpack_pair<T>(bits).x;
    }
}

// `chunks` of 16 bytes. Blocks meet in counters[1]; counters[0] tells which comes last. Both are zero, and left at zero.
// A maximum is the same in any order.
extern "C" __global__ void __launch_bounds__(kBlock)
    fp8_scale(const uint4* x, float* __restrict__ scale, unsigned int* counters, long long chunks) {
    __shared__ unsigned int of_warp[kWarps];
    wait_for_earlier_kernels();
    const long long stride = static_cast<long long>(gridDim.x) * kBlock;
    long long i = static_cast<long long>(blockIdx.x) * kBlock + threadIdx.x;
    unsigned int best = 0;
    for (; i + 3 * stride < chunks; i += 4 * stride) {
        const uint4 loaded[4] = {x[i], x[i + stride], x[i + 2 * stride], x[i + 3 * stride]};
#pragma unroll
        for (int j = 0; j < 4; ++j) best = larger(best, loaded[j]);
    }
    for (; i < chunks; i += stride) best = larger(best, x[i]);

    if constexpr (sizeof(ELEMENT) == 2) best = max(best & 0xffff, best >> 16);
    best = __reduce_max_sync(0xffffffff, best);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) best = max(best, of_warp[warp]);
    atomicMax(counters + 1, best);
    __threadfence();
    if (atomicInc(counters, gridDim.x - 1) != gridDim.x - 1) return;  // the last block's sets it to zero
    __threadfence();
    best = atomicExch(counters + 1, 0);
    const float amax = as_float<ELEMENT>(best);
    *scale = (amax < kSmallest ? kSmallest : amax) / kLargest;  // the comparison lets NaN through
}

// ---- The codes ----

// A block takes a tile of 128 x 128, a warp 16 rows of it, a lane four columns: each row of a warp is one load of 256 or
// 512 bytes and one store of 128, all of them contiguous.
constexpr int kTile = 128;
constexpr int kRows = kTile / kWarps;  // of a warp
constexpr int kAtOnce = 8;             // rows that are loaded before any is rounded
constexpr int kChunks = kTile / 16;    // of 16 bytes in a column of the tile

// Four elements, which are not read again: they leave L2 first, which has room for the codes then.
__device__ __forceinline__ float4 load_four(const float* x) { return __ldcs(reinterpret_cast<const float4*>(x)); }
template <typename Half>
__device__ __forceinline__ float4 load_four(const Half* x) {
    const uint2 pairs = __ldcs(reinterpret_cast<const uint2*>(x));
    const float2 low = unpack_pair<Half>(pairs.x), high = unpack_pair<Half>(pairs.y);
    return {low.x, low.y, high.x, high.y};
}

// Their codes; the first lies first in memory.
__device__ __forceinline__ unsigned int round_four(float4 value, float inverse) {
#if E4M3
    const unsigned int low = ptx::pack_e4m3(value.x * inverse, value.y * inverse);
    const unsigned int high = ptx::pack_e4m3(value.z * inverse, value.w * inverse);
#else
    const unsigned int low = ptx::pack_e5m2(value.x * inverse, value.y * inverse);
    const unsigned int high = ptx::pack_e5m2(value.z * inverse, value.w * inverse);
#endif
    return low | high << 16;
}

// Four rows of four bytes become four columns of four.
__device__ __forceinline__ void turn(const unsigned int (&rows)[4], unsigned int (&columns)[4]) {
    const unsigned int low[2] = {__byte_perm(rows[0], rows[1], 0x5140), __byte_perm(rows[2], rows[3], 0x5140)};
    const unsigned int high[2] = {__byte_perm(rows[0], rows[1], 0x7362), __byte_perm(rows[2], rows[3], 0x7362)};
    columns[0] = __byte_perm(low[0], low[1], 0x5410);
    columns[1] = __byte_perm(low[0], low[1], 0x7632);
    columns[2] = __byte_perm(high[0], high[1], 0x5410);
    columns[3] = __byte_perm(high[0], high[1], 0x7632);
}

// Where a chunk of a column of the tile lies. Eight lanes that write one chunk of their columns, four columns apart, and
// eight that read the chunks of one column, find all banks of shared memory.
__device__ __forceinline__ int place(int column, int chunk) { return column * kChunks + (chunk ^ column / 4 % kChunks); }

extern "C" __global__ void __launch_bounds__(kBlock, 3)
    fp8_cast(const ELEMENT* x, const float* scale, unsigned char* __restrict__ codes,
             unsigned char* __restrict__ transposed, int m, int n, int padded) {
    __shared__ uint4 turned[kTile * kChunks];
    wait_for_earlier_kernels();
    // From the end of the matrix: it is what fp8_scale read last, and L2 may still have.
    const int tile = gridDim.x - 1 - blockIdx.x, tiles_of_row = (n + kTile - 1) / kTile;
    const int tile_row = tile / tiles_of_row * kTile, tile_column = tile % tiles_of_row * kTile;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = tile_row + warp * kRows, column = tile_column + 4 * lane;
    const int rows = column < n ? min(kRows, m - row) : 0;  // that this thread has; none where it is negative
    const long long begin = static_cast<long long>(row) * n + column;
    const float inverse = 1.0f / *scale;

    unsigned int columns[4][kRows / 4];  // four rows in each word
#pragma unroll
    for (int first = 0; first < kRows; first += kAtOnce) {
        float4 loaded[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (first + i < rows) loaded[i] = load_four(x + begin + static_cast<long long>(first + i) * n);
        }
#pragma unroll
        for (int group = 0; group < kAtOnce; group += 4) {
            unsigned int words[4], of_columns[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = first + group + i;
                words[i] = 0;  // beyond m there are zeros, whatever the scale is
                if (at < rows) {
                    words[i] = round_four(loaded[group + i], inverse);
                    *reinterpret_cast<unsigned int*>(codes + begin + static_cast<long long>(at) * n) = words[i];
                }
            }
            turn(words, of_columns);
#pragma unroll
            for (int j = 0; j < 4; ++j) columns[j][(first + group) / 4] = of_columns[j];
        }
    }
    if (transposed == nullptr) return;

#pragma unroll
    for (int j = 0; j < 4; ++j) {
        turned[place(4 * lane + j, warp)] = make_uint4(columns[j][0], columns[j][1], columns[j][2], columns[j][3]);
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < kTile * kChunks; i += kBlock) {
        const int of_tile = i / kChunks, chunk = i % kChunks, target = tile_row + 16 * chunk;
        if (tile_column + of_tile >= n || target >= padded) continue;
        *reinterpret_cast<uint4*>(transposed + static_cast<long long>(tile_column + of_tile) * padded + target) =
            turned[place(of_tile, chunk)];
    }
}

// What the loops over the columns of a block share: rounding to a grid, and sums over the columns that came before.
//
// A thread has one row of the matrix and goes through at most 128 columns in tiles of 16. What the columns of earlier
// tiles contribute to a tile is summed in registers from a history in shared memory, which only the thread itself reads;
// the coefficients are the same for all rows and lie in shared memory as tiles, read four at a time by all lanes alike.
// What a row becomes depends on no other row, on no other part and not on the size of the thread block.
#pragma once
#include "common/ptx.cuh"

constexpr int kTile = 16;         // columns whose sums a thread holds in registers
constexpr int kMaxThreads = 128;  // of a block: as many rows
constexpr float kNoFraction = 12582912.0f;  // 1.5 * 2^23: floats of this size have no fraction

// Where tile t of the corner begins: tile i has the 16 (i + 1) rows of the corner down to the diagonal, 16 columns wide.
__device__ __forceinline__ int tile_offset(int t) { return kTile * kTile * t * (t + 1) / 2; }

// The place of a thread: its part, which is that of its whole block, and its row there. A thread beyond the last row
// computes the last one again and stores nothing.
struct Place {
    long long part;
    unsigned int row;
    bool live;

    __device__ __forceinline__ explicit Place(int rows) {
        const unsigned int blocks = (rows + blockDim.x - 1) / blockDim.x;  // of a part
        const unsigned int index = blockIdx.x % blocks * blockDim.x + threadIdx.x;
        part = blockIdx.x / blocks;
        row = min(index, static_cast<unsigned int>(rows) - 1);
        live = index < static_cast<unsigned int>(rows);
    }
};

// A divisor with its reciprocal. `divide` is the IEEE quotient, as a / b has it, with two exceptions: it may be off by one
// unit in the last place if all bits of the divisor's mantissa are ones, which a scale of 16 bits never has; and it may be
// anything, NaN too, if the divisor, its reciprocal or the remainder leave the range of normal numbers. With the reciprocal
// at hand it has a fraction of the latency of a / b, of which the loops are made.
struct Divisor {
    float value, reciprocal;

    __device__ __forceinline__ explicit Divisor(float divisor) : value(divisor) {
        const float rough = ptx::reciprocal(divisor);
        reciprocal = fmaf(rough, fmaf(-divisor, rough, 1.0f), rough);
    }

    __device__ __forceinline__ float divide(float x) const {
        float quotient = __fmul_rn(x, reciprocal);
        quotient = fmaf(fmaf(-value, quotient, x), reciprocal, quotient);
        return fmaf(fmaf(-value, quotient, x), reciprocal, quotient);
    }
};

// Half to even, below 2^22; what is larger stays about as large.
__device__ __forceinline__ float round_even(float x) { return __fsub_rn(__fadd_rn(x, kNoFraction), kNoFraction); }

// The code nearest to x / scale + zero, less zero. NaN gives code 0.
__device__ __forceinline__ float nearest_centred(float x, const Divisor& scale, float zero, float max_code) {
    return fminf(fmaxf(round_even(scale.divide(x)), 0.0f - zero), max_code - zero);
}

// Begin to copy tiles `first` to `last` - 1 of the corner, `columns` x `columns` with rows `stride` apart, to shared
// memory; what lies beyond the corner is zero. `vector`: its rows begin at multiples of 16 bytes. The caller commits,
// waits and synchronizes.
__device__ __forceinline__ void load_corner(float* tiles, const float* corner, long long stride, int columns, int first,
                                            int last, bool vector) {
    for (int t = first; t < last; ++t) {
        float* tile = tiles + tile_offset(t);
        for (int i = threadIdx.x; i < (t + 1) * kTile * kTile / 4; i += blockDim.x) {
            const int row = i / (kTile / 4);
            const int column = t * kTile + i % (kTile / 4) * 4;
            const int valid = row < columns ? min(max(columns - column, 0), 4) : 0;
            const float* from = corner + (valid > 0 ? row * stride + column : 0);
            if (vector) {
                ptx::cp_async_16(ptx::shared_address(tile + 4 * i), from, 4 * valid);
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) tile[4 * i + e] = e < valid ? from[e] : 0.0f;
            }
        }
    }
}

// Begin to copy the whole corner; `wait_corner` before a tile is used.
__device__ __forceinline__ void begin_corner(float* tiles, const float* corner, long long stride, int columns,
                                             bool vector) {
    load_corner(tiles, corner, stride, columns, 0, 1, vector);
    ptx::cp_async_commit();
    load_corner(tiles, corner, stride, columns, 1, (columns + kTile - 1) / kTile, vector);
    ptx::cp_async_commit();
}

// Tile t is there. All threads call it, for t = 0, 1, ...
__device__ __forceinline__ void wait_corner(int t) {
    if (t == 0) {
        ptx::cp_async_wait<1>();
        __syncthreads();
    } else if (t == 1) {
        ptx::cp_async_wait<0>();
        __syncthreads();
    }
}

// Row `row` of a tile in shared memory.
__device__ __forceinline__ void load_row(float (&values)[kTile], const float* tile, int row) {
    const float4* quads = reinterpret_cast<const float4*>(tile) + row * (kTile / 4);
#pragma unroll
    for (int q = 0; q < kTile / 4; ++q) {
        const float4 quad = quads[q];
        values[4 * q] = quad.x;
        values[4 * q + 1] = quad.y;
        values[4 * q + 2] = quad.z;
        values[4 * q + 3] = quad.w;
    }
}

// sum[i] = sum over k < `count` of tile[k][i] * history[k], k rising; `count` is a multiple of 16.
__device__ __forceinline__ void sum_history(float (&sum)[kTile], const float* tile, const float* history, int count) {
#pragma unroll
    for (int i = 0; i < kTile; ++i) sum[i] = 0.0f;
#pragma unroll 4
    for (int k = 0; k < count; ++k) {
        const float before = history[k * blockDim.x];
        float coefficient[kTile];
        load_row(coefficient, tile, k);
#pragma unroll
        for (int i = 0; i < kTile; ++i) sum[i] = fmaf(coefficient[i], before, sum[i]);
    }
}

// Append a tile to the history.
__device__ __forceinline__ void remember(float* history, int t, const float (&values)[kTile]) {
#pragma unroll
    for (int i = 0; i < kTile; ++i) history[(t * kTile + i) * blockDim.x] = values[i];
}

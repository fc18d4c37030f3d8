// What the loops over the columns of a block share: who has which rows and columns, and sums over the columns before.
//
// Four lanes share a row of the matrix and go through at most 128 columns in tiles of 16. Each lane owns four columns
// of a tile: it loads them, keeps what all columns before them add up to, and stores them. What is sequential, within a
// tile, all four lanes do alike, with what they own handed around by shuffles; then each carries the tile's results over
// to its own columns in all later tiles. The coefficients are the same for all rows and lie in shared memory as tiles.
// What a row becomes depends on no other row, on no other part and not on the size of the grid.
//
// Why so: with few rows latency is all that counts. One thread a row would go through 8 K products by itself; here a lane
// has a quarter of those between tiles, in 28 sums that do not wait for each other. kRows of 2 would halve the reads from
// shared memory for as many instructions, but twice as many of them would stand in the one warp of a scheduler.
//
// Shared memory has no bank conflicts: either all lanes read the same 16 bytes, or the four lanes of a row read the 64
// contiguous bytes of a tile's row, the same ones for all rows.
#pragma once
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "gptq/rounding.cuh"

constexpr int kTile = 16;             // columns of a tile
constexpr int kTiles = 8;             // at most
constexpr int kLanes = 4;             // that share rows
constexpr int kOwn = kTile / kLanes;  // columns of a tile that a lane owns
constexpr int kApart = 32 / kLanes;   // lanes with other rows, and so how far a lane's rows are apart
constexpr int kRows = 1;              // of a lane
constexpr int kBlockRows = 32;
constexpr int kThreads = kBlockRows * kLanes / kRows;

// Where tile t of the corner begins: tile i has the 16 (i + 1) rows of the corner down to the diagonal, 16 columns wide.
__device__ __forceinline__ int tile_offset(int t) { return kTile * kTile * t * (t + 1) / 2; }

// The place of a thread: its part, which is that of its whole block, the matrix that the part belongs to, its rows there,
// and which columns of a tile it owns. A matrix has `matrix_parts` parts, one after the other.
// A row beyond the last one is the last one again, and nothing of it is stored.
struct Place {
    long long part;
    long long matrix;
    int lane;  // of the four
    unsigned int row[kRows];
    bool live[kRows];

    __device__ __forceinline__ Place(int rows, int matrix_parts) {
        const unsigned int blocks = (rows + kBlockRows - 1) / kBlockRows;  // of a part
        part = blockIdx.x / blocks;
        matrix = blockIdx.x / blocks / matrix_parts;
        lane = threadIdx.x % 32 / kApart;
        const unsigned int warp = threadIdx.x / 32;
        const unsigned int first = blockIdx.x % blocks * kBlockRows + warp * (kApart * kRows) + threadIdx.x % kApart;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const unsigned int index = first + r * kApart;
            live[r] = index < static_cast<unsigned int>(rows);
            row[r] = min(index, static_cast<unsigned int>(rows) - 1);
        }
    }
};

// Where what is carried over to other columns goes, [parts][columns][rows] in the format of the products that carry it.
struct Carried {
    void* values;
    long long part;  // elements from one to the next
    int column;      // alike
    int is_narrow;   // 0: float, 1: bfloat16

    __device__ __forceinline__ void store(long long own_part, long long own_column, unsigned int row, float x) const {
        const long long place = own_part * part + own_column * column + row;
        if (is_narrow) {
            static_cast<__nv_bfloat16*>(values)[place] = from_float<__nv_bfloat16>(x);
        } else {
            static_cast<float*>(values)[place] = x;
        }
    }
};

// What lane `owner` of the four has.
__device__ __forceinline__ float of_lane(float value, int owner) {
    return __shfl_sync(0xffffffffu, value, static_cast<int>(threadIdx.x % kApart) + owner * kApart);
}

// That of lane `owner` of the four.
__device__ __forceinline__ Divisor of_lane(const Divisor& divisor, int owner) {
    Divisor other;
    other.value = of_lane(divisor.value, owner);
    other.reciprocal = of_lane(divisor.reciprocal, owner);
    return other;
}

// Begin to copy four floats to shared memory, the first `valid` of them from global memory and zeros for the others.
// `vector`: both are at multiples of 16 bytes. The caller commits, waits and synchronizes.
__device__ __forceinline__ void begin_quad(float* to, const float* from, int valid, bool vector) {
    if (vector) {
        ptx::cp_async_16(ptx::shared_address(to), from, 4 * valid);
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] = e < valid ? from[e] : 0.0f;
    }
}

// Begin to copy tiles `first` to `last` - 1 of the corner, `columns` x `columns` with rows `stride` apart, to shared
// memory, as one group; what lies beyond the corner is zero. `vector`: its rows begin at multiples of 16 bytes.
__device__ __forceinline__ void begin_corner(float* tiles, const float* corner, long long stride, int columns, int first,
                                            int last, bool vector) {
    for (int t = first; t < last; ++t) {
        float* tile = tiles + tile_offset(t);
        for (int i = threadIdx.x; i < (t + 1) * kTile * kTile / 4; i += kThreads) {
            const int row = i / (kTile / 4);
            const int column = t * kTile + i % (kTile / 4) * 4;
            const int valid = row < columns ? min(max(columns - column, 0), 4) : 0;
            begin_quad(tile + 4 * i, corner + (valid > 0 ? row * stride + column : 0), valid, vector);
        }
    }
    ptx::cp_async_commit();
}

// All but the newest `Pending` groups are there, for all threads.
template <int Pending>
__device__ __forceinline__ void wait_corner() {
    ptx::cp_async_wait<Pending>();
    __syncthreads();
}

// The group of each column, in shared memory: a load that others wait for is made once. Synchronizes.
__device__ __forceinline__ void load_groups(int* own, const int* groups, int columns) {
    for (int i = threadIdx.x; i < kTile * kTiles; i += kThreads) own[i] = groups[min(i, columns - 1)];
    __syncthreads();
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

// For the columns that a lane owns in tile t and the ones after it: the sum over all columns k before tile t, rising, of
// corner[k] times the result of column k, each product added with one rounding.
struct Sums {
    float of[kTiles][kRows][kOwn];

    __device__ __forceinline__ Sums() {
#pragma unroll
        for (int i = 0; i < kTiles * kRows * kOwn; ++i) (&of[0][0][0])[i] = 0.0f;
    }

    // Add tile t of `count` with the results `values` to all later ones, of which the next becomes the first.
    __device__ __forceinline__ void carry_over(const float* tiles, int t, int count, int lane,
                                               const float (&values)[kRows][kTile]) {
#pragma unroll
        for (int d = 1; d < kTiles; ++d) {
            if (t + d < count) {
                const float* rows = tiles + tile_offset(t + d) + t * kTile * kTile + lane * kOwn;
#pragma unroll
                for (int k = 0; k < kTile; ++k) {
                    const float4 quad = *reinterpret_cast<const float4*>(rows + k * kTile);
#pragma unroll
                    for (int r = 0; r < kRows; ++r) {
                        of[d][r][0] = fmaf(quad.x, values[r][k], of[d][r][0]);
                        of[d][r][1] = fmaf(quad.y, values[r][k], of[d][r][1]);
                        of[d][r][2] = fmaf(quad.z, values[r][k], of[d][r][2]);
                        of[d][r][3] = fmaf(quad.w, values[r][k], of[d][r][3]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
#pragma unroll
                for (int e = 0; e < kOwn; ++e) of[d - 1][r][e] = of[d][r][e];
            }
        }
    }
};

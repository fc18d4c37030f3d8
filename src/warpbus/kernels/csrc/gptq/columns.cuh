// Shared by the kernels that loop over the columns of a block: the assignment of rows and columns to threads, and the sums
// over earlier columns.
//
// Four lanes share a row of the matrix and process at most 128 columns in tiles of 16. Each lane owns four columns of a tile:
// it loads them, accumulates the contributions of all earlier columns, and stores them. The sequential part, within a tile,
// is computed by all four lanes redundantly, with each lane's columns broadcast by shuffles. Then each lane adds the tile's
// results to its own columns of all later tiles. The coefficients are the same for all rows and are in shared memory, tile by
// tile. The result of a row depends neither on other rows, nor on other parts, nor on the size of the grid.
//
// Reason: with few rows only latency counts. With one thread per row, a thread would compute 8 K dependent products; here a
// lane has a quarter of those between tiles, in 28 independent sums. kRows = 2 would halve the reads from shared memory for
// the same number of instructions, but would put twice as many of them into the single warp of a scheduler.
//
// Shared memory has no bank conflicts: either all lanes read the same 16 bytes, or the four lanes of a row read the 64
// contiguous bytes of a tile's row, the same ones for all rows.
// contiguous bytes of a tile's row, the same ones for all rows.
#pragma once
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "gptq/rounding.cuh"

constexpr int kTile = 16;             // columns per tile
constexpr int kTiles = 8;             // at most
constexpr int kLanes = 4;             // lanes that share rows
constexpr int kOwn = kTile / kLanes;  // columns of a tile per lane
constexpr int kApart = 32 / kLanes;   // groups of lanes with different rows, and the distance of a lane's rows
constexpr int kRows = 1;              // per lane
constexpr int kBlockRows = 32;
constexpr int kThreads = kBlockRows * kLanes / kRows;

// The offset of tile t of the corner: tile i has the 16 (i + 1) rows of the corner down to the diagonal, 16 columns wide.
__device__ __forceinline__ int tile_offset(int t) { return kTile * kTile * t * (t + 1) / 2; }

// A thread's position: the part, the same for the whole block; the matrix that the part belongs to; the thread's rows; and
// the columns of a tile that it owns. A matrix has `matrix_parts` consecutive parts. Beyond the last row, a thread computes
// the last row again, and the results are not stored.
struct Place {
    long long part;
    long long matrix;
    int lane;  // 0 to 3, of the four that share rows
    unsigned int row[kRows];
    bool live[kRows];

    __device__ __forceinline__ Place(int rows, int matrix_parts) {
        const unsigned int blocks = (rows + kBlockRows - 1) / kBlockRows;  // per part
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

// The buffer for results that later columns need, [parts][columns][rows] in the format of the matrix product that uses them.
struct Carried {
    void* values;
    long long part;  // elements between parts
    int column;      // elements between columns
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

// The value of lane `owner` of the four.
__device__ __forceinline__ float of_lane(float value, int owner) {
    return __shfl_sync(0xffffffffu, value, static_cast<int>(threadIdx.x % kApart) + owner * kApart);
}

// The divisor of lane `owner` of the four.
__device__ __forceinline__ Divisor of_lane(const Divisor& divisor, int owner) {
    Divisor other;
    other.value = of_lane(divisor.value, owner);
    other.reciprocal = of_lane(divisor.reciprocal, owner);
    return other;
}

// Starts copying four floats to shared memory: the first `valid` from global memory, zeros for the others. `vector`: both are
// multiples of 16 bytes. The caller commits, waits and synchronizes.
__device__ __forceinline__ void begin_quad(float* to, const float* from, int valid, bool vector) {
    if (vector) {
        ptx::cp_async_16(ptx::shared_address(to), from, 4 * valid);
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] = e < valid ? from[e] : 0.0f;
    }
}

// Starts copying tiles `first` to `last` - 1 of the corner, `columns` x `columns` with rows `stride` apart, to shared memory,
// as one group, with zeros beyond the corner. `vector`: its rows start at multiples of 16 bytes.
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

// Waits until all but the newest `Pending` groups are complete, for all threads.
template <int Pending>
__device__ __forceinline__ void wait_corner() {
    ptx::cp_async_wait<Pending>();
    __syncthreads();
}

// Loads the group of each column into shared memory, so that this latency is paid once. Synchronizes.
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

// For the columns that a lane owns in tile t and later tiles: the sum over all columns k before tile t, in ascending order,
// of corner[k] times the result of column k, each product added with one rounding.
struct Sums {
    float of[kTiles][kRows][kOwn];

    __device__ __forceinline__ Sums() {
#pragma unroll
        for (int i = 0; i < kTiles * kRows * kOwn; ++i) (&of[0][0][0])[i] = 0.0f;
    }

    // Adds the results `values` of tile t of `count` to all later tiles; the next tile becomes the first.
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

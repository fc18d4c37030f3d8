// out = a b on the tensor cores through nvcuda::wmma, the interface that CUDA C++ offers for them.
//
// Shapes and layout: a [m, k], b [k, n], out [m, n], all row-major and contiguous; any m, n, k >= 1. ELEMENT = __half or
// __nv_bfloat16, summed in float32. `aligned` says that all rows of a and b begin at multiples of 16 bytes (k and n are
// multiples of 8 and so are the pointers): tiles are then read 16 bytes a load, otherwise element by element.
//
// A block of 8 warps computes 128 x 128 elements, 32 of k at a time through shared memory; a warp owns 64 x 32 of them, which
// are 4 x 2 fragments of 16 x 16. What lies outside the matrices is filled with zeros. A fragment's layout is the compiler's
// secret: to convert and to guard the edges, each warp passes its fragments through a patch of shared memory.
#include <mma.h>

#include "common/numeric.cuh"

namespace wmma = nvcuda::wmma;

constexpr int kTileM = 128, kTileN = 128, kTileK = 32;
constexpr int kWarpM = 64, kWarpN = 32;
constexpr int kFragment = 16;
constexpr int kThreads = 256;
constexpr int kVector = Vector16<ELEMENT>::kSize;

// Rows a little longer than the tile: 8 rows at one column then lie in different banks. wmma wants rows that are multiples
// of 16 bytes, and fragments that begin at multiples of 32.
constexpr int kPitchA = kTileK + 8;
constexpr int kPitchB = kTileN + 8;
constexpr int kPitchPatch = kFragment + 4;

// Copies the tile at (row0, column0) of a [rows, columns] matrix, zeros where there is none.
template <int Rows, int Columns, int Pitch>
__device__ __forceinline__ void load_tile(
    const ELEMENT* __restrict__ matrix, long long rows, long long columns, long long row0, long long column0,
    bool aligned, ELEMENT* tile) {
    constexpr int kVectorsInRow = Columns / kVector;
#pragma unroll
    for (int i = threadIdx.x; i < Rows * kVectorsInRow; i += kThreads) {
        const int r = i / kVectorsInRow;
        const int c = i % kVectorsInRow * kVector;
        const long long row = row0 + r;
        const long long column = column0 + c;
        const ELEMENT* source = matrix + row * columns + column;
        Vector16<ELEMENT> vector;
        if (aligned && row < rows && column < columns) {
            vector = *reinterpret_cast<const Vector16<ELEMENT>*>(source);
        } else {
#pragma unroll
            for (int lane = 0; lane < kVector; ++lane) {
                const bool inside = row < rows && column + lane < columns;
                vector.element[lane] = inside ? source[lane] : from_float<ELEMENT>(0.0f);
            }
        }
        *reinterpret_cast<Vector16<ELEMENT>*>(tile + r * Pitch + c) = vector;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) matmul_wmma(
    const ELEMENT* __restrict__ a, const ELEMENT* __restrict__ b, ELEMENT* __restrict__ out, long long m, long long n,
    long long k, int aligned) {
    __shared__ alignas(32) ELEMENT a_tile[kTileM * kPitchA];
    __shared__ alignas(32) ELEMENT b_tile[kTileK * kPitchB];
    __shared__ alignas(32) float patches[kThreads / 32][kFragment * kPitchPatch];

    const int tiles_in_row = static_cast<int>((n + kTileN - 1) / kTileN);
    const long long row0 = static_cast<long long>(blockIdx.x / tiles_in_row) * kTileM;
    const long long column0 = static_cast<long long>(blockIdx.x % tiles_in_row) * kTileN;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int warp_row = warp / (kTileN / kWarpN) * kWarpM;
    const int warp_column = warp % (kTileN / kWarpN) * kWarpN;

    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[kWarpM / kFragment][kWarpN / kFragment];
    for (auto& row : sums) {
        for (auto& sum : row) wmma::fill_fragment(sum, 0.0f);
    }

    for (long long k0 = 0; k0 < k; k0 += kTileK) {
        load_tile<kTileM, kTileK, kPitchA>(a, m, k, row0, k0, aligned, a_tile);
        load_tile<kTileK, kTileN, kPitchB>(b, k, n, k0, column0, aligned, b_tile);
        __syncthreads();  // both tiles are complete
#pragma unroll
        for (int step = 0; step < kTileK; step += kFragment) {
            wmma::fragment<wmma::matrix_b, 16, 16, 16, ELEMENT, wmma::row_major> right[kWarpN / kFragment];
#pragma unroll
            for (int j = 0; j < kWarpN / kFragment; ++j) {
                wmma::load_matrix_sync(right[j], b_tile + step * kPitchB + warp_column + j * kFragment, kPitchB);
            }
#pragma unroll
            for (int i = 0; i < kWarpM / kFragment; ++i) {
                wmma::fragment<wmma::matrix_a, 16, 16, 16, ELEMENT, wmma::row_major> left;
                wmma::load_matrix_sync(left, a_tile + (warp_row + i * kFragment) * kPitchA + step, kPitchA);
#pragma unroll
                for (int j = 0; j < kWarpN / kFragment; ++j) wmma::mma_sync(sums[i][j], left, right[j], sums[i][j]);
            }
        }
        __syncthreads();  // nobody still reads what the next round overwrites
    }

    float* patch = patches[warp];
#pragma unroll
    for (int i = 0; i < kWarpM / kFragment; ++i) {
#pragma unroll
        for (int j = 0; j < kWarpN / kFragment; ++j) {
            wmma::store_matrix_sync(patch, sums[i][j], kPitchPatch, wmma::mem_row_major);
            __syncwarp();  // the other lanes' part of the fragment has arrived
            for (int e = lane; e < kFragment * kFragment; e += 32) {
                const long long row = row0 + warp_row + i * kFragment + e / kFragment;
                const long long column = column0 + warp_column + j * kFragment + e % kFragment;
                const float sum = patch[e / kFragment * kPitchPatch + e % kFragment];
                if (row < m && column < n) out[row * n + column] = from_float<ELEMENT>(sum);
            }
            __syncwarp();  // read before the next fragment overwrites it
        }
    }
}

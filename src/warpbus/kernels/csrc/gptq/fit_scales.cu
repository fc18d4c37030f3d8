// The scales of one group at their least-squares optimum, where that helps after it is rounded to the dtype of scales.
//
// For each row of each part, with c the `size` numbers of centred in the columns `members`, and g those of gradient:
//   slope = c . g;  curvature = c . corner c
//   change = stored(scale + slope / max(curvature, the least normal float)) - scale
//   change = 0 unless change (change curvature - 2 slope) < 0, scale + change != 0, and change is finite
//   scales += change;  changes[j] = c[j] * change
//
// Shapes and layout
//   gradient            float [parts][size][rows], the rows contiguous
//   centred             float [parts][columns][rows], the rows contiguous
//   members             long long [matrices][size], 1 to 128 of the columns
//   corner              float [matrices][size][size], symmetric, rows corner_row apart
//   scales              float [parts][rows]; written
//   changes             float or bfloat16 [parts][size][rows], the rows contiguous
//   scale_dtype         a number of scale_dtype.cuh
//   matrix_parts        parts of each matrix, which follow one another
//   vector              1: rows of the corner begin at multiples of 16 bytes
// 128 threads per block, and as many blocks for each part as its rows take, 32 a block. Dynamic shared memory, with `size`
// rounded up to W, a multiple of 32: W W floats for the corner, 32 W for c and 256 for the sums of the warps.
//
// corner c is a matrix product: a warp has 32 of its columns and all 32 rows, a thread 8 columns and 4 rows in registers,
// which takes 32 products for each 3 quads from shared memory. The sums over k run in order; those over the columns j add
// the 8 of a thread in order, then those of the thread 8 and of the threads 16 lanes away, then warps 0 + 1 and 2 + 3, each
// pair before both. The slope is summed by warps: warp w has columns w, w + 4, ... in order. None of this depends on how
// many rows there are.
//
// An estimate for 128 columns: 128 steps of 12 quads in the four warps, each 4 cycles of the shared memory, are 6 K
// cycles, after about 2 K until the columns are there: 5 us while the blocks are no more than the multiprocessors.
//
// No bank conflicts: 8 lanes read the 128 contiguous bytes of a row of c, and the others the same; of a row of the corner
// a warp reads four quads 32 bytes apart, in different banks; c is written with the rows along the lanes.
#include "gptq/columns.cuh"
#include "gptq/scale_dtype.cuh"

namespace {

constexpr float kTiny = 1.17549435e-38f;  // the least normal float
constexpr int kFitThreads = 128;
constexpr int kWarps = kFitThreads / 32;
constexpr int kFitRows = 32;                          // of a block
constexpr int kSpan = 32;                             // what columns are rounded up to
constexpr int kSpans = kFitThreads / kSpan;           // at most, as many columns as threads
constexpr int kLoads = kSpan / kWarps;                // columns of a span that a warp loads
constexpr int kThreadColumns = 8, kThreadRows = 4;    // of a thread, in the product

__device__ __forceinline__ void load_quad(float (&values)[4], const float* from) {
    const float4 quad = *reinterpret_cast<const float4*>(from);
    values[0] = quad.x, values[1] = quad.y, values[2] = quad.z, values[3] = quad.w;
}

// sums[r] = c . corner c over this thread's columns of the corner, from `column` on, for its rows from `row` on.
__device__ __forceinline__ void curvatures(float (&sums)[kThreadRows], const float* corner, const float* codes,
                                           int width, int column, int row) {
    float products[kThreadRows][kThreadColumns] = {};
    for (int first = 0; first < width; first += 4) {
#pragma unroll
        for (int k = first; k < first + 4; ++k) {
            float own[kThreadRows], left[4], right[4];
            load_quad(own, codes + k * kFitRows + row);
            load_quad(left, corner + k * width + column);
            load_quad(right, corner + k * width + column + 4);
#pragma unroll
            for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
                for (int i = 0; i < kThreadColumns; ++i) {
                    products[r][i] = fmaf(i < 4 ? left[i % 4] : right[i % 4], own[r], products[r][i]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kThreadColumns; ++i) {
        float own[kThreadRows];
        load_quad(own, codes + (column + i) * kFitRows + row);
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) sums[r] = fmaf(own[r], products[r][i], sums[r]);
    }
}

// The four warps' sums of a row.
__device__ __forceinline__ float total(const float* sums, int row) {
    return (sums[row] + sums[kFitRows + row]) + (sums[2 * kFitRows + row] + sums[3 * kFitRows + row]);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kFitThreads)
    fit_scales(const float* __restrict__ gradient, const float* __restrict__ centred,
               const long long* __restrict__ members, const float* __restrict__ corner, float* __restrict__ scales,
               void* __restrict__ changes, long long gradient_part, long long gradient_column, long long centred_part,
               long long centred_column, long long corner_matrix, long long corner_row, long long scales_part,
               long long changes_part, int changes_column, int changes_are_narrow, int size, int rows, int scale_dtype,
               long long members_matrix, int matrix_parts, int vector) {
    extern __shared__ float4 storage[];
    __shared__ int own_members[kFitThreads];  // what other loads wait for
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int width = (size + kSpan - 1) / kSpan * kSpan;
    float* own_corner = reinterpret_cast<float*>(storage);
    float* codes = own_corner + width * width;
    float* slopes = codes + width * kFitRows;
    float* sums = slopes + kWarps * kFitRows;

    // Here a lane has a row. One beyond the last is the last one again, and nothing of it is stored.
    const unsigned int blocks = (rows + kFitRows - 1) / kFitRows;  // of a part
    const long long part = blockIdx.x / blocks;
    const unsigned int index = blockIdx.x % blocks * kFitRows + lane;
    const bool live = index < static_cast<unsigned int>(rows);
    const unsigned int row = min(index, static_cast<unsigned int>(rows) - 1);
    const long long matrix = blockIdx.x / blocks / matrix_parts;
    const long long* listed = members + matrix * members_matrix;
    own_members[threadIdx.x] = static_cast<int>(listed[min(static_cast<int>(threadIdx.x), size - 1)]);
    __syncthreads();
    const float* own_gradient = gradient + part * gradient_part + row;
    const float* own_centred = centred + part * centred_part + row;
    float& stored = scales[part * scales_part + row];
    const float scale = stored;
    // All loads are in flight before the first one is waited for. Beyond the last member it is the last one again.
    float own[kSpans][kLoads], slopes_of[kSpans][kLoads];
#pragma unroll
    for (int s = 0; s < kSpans; ++s) {
        if (s * kSpan >= width) break;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int k = s * kSpan + i * kWarps + warp;
            own[s][i] = own_centred[own_members[k] * centred_column];
            slopes_of[s][i] = own_gradient[min(k, size - 1) * gradient_column];
        }
    }

    // A warp copies rows of the corner, a quad per lane; what lies beyond the corner is zero.
    for (int k = warp; k < width; k += kWarps) {
        const int valid = k < size ? min(max(size - 4 * lane, 0), 4) : 0;
        const float* from = corner + matrix * corner_matrix + (valid > 0 ? k * corner_row + 4 * lane : 0);
        if (4 * lane < width) begin_quad(own_corner + k * width + 4 * lane, from, valid, vector);
    }
    ptx::cp_async_commit();

    float slope = 0.0f;
#pragma unroll
    for (int s = 0; s < kSpans; ++s) {
        if (s * kSpan >= width) break;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int k = s * kSpan + i * kWarps + warp;
            if (k >= size) own[s][i] = slopes_of[s][i] = 0.0f;
            slope = fmaf(own[s][i], slopes_of[s][i], slope);
            codes[k * kFitRows + lane] = own[s][i];
        }
    }
    slopes[threadIdx.x] = slope;
    ptx::cp_async_wait<0>();
    __syncthreads();

    // In the product a thread has four rows.
    float curvature[kThreadRows] = {};
    if (warp * 32 < width) {
        const int first = warp * 32 + lane / 8 * kThreadColumns;
        curvatures(curvature, own_corner, codes, width, first, lane % 8 * kThreadRows);
    }
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
        curvature[r] += __shfl_xor_sync(0xffffffffu, curvature[r], 8);
        curvature[r] += __shfl_xor_sync(0xffffffffu, curvature[r], 16);
        if (lane < 8) sums[warp * kFitRows + lane * kThreadRows + r] = curvature[r];
    }
    __syncthreads();

    // All warps know the change of all rows, and each changes the columns that it loaded.
    slope = total(slopes, lane);
    const float bend = total(sums, lane);
    float change = as_stored(scale + slope / fmaxf(bend, kTiny), scale_dtype) - scale;
    const bool better = __fmul_rn(change, __fsub_rn(__fmul_rn(change, bend), 2.0f * slope)) < 0.0f;
    // Infinity and NaN are what differs from itself after subtraction.
    if (!better || scale + change == 0.0f || change - change != 0.0f) change = 0.0f;
    if (!live) return;
    if (warp == 0) stored = scale + change;
    const Carried carried{changes, changes_part, changes_column, changes_are_narrow};
#pragma unroll
    for (int s = 0; s < kSpans; ++s) {
        if (s * kSpan >= width) break;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int k = s * kSpan + i * kWarps + warp;
            if (k < size) carried.store(part, k, row, own[s][i] * change);
        }
    }
}

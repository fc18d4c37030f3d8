// The activations of wna8: codes [rows, k] and scales [rows] of x [rows, k], one scale per row, as w8a8/quantize.cu computes
// them, and sums of the codes.
//
// Macros
//   ELEMENT  of x: __half or __nv_bfloat16
//   E4M3     1: codes are e4m3 (sm_89), a scale is the row's largest magnitude / 448; 0: int8, / 127
//   COLUMNS  columns that are summed: 64 or 128; 0: none, and `sums` is not written (int8)
//
// Two things differ. The codes of each 16 columns are in the order in which sm80_wna8.cu and sm90_wna8.cu multiply them: for
// t = 0 to 3 the columns 2t, 2t+8, 2t+1, 2t+9. And sums [rows, stride] has the sum of each COLUMNS codes of a row times
// `factor`, rounded to tf32, for the zero points of the weight; `stride` >= ceil(k / COLUMNS).
//
// For a mixture of experts the rows are in the order of the experts: row i is row order[i] / per_token of x (moe/sort.cu), and
// where order[i] is negative nothing is written. Otherwise `order` is null.
//
// x is contiguous, rows start at multiples of 16 bytes, and k is a multiple of 16. Rows with NaN or infinity have a scale of
// NaN or infinity. One block per row, of up to kMostThreads threads, as many as keep the row in registers; the part of a row
// beyond 16384 elements is read again. The sum of COLUMNS codes is that of neighbouring lanes, in a fixed order.
#include "common/magnitude.cuh"
#include "common/numeric.cuh"
#include "common/ptx.cuh"

constexpr int kMostThreads = 256;
constexpr int kKept = 4;              // units of 16 columns that a thread keeps
constexpr float kLargest = E4M3 ? 448.0f : 127.0f;
constexpr float kSmallestNormal = 1.17549435e-38f;

// 16 columns of a row.
struct Unit {
    uint4 low, high;
};

// The codes of two columns, and the sum of their values added to `sum`.
__device__ __forceinline__ unsigned int round_pair(unsigned int pair, float inverse, [[maybe_unused]] float& sum) {
    const float2 value = unpack_pair<ELEMENT>(pair);
#if E4M3
    const unsigned int codes = ptx::pack_e4m3(value.x * inverse, value.y * inverse);
    const float2 rounded = ptx::unpack_e4m3(codes);
    sum += rounded.x + rounded.y;
    return codes;
#else
    return __byte_perm(ptx::round_s8(value.x * inverse), ptx::round_s8(value.y * inverse), 0x0040);
#endif
}

// The codes of columns 2t, 2t+8, 2t+1 and 2t+9, the first one first in memory.
__device__ __forceinline__ unsigned int round_four(unsigned int low, unsigned int high, float inverse, float& sum) {
    const unsigned int first = round_pair(low, inverse, sum);
    return __byte_perm(first, round_pair(high, inverse, sum), 0x5140);
}

// Writes the codes of a unit and, by the first lane of each sum, the sum. All lanes of a warp call it.
__device__ __forceinline__ void write(const Unit& unit, int index, int units, float inverse, uint4* codes, ptx::uint32* sums,
                                      float factor) {
    float sum = 0.0f;
    if (index < units) {
        codes[index] = make_uint4(round_four(unit.low.x, unit.high.x, inverse, sum),
                                  round_four(unit.low.y, unit.high.y, inverse, sum),
                                  round_four(unit.low.z, unit.high.z, inverse, sum),
                                  round_four(unit.low.w, unit.high.w, inverse, sum));
    }
#if COLUMNS > 0
    constexpr int kLanes = COLUMNS / 16;  // of a sum
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (index < units && index % kLanes == 0) sums[index / kLanes] = ptx::round_tf32(factor * sum);
#endif
}

// The previous kernel may write x and order: no __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(kMostThreads, 4)
    quantize_wna8(const uint4* x, const int* order, uint4* __restrict__ codes, float* __restrict__ scales,
                  ptx::uint32* __restrict__ sums, int units, int stride, int per_token, float factor) {
#if __CUDA_ARCH__ >= 900
    constexpr int kAtOnce = 128;  // while more rows wait, the dependent product would occupy whole multiprocessors
    if (gridDim.x <= kAtOnce) ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const int slot = order == nullptr ? blockIdx.x : order[blockIdx.x];
    if (slot < 0) return;
    const uint4* row = x + static_cast<long long>(slot / per_token) * units * 2;
    codes += static_cast<long long>(blockIdx.x) * units;
    sums += static_cast<long long>(blockIdx.x) * stride;
    Unit kept[kKept];
    unsigned int best = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        const int index = threadIdx.x + i * blockDim.x;
        kept[i] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
        if (index < units) kept[i] = {row[2 * index], row[2 * index + 1]};
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) best = larger(larger(best, kept[i].low), kept[i].high);
    const int beyond = threadIdx.x + kKept * blockDim.x;
    for (int index = beyond; index < units; index += blockDim.x) {
        best = larger(larger(best, row[2 * index]), row[2 * index + 1]);
    }
    float scale = unpack_pair<ELEMENT>(largest<kMostThreads>(best)).x / kLargest;
    if (scale < kSmallestNormal) scale = 0.0f;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        write(kept[i], threadIdx.x + i * blockDim.x, units, inverse, codes, sums, factor);
    }
    // A warp stays together: lanes behind the row's end take part in the sums.
    for (int index = beyond; index - static_cast<int>(threadIdx.x % 32) < units; index += blockDim.x) {
        Unit unit = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
        if (index < units) unit = {row[2 * index], row[2 * index + 1]};
        write(unit, index, units, inverse, codes, sums, factor);
    }
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
#endif
}

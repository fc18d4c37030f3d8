// The grid of each group that rounds it with the least weighted squared error: over the full range or a clipped one.
//
// Candidates are shares of the full range, tried in order; one replaces the best so far if its error is less.
//   symmetric: low = the weight of greatest magnitude, the first one; span = -low * max_code / middle code
//   asymmetric: low = min(least weight, 0); span = max(greatest weight, 0) - low
//   scale = stored(span * share / max_code), 1 if that is 0
//   zero = the middle code; asymmetric: clamp(round(-low * share / scale) + shift)
//   error = sum over the columns of importance * ((code - zero) * scale - weight)^2,  code nearest to weight / scale + zero
// Shares: 1; those of kShares, each also negative if symmetric, and with the shifts 1 and -1 if asymmetric of 2 bits; then
// those of kSteps away from the best so far, with its shift. All other shifts are 0.
//
// Shapes and layout
//   ELEMENT      float, __half or __nv_bfloat16
//   weight       ELEMENT [rows][groups * size], rows weight_row apart, columns contiguous
//   importance   float [groups * size]
//   scales, zeros   float [rows][groups], contiguous
//   scale_dtype  a number of scale_dtype.cuh
// Kernels: clip_search_32, _64 and _128 for groups of that size: 8 lanes have a group in their registers for all
// candidates. clip_search_any for groups of any size: a block has one, and reads it again for each candidate. Errors are
// summed in a fixed order, which depends on the size of the group alone.
#include "gptq/rounding.cuh"
#include "gptq/scale_dtype.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 8;  // that share a group in registers
constexpr int kCoarse = 11;
constexpr int kFine = 4;

// Those of kernels/reference/grid.py.
__constant__ float kShares[kCoarse] = {1.14f, 1.06f, 0.98f, 0.9f, 0.82f, 0.74f, 0.66f, 0.58f, 0.5f, 0.42f, 0.34f};
__constant__ float kSteps[kFine] = {0.04f, -0.04f, 0.02f, -0.02f};

using uint64 = unsigned long long;

// ---- Threads that work on a group together ----

// `Lanes` neighbours of a warp, or the whole block. All threads of a block call `reduce`, and all of a team get the same.
template <int Lanes>
struct Team {
    static __device__ __forceinline__ int lane() { return threadIdx.x % Lanes; }

    template <typename T, typename Join>
    static __device__ __forceinline__ T reduce(T value, Join join) {
        constexpr int kWidth = Lanes < 32 ? Lanes : 32;
#pragma unroll
        for (int offset = kWidth / 2; offset > 0; offset /= 2) {
            value = join(value, __shfl_xor_sync(0xffffffff, value, offset));
        }
        if constexpr (Lanes > 32) {
            __shared__ T partial[Lanes / 32];
            __syncthreads();  // what was here before has been read
            if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
            __syncthreads();
            value = partial[0];
            for (int i = 1; i < Lanes / 32; ++i) value = join(value, partial[i]);
        }
        return value;
    }
};

// ---- Where the weights of a group are: a thread's share of them ----

template <int Count>
struct InRegisters {
    float weight[Count], cost[Count];

    __device__ __forceinline__ InRegisters(const ELEMENT* from, const float* importance, int lane) {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            weight[i] = to_float(from[i * kLanes + lane]);
            cost[i] = importance[i * kLanes + lane];
        }
    }

    // visit(index in the group, weight, cost)
    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        const int lane = Team<kLanes>::lane();
#pragma unroll
        for (int i = 0; i < Count; ++i) visit(i * kLanes + lane, weight[i], cost[i]);
    }
};

struct InMemory {
    const ELEMENT* weight;
    const float* cost;
    int size;

    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll 4
        for (int i = threadIdx.x; i < size; i += kThreads) visit(i, to_float(weight[i]), cost[i]);
    }
};

// ---- Candidates ----

struct Settings {
    float max_code;
    bool symmetric;
    int scale_dtype;
};

struct Range {
    float low, span;
};

struct Grid {
    float scale, zero;
};

// The range of a group that begins at `group`.
template <int Lanes, typename Weights>
__device__ __forceinline__ Range full_range(const Weights& weights, const ELEMENT* group, const Settings& settings) {
    using Members = Team<Lanes>;
    if (settings.symmetric) {
        // The greatest magnitude, and of equals the first: as floats of one sign are ordered like their bits.
        uint64 greatest = 0;
        weights.each([&](int index, float weight, float) {
            const uint64 bits = static_cast<uint64>(__float_as_uint(fabsf(weight))) << 32 | (0xffffffffu - index);
            greatest = max(greatest, bits);
        });
        greatest = Members::reduce(greatest, [](uint64 a, uint64 b) { return max(a, b); });
        const float extreme = to_float(group[0xffffffffu - static_cast<unsigned int>(greatest)]);
        const float middle = (settings.max_code + 1.0f) / 2.0f;
        return {extreme, extreme * (-settings.max_code / middle)};
    }
    float low = 0.0f, high = 0.0f;
    weights.each([&](int, float weight, float) {
        low = fminf(low, weight);
        high = fmaxf(high, weight);
    });
    low = Members::reduce(low, [](float a, float b) { return fminf(a, b); });
    high = Members::reduce(high, [](float a, float b) { return fmaxf(a, b); });
    return {low, high - low};
}

__device__ __forceinline__ Grid candidate(const Range& range, float share, float shift, const Settings& settings) {
    const float stored = as_stored(range.span * share / settings.max_code, settings.scale_dtype);
    const float scale = stored == 0.0f ? 1.0f : stored;
    if (settings.symmetric) return {scale, (settings.max_code + 1.0f) / 2.0f};
    return {scale, fminf(fmaxf(rintf(-range.low * share / scale) + shift, 0.0f), settings.max_code)};
}

// The weighted squared error of a thread's share. A quotient that is off by its last bit may choose the other of two codes
// that are equally near: the error stays the same.
template <typename Weights>
__device__ __forceinline__ float error_of(const Weights& weights, const Grid& grid, float max_code) {
    const float reciprocal = 1.0f / grid.scale;
    const float lowest = 0.0f - grid.zero;
    const float highest = max_code - grid.zero;
    float total = 0.0f;
    weights.each([&](int, float weight, float cost) {
        const float centred = fminf(fmaxf(round_even(weight * reciprocal), lowest), highest);
        const float off = fmaf(centred, grid.scale, -weight);
        total = fmaf(off * off, cost, total);
    });
    return total;
}

template <int Lanes, typename Weights>
__device__ __forceinline__ Grid search(const Weights& weights, const ELEMENT* group, const Settings& settings) {
    const Range range = full_range<Lanes>(weights, group, settings);
    const int kinds = settings.symmetric ? 2 : settings.max_code == 3.0f ? 3 : 1;
    const int coarse = kinds * kCoarse;
    Grid best = {};
    float least = 0.0f, factor = 1.0f, moved = 0.0f;
    for (int trial = 0; trial <= coarse + kFine; ++trial) {
        float share = 1.0f, shift = 0.0f;
        if (trial > coarse) {
            const float step = kSteps[trial - coarse - 1];
            share = factor + (factor > 0.0f ? step : -step);
            shift = moved;
        } else if (trial > 0) {
            const int kind = (trial - 1) % kinds;
            share = kShares[(trial - 1) / kinds];
            if (settings.symmetric) {
                share = kind == 0 ? share : -share;
            } else {
                shift = kind == 0 ? 0.0f : 3.0f - 2.0f * kind;  // 0, 1, -1
            }
        }
        const Grid grid = candidate(range, share, shift, settings);
        const float error = Team<Lanes>::reduce(error_of(weights, grid, settings.max_code),
                                                [](float a, float b) { return a + b; });
        if (trial == 0 || error < least) {
            least = error;
            factor = share;
            moved = shift;
            best = grid;
        }
    }
    return best;
}

// Groups of kLanes * Count columns, each in the registers of kLanes lanes.
template <int Count>
__device__ __forceinline__ void search_registers(const ELEMENT* weight, const float* importance, float* scales,
                                                 float* zeros, long long weight_row, long long rows, int groups,
                                                 const Settings& settings) {
    constexpr int kSize = kLanes * Count;
    const long long index = static_cast<long long>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
    const bool live = index < rows * groups;  // the others work on the first group again
    const long long row = live ? index / groups : 0;
    const int column = live ? static_cast<int>(index % groups) * kSize : 0;
    const ELEMENT* group = weight + row * weight_row + column;
    const int lane = Team<kLanes>::lane();
    const InRegisters<Count> weights(group, importance + column, lane);
    const Grid grid = search<kLanes>(weights, group, settings);
    if (live && lane == 0) {
        scales[index] = grid.scale;
        zeros[index] = grid.zero;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    clip_search_32(const ELEMENT* __restrict__ weight, const float* __restrict__ importance, float* __restrict__ scales,
                   float* __restrict__ zeros, long long weight_row, long long rows, int groups, int max_code,
                   int symmetric, int scale_dtype) {
    const Settings settings = {static_cast<float>(max_code), symmetric != 0, scale_dtype};
    search_registers<4>(weight, importance, scales, zeros, weight_row, rows, groups, settings);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    clip_search_64(const ELEMENT* __restrict__ weight, const float* __restrict__ importance, float* __restrict__ scales,
                   float* __restrict__ zeros, long long weight_row, long long rows, int groups, int max_code,
                   int symmetric, int scale_dtype) {
    const Settings settings = {static_cast<float>(max_code), symmetric != 0, scale_dtype};
    search_registers<8>(weight, importance, scales, zeros, weight_row, rows, groups, settings);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    clip_search_128(const ELEMENT* __restrict__ weight, const float* __restrict__ importance,
                    float* __restrict__ scales, float* __restrict__ zeros, long long weight_row, long long rows,
                    int groups, int max_code, int symmetric, int scale_dtype) {
    const Settings settings = {static_cast<float>(max_code), symmetric != 0, scale_dtype};
    search_registers<16>(weight, importance, scales, zeros, weight_row, rows, groups, settings);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    clip_search_any(const ELEMENT* __restrict__ weight, const float* __restrict__ importance, float* __restrict__ scales,
                    float* __restrict__ zeros, long long weight_row, long long rows, int groups, int max_code,
                    int symmetric, int scale_dtype, int size) {
    const Settings settings = {static_cast<float>(max_code), symmetric != 0, scale_dtype};
    const long long column = static_cast<long long>(blockIdx.x % groups) * size;
    const ELEMENT* group = weight + blockIdx.x / groups * weight_row + column;
    const Grid grid = search<kThreads>(InMemory{group, importance + column, size}, group, settings);
    if (threadIdx.x == 0) {
        scales[blockIdx.x] = grid.scale;
        zeros[blockIdx.x] = grid.zero;
    }
}

// RMSNorm and LayerNorm of the rows of a matrix, with the residual added on the way.
//
//   total = x + residual                     rounded to ELEMENT; x itself where residual is null
//   rms_norm:   out = round(total * rsqrt(mean(total^2) + eps)) * weight       both products rounded to ELEMENT
//   layer_norm: out = (total - mean(total)) * rsqrt(variance(total) + eps) * weight + bias             rounded once
//
// Shapes and layout: x [rows, width], rows x_stride elements apart; residual, total, out [rows, width]; weight, bias [width];
// all but x contiguous. ELEMENT = float, __half or __nv_bfloat16, computed in float32. residual, total (both or neither)
// and bias may be null. Launch: `warps` (a power of two, at most 32) share a row; a block of any number of times
// 32 * warps threads, at most 1024, takes as many rows, and the grid covers all. `vectorised`: width and x_stride are
// multiples of 8 and everything is aligned to 16 bytes.
//
// A row is read two or three times, the first time from memory and then from L1: kept in registers it would limit the
// width. Sums are formed in a fixed order that depends on the width alone: the result is the same at every run and for
// a row among any others.
#include "common/ptx.cuh"
#include "step/chunk.cuh"

using step::Chunk;
using step::kChunk;

struct Row {
    const ELEMENT* x;
    const ELEMENT* residual;
    int width;
    bool vectorised;

    // A chunk of the total, rounded as it is stored.
    __device__ __forceinline__ Chunk<ELEMENT> load(int chunk) const {
        Chunk<ELEMENT> value = step::load_chunk(x, chunk, width, vectorised);
        if (residual != nullptr) {
            const Chunk<ELEMENT> other = step::load_chunk(residual, chunk, width, vectorised);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                value.element[i] = from_float<ELEMENT>(to_float(value.element[i]) + to_float(other.element[i]));
            }
        }
        return value;
    }

    __device__ __forceinline__ bool holds(int chunk, int i) const { return kChunk * chunk + i < width; }
};

// The sum of `value` over the threads of a row. All threads of the block call it.
__device__ __forceinline__ float sum_of_row(float value, int warps) {
    __shared__ float partial[32];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffff, value, offset);
    if (warps == 1) return value;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    __syncthreads();  // the last sum's partials have been read
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    value = lane < warps ? partial[warp / warps * warps + lane] : 0.0f;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffff, value, offset);
    return value;
}

template <bool Centered>
__device__ __forceinline__ void normalize(const ELEMENT* x, const ELEMENT* residual, const ELEMENT* weight,
                                          const ELEMENT* bias, ELEMENT* out, ELEMENT* total, long long rows,
                                          long long x_stride, int width, int warps, float eps, bool vectorised) {
    const int threads = 32 * warps;
    const int thread = threadIdx.x % threads;
    const int chunks = (width + kChunk - 1) / kChunk;
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    if (blockIdx.x == 0) {  // what no previous kernel writes, once for all blocks
        for (int chunk = thread; chunk < chunks; chunk += threads) {
            step::prefetch_l2(weight + kChunk * chunk);
            if (bias != nullptr) step::prefetch_l2(bias + kChunk * chunk);
        }
    }
    ptx::griddepcontrol_wait();
#endif
    const long long index = static_cast<long long>(blockIdx.x) * (blockDim.x / threads) + threadIdx.x / threads;
    const bool stores = index < rows;  // threads of a row that is not there go along to the barriers
    const long long begin = (stores ? index : 0) * width;
    const Row row = {x + (stores ? index : 0) * x_stride, residual == nullptr ? nullptr : residual + begin, width, vectorised};

    float sum = 0.0f;
    for (int chunk = thread; chunk < chunks; chunk += threads) {
        const Chunk<ELEMENT> value = row.load(chunk);
        if (residual != nullptr && stores) step::store_chunk(total + begin, chunk, width, vectorised, value);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            const float element = to_float(value.element[i]);  // zero past the end
            sum += Centered ? element : element * element;
        }
    }
    float mean = sum_of_row(sum, warps) / width;
    float variance = mean;
    if constexpr (Centered) {
        float squares = 0.0f;
        for (int chunk = thread; chunk < chunks; chunk += threads) {
            const Chunk<ELEMENT> value = row.load(chunk);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                const float away = row.holds(chunk, i) ? to_float(value.element[i]) - mean : 0.0f;
                squares += away * away;
            }
        }
        variance = sum_of_row(squares, warps) / width;
    } else {
        mean = 0.0f;
    }
    if (!stores) return;
    const float factor = rsqrtf(variance + eps);
    for (int chunk = thread; chunk < chunks; chunk += threads) {
        Chunk<ELEMENT> value = row.load(chunk);
        const Chunk<ELEMENT> scale = step::load_chunk(weight, chunk, width, vectorised);
        if constexpr (Centered) {
            Chunk<ELEMENT> shift = {};
            if (bias != nullptr) shift = step::load_chunk(bias, chunk, width, vectorised);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                const float normed = (to_float(value.element[i]) - mean) * factor * to_float(scale.element[i]);
                value.element[i] = from_float<ELEMENT>(normed + to_float(shift.element[i]));
            }
        } else {
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                const float normed = to_float(from_float<ELEMENT>(to_float(value.element[i]) * factor));
                value.element[i] = from_float<ELEMENT>(normed * to_float(scale.element[i]));
            }
        }
        step::store_chunk(out + begin, chunk, width, vectorised, value);
    }
}

// The previous kernels may write what these read: no __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(1024)
    rms_norm(const ELEMENT* x, const ELEMENT* residual, const ELEMENT* weight, ELEMENT* __restrict__ out,
             ELEMENT* __restrict__ total, long long rows, long long x_stride, int width, int warps, float eps,
             int vectorised) {
    normalize<false>(x, residual, weight, nullptr, out, total, rows, x_stride, width, warps, eps, vectorised);
}

extern "C" __global__ void __launch_bounds__(1024)
    layer_norm(const ELEMENT* x, const ELEMENT* residual, const ELEMENT* weight, const ELEMENT* bias,
               ELEMENT* __restrict__ out, ELEMENT* __restrict__ total, long long rows, long long x_stride, int width,
               int warps, float eps, int vectorised) {
    normalize<true>(x, residual, weight, bias, out, total, rows, x_stride, width, warps, eps, vectorised);
}

// HGEMV: y [n] = activation(weight [n, k] x [k] + bias [n]), 16-bit elements, fp32 accumulation. `activation` is a number of
// numeric.cuh.
//
// Macros
//   ELEMENT     __half or __nv_bfloat16
//   WARPS       of a block
//   SPLIT       warps that share a row of the weight, each a part of k; a divisor of WARPS
//   UNROLL      16-byte loads in flight in one lane
//   VECTOR      8: k is a multiple of 8 and the weight and x are aligned to 16 bytes; 1: any
//
// A matrix-vector product reads each weight once and does two operations with it, so the only thing that counts is how
// many bytes are in flight: UNROLL loads per lane, issued before the first is used, in as many small blocks as fit on a
// multiprocessor. When a block ends the next takes its place, so there is no last wave to wait for. (Several rows per warp
// would reuse x, which L1 serves anyway, and measured slower.) Weights pass by L1; x stays in it. Sums are
// formed in a fixed order: the result is the same at every run.
#include "common/numeric.cuh"
#include "common/ptx.cuh"

constexpr int kThreads = 32 * WARPS;
constexpr int kStride = 32 * SPLIT;  // lanes that share a row

struct Chunk {
    unsigned int pair[4];
};

__device__ __forceinline__ Chunk load_weight(const ELEMENT* row, int chunk, int k) {
    Chunk value;
    if constexpr (VECTOR == 8) {
        *reinterpret_cast<uint4*>(&value) = ptx::load_streaming(row + 8 * chunk);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = 8 * chunk + 2 * i;
            value.pair[i] = pack_pair<ELEMENT>(at < k ? to_float(row[at]) : 0.0f, at + 1 < k ? to_float(row[at + 1]) : 0.0f);
        }
    }
    return value;
}

__device__ __forceinline__ Chunk load_x(const ELEMENT* x, int chunk, int k) {
    if constexpr (VECTOR == 8) {
        Chunk value;
        *reinterpret_cast<uint4*>(&value) = ptx::load_in_order(x + 8 * chunk);
        return value;
    } else {
        return load_weight(x, chunk, k);
    }
}

__device__ __forceinline__ void accumulate(float2& sum, const Chunk& weight, const Chunk& x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 w = unpack_pair<ELEMENT>(weight.pair[i]);
        const float2 v = unpack_pair<ELEMENT>(x.pair[i]);
        sum.x = fmaf(w.x, v.x, sum.x);
        sum.y = fmaf(w.y, v.y, sum.y);
    }
}

// The previous kernel may write x and bias: no __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(kThreads)
    hgemv(const ELEMENT* __restrict__ weight, const ELEMENT* x, const ELEMENT* bias,
          ELEMENT* __restrict__ y, int n, int k, int activation) {
#if __CUDA_ARCH__ >= 900
    // The kernel after this one may start where this one has left room; this one waits for what the one before it wrote.
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int index = blockIdx.x * (WARPS / SPLIT) + warp / SPLIT;
    const ELEMENT* row = weight + static_cast<long long>(min(index, n - 1)) * k;
    const int chunks = (k + 7) / 8;
    float2 sum = {};
    int chunk = threadIdx.x % kStride;
    for (; chunk + (UNROLL - 1) * kStride < chunks; chunk += UNROLL * kStride) {
        Chunk w[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) w[u] = load_weight(row, chunk + u * kStride, k);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) accumulate(sum, w[u], load_x(x, chunk + u * kStride, k));
    }
    for (; chunk < chunks; chunk += kStride) accumulate(sum, load_weight(row, chunk, k), load_x(x, chunk, k));

    float total = sum.x + sum.y;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(0xffffffff, total, offset);
    if constexpr (SPLIT > 1) {
        __shared__ float partial[WARPS];
        if (lane == 0) partial[warp] = total;
        __syncthreads();
        total = partial[warp];
        if (warp % SPLIT == 0) {
#pragma unroll
            for (int i = 1; i < SPLIT; ++i) total += partial[warp + i];
        }
    }
    if (lane == 0 && warp % SPLIT == 0 && index < n) {
        if (bias != nullptr) total += to_float(bias[index]);
        y[index] = from_float<ELEMENT>(activate(activation, total));
    }
}

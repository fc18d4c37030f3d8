// The experts of a few tokens, each slot a product of its own: weights and x in 16 bits, or both in 8. A token has `per_token`
// slots, one per expert that it passes through; slot s, counted over all tokens, belongs to token s / per_token and experts[s].
//
//   GATED=1  out[s] = silu(gate x[t]) * (up x[t]) for each slot s of each token t; the weight of an expert is [gate, up]
//   GATED=0  out[t] = residual[t] + sum over the slots s of t of factors[s] * (weight x[s])
//
// Shapes: weight [experts, n, k], with a gate [experts, 2 n, k]; x [tokens, k] with a gate, else [slots, k]; out ELEMENT [slots, n]
// with a gate, else [tokens, n]; experts int32 and factors float32 [slots]; residual ELEMENT [tokens, n] or null. Rows of weight
// and x are multiples of 16 bytes, and all addresses. Of 8 bits, scales and x_scales are float32, one per row of weight and x.
// A slot whose expert is negative belongs to another process: it adds nothing, and its row of out is left as it is.
//
// Macros
//   ELEMENT  __half or __nv_bfloat16
//   CODES    of weight and x: 0 ELEMENT; 1 int8, summed exactly; 2 e4m3 (sm_89), summed in fp32 as ELEMENT is
//   UNROLL   16-byte loads of a row of the weight in flight in one lane
//
// Launch: with a gate, grid (n / kWarps rounded up, slots), a block of kWarps warps: a warp has one row of the gate and the same of
// up. Without, grid (n / kRows rounded up, tokens), a block of per_token warps: each has one slot, for kRows rows, and the first
// threads add the slots up in their order. The host need not know the experts. Each weight is read once, so that all that counts
// is how many bytes are in flight, as in gemv/hgemv.cu. Sums have a fixed order: the same bits at every run.
#include "common/numeric.cuh"
#include "common/ptx.cuh"

constexpr int kRows = 2;  // of a weight that a warp multiplies at a time
constexpr int kCodes = CODES == 0 ? 8 : 16;  // in 16 bytes

__device__ __forceinline__ void add_pairs(float& sum, float2 w, float2 v) {
    sum = fmaf(w.x, v.x, sum);
    sum = fmaf(w.y, v.y, sum);
}

// Adds the products of the numbers in two words.
#if CODES == 1
using Sum = int;
__device__ __forceinline__ void add_word(Sum& sum, int w, int v) { sum = __dp4a(w, v, sum); }
#else
using Sum = float;
__device__ __forceinline__ void add_word(Sum& sum, unsigned int w, unsigned int v) {
#if CODES == 2
    add_pairs(sum, ptx::unpack_e4m3(w & 0xffff), ptx::unpack_e4m3(v & 0xffff));
    add_pairs(sum, ptx::unpack_e4m3(w >> 16), ptx::unpack_e4m3(v >> 16));
#else
    add_pairs(sum, unpack_pair<ELEMENT>(w), unpack_pair<ELEMENT>(v));
#endif
}
#endif

__device__ __forceinline__ void accumulate(Sum& sum, const uint4& w, const uint4& v) {
    add_word(sum, w.x, v.x);
    add_word(sum, w.y, v.y);
    add_word(sum, w.z, v.z);
    add_word(sum, w.w, v.w);
}

// The products of kRows rows, `stride` bytes apart, with x: complete in every lane.
__device__ __forceinline__ void multiply(float (&total)[kRows], const unsigned char* rows, long long stride,
                                         const unsigned char* x, int k) {
    const int chunks = k / kCodes;
    Sum sum[kRows] = {};
    for (int first = threadIdx.x % 32; first < chunks; first += UNROLL * 32) {
        uint4 w[kRows][UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int chunk = first + 32 * u;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                w[r][u] = chunk < chunks ? ptx::load_streaming(rows + r * stride + 16 * chunk) : make_uint4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int chunk = first + 32 * u;
            if (chunk >= chunks) break;
            const uint4 v = ptx::load_in_order(x + 16 * chunk);
#pragma unroll
            for (int r = 0; r < kRows; ++r) accumulate(sum[r], w[r][u], v);
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) sum[r] += __shfl_xor_sync(0xffffffff, sum[r], offset);
        total[r] = static_cast<float>(sum[r]);
    }
}

__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
}

__device__ __forceinline__ long long row_bytes(int k) { return static_cast<long long>(k) * (16 / kCodes); }

__device__ __forceinline__ const unsigned char* row_of(const unsigned char* matrix, long long row, int k) {
    return matrix + row * row_bytes(k);
}

// The kernels ahead may write all but the weight: no __restrict__ (see ptx::griddepcontrol_wait).
#if GATED
constexpr int kWarps = 4;
static_assert(kRows == 2, "a row of the gate and one of up");

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    moe_gemv_gated(const unsigned char* __restrict__ weight, const float* scales, const unsigned char* x, const float* x_scales,
                   const int* experts, ELEMENT* out, int n, int k, int per_token) {
    wait_for_inputs();
    const int slot = blockIdx.y, expert = experts[slot];
    const int row = blockIdx.x * kWarps + threadIdx.x / 32;
    if (expert < 0 || row >= n) return;
    const long long gate = static_cast<long long>(expert) * 2 * n + row;
    float sum[kRows];
    multiply(sum, row_of(weight, gate, k), n * row_bytes(k), row_of(x, slot / per_token, k), k);
    if (threadIdx.x % 32 == 0) {
        if constexpr (CODES > 0) {
            const float scale = x_scales[slot / per_token];
            sum[0] *= scale * scales[gate];
            sum[1] *= scale * scales[gate + n];
        }
        out[static_cast<long long>(slot) * n + row] = from_float<ELEMENT>(activate(kSilu, sum[0]) * sum[1]);
    }
}
#else
constexpr int kMostSlots = 32;

extern "C" __global__ void __launch_bounds__(32 * kMostSlots)
    moe_gemv_summed(const unsigned char* __restrict__ weight, const float* scales, const unsigned char* x, const float* x_scales,
                    const int* experts, const float* factors, const ELEMENT* residual, ELEMENT* out, int n, int k,
                    int per_token) {
    __shared__ float partial[kMostSlots][kRows];
    wait_for_inputs();
    const int warp = threadIdx.x / 32;
    const int slot = blockIdx.y * per_token + warp, expert = experts[slot];
    const int row = blockIdx.x * kRows;
    float sum[kRows] = {};
    if (expert >= 0) {
        // An n that kRows does not divide: the last row is multiplied again, and not stored.
        const int step = row + 1 < n ? 1 : 0;
        const long long first = static_cast<long long>(expert) * n + row;
        multiply(sum, row_of(weight, first, k), step * row_bytes(k), row_of(x, slot, k), k);
        if (threadIdx.x % 32 == 0) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                float factor = factors[slot];
                if constexpr (CODES > 0) factor *= x_scales[slot] * scales[first + r * step];
                sum[r] *= factor;
            }
        }
    }
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) partial[warp][r] = sum[r];
    }
    __syncthreads();
    if (threadIdx.x < kRows && row + threadIdx.x < n) {
        float total = 0.0f;
        for (int j = 0; j < per_token; ++j) total += partial[j][threadIdx.x];
        const long long at = static_cast<long long>(blockIdx.y) * n + row + threadIdx.x;
        out[at] = from_float<ELEMENT>(residual == nullptr ? total : total + to_float(residual[at]));
    }
}
#endif

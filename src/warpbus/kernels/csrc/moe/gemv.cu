// The experts of a few tokens, each slot a product of its own: 16-bit weights, fp32 accumulation. A token has `per_token` slots,
// one per expert that it passes through; slot s, counted over all tokens, belongs to token s / per_token and experts[s].
//
//   GATED=1  out[s] = silu(gate x[t]) * (up x[t]) for each slot s of each token t; the weight of an expert is [gate, up]
//   GATED=0  out[t] = residual[t] + sum over the slots s of t of factors[s] * (weight x[s])
//
// Shapes: weight [experts, n, k], with a gate [experts, 2 n, k]; x [tokens, k] with a gate, else [slots, k]; out [slots, n] with
// a gate, else [tokens, n]; experts int32 and factors float32 [slots]; residual [tokens, n] or null. k is a multiple of 8, and
// all addresses of 16 bytes. A slot whose expert is negative belongs to another process: it adds nothing, and its row of out is
// left as it is.
//
// Macros: ELEMENT = __half or __nv_bfloat16; UNROLL 16-byte loads of a weight's row in flight in one lane.
//
// Launch: with a gate, grid (n / kWarps rounded up, slots), a block of kWarps warps: a warp has one row of the gate and the same of
// up. Without, grid (n / kRows rounded up, tokens), a block of per_token warps: each has one slot, for kRows rows, and the first
// threads add the slots up in their order. The host need not know the experts. Each weight is read once, so that all that counts
// is how many bytes are in flight, as in gemv/hgemv.cu. Sums have a fixed order: the same bits at every run.
#include "common/numeric.cuh"
#include "common/ptx.cuh"

constexpr int kRows = 2;  // of a weight that a warp multiplies at a time

using Vector = Vector16<ELEMENT>;

__device__ __forceinline__ Vector loaded(uint4 bits) { return *reinterpret_cast<Vector*>(&bits); }

__device__ __forceinline__ void accumulate(float& sum, const Vector& weight, const Vector& x) {
#pragma unroll
    for (int i = 0; i < Vector::kSize; ++i) sum = fmaf(to_float(weight.element[i]), to_float(x.element[i]), sum);
}

// The products of kRows rows, `stride` elements apart, with x: complete in every lane.
__device__ __forceinline__ void multiply(float (&sum)[kRows], const ELEMENT* rows, long long stride, const ELEMENT* x, int k) {
    const int chunks = k / 8;
    int chunk = threadIdx.x % 32;
    for (; chunk + (UNROLL - 1) * 32 < chunks; chunk += UNROLL * 32) {
        Vector w[kRows][UNROLL];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) w[r][u] = loaded(ptx::load_streaming(rows + r * stride + 8 * (chunk + 32 * u)));
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Vector v = loaded(ptx::load_in_order(x + 8 * (chunk + 32 * u)));
#pragma unroll
            for (int r = 0; r < kRows; ++r) accumulate(sum[r], w[r][u], v);
        }
    }
    for (; chunk < chunks; chunk += 32) {
        const Vector v = loaded(ptx::load_in_order(x + 8 * chunk));
#pragma unroll
        for (int r = 0; r < kRows; ++r) accumulate(sum[r], loaded(ptx::load_streaming(rows + r * stride + 8 * chunk)), v);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[r] += __shfl_xor_sync(0xffffffff, sum[r], offset);
    }
}

__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
}

// The kernels ahead may write all but the weight: no __restrict__ (see ptx::griddepcontrol_wait).
#if GATED
constexpr int kWarps = 4;
static_assert(kRows == 2, "a row of the gate and one of up");

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    moe_gemv_gated(const ELEMENT* __restrict__ weight, const ELEMENT* x, const int* experts, ELEMENT* out, int n, int k,
                   int per_token) {
    wait_for_inputs();
    const int slot = blockIdx.y, expert = experts[slot];
    const int row = blockIdx.x * kWarps + threadIdx.x / 32;
    if (expert < 0 || row >= n) return;
    float sum[kRows] = {};
    const ELEMENT* const gate = weight + (static_cast<long long>(expert) * 2 * n + row) * k;
    multiply(sum, gate, static_cast<long long>(n) * k, x + static_cast<long long>(slot / per_token) * k, k);
    if (threadIdx.x % 32 == 0) {
        out[static_cast<long long>(slot) * n + row] = from_float<ELEMENT>(activate(kSilu, sum[0]) * sum[1]);
    }
}
#else
constexpr int kMostSlots = 32;

extern "C" __global__ void __launch_bounds__(32 * kMostSlots)
    moe_gemv_summed(const ELEMENT* __restrict__ weight, const ELEMENT* x, const int* experts, const float* factors,
                    const ELEMENT* residual, ELEMENT* out, int n, int k, int per_token) {
    __shared__ float partial[kMostSlots][kRows];
    wait_for_inputs();
    const int warp = threadIdx.x / 32;
    const int slot = blockIdx.y * per_token + warp, expert = experts[slot];
    const int row = blockIdx.x * kRows;
    float sum[kRows] = {};
    if (expert >= 0) {
        // An n that kRows does not divide: the last row is multiplied again, and not stored.
        const long long stride = row + 1 < n ? k : 0;
        multiply(sum, weight + (static_cast<long long>(expert) * n + row) * k, stride, x + static_cast<long long>(slot) * k, k);
    }
    if (threadIdx.x % 32 == 0) {
        const float factor = expert < 0 ? 0.0f : factors[slot];
#pragma unroll
        for (int r = 0; r < kRows; ++r) partial[warp][r] = factor * sum[r];
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

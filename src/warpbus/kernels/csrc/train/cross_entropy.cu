// The cross-entropy of rows of scores and, in their place, its gradient.
//
//   losses[r] = log(sum over c of exp(scores[r, c])) - scores[r, targets[r]]
//   scores[r, c] = softmax(scores[r, :])[c] - (c == targets[r])       where `differentiated`, rounded once
//
// Shapes and layout: scores [rows, width], contiguous; targets long long [rows]; losses float [rows]. ELEMENT = float,
// __half or __nv_bfloat16, computed in float32. Launch: a block for each row, of whole warps, 32 to kBlock threads. A
// target that is not in [0, width) gives a loss of NaN, and in the gradient nothing is subtracted.
//
// A row is read once for its largest score and, at the same time, the sum of exponentials, which is scaled anew where
// a larger score is met (Milakov and Gimelshein, 2018, arXiv:1805.02867), and a second time for the gradient, last
// scores first: those are still in L1. Rows of odd width begin anywhere: up to the first multiple of 16 bytes, and past
// the last one, single threads take single scores. Sums are formed in an order that depends on the width and on where
// the row begins alone: the result is the same at every run.
#include "common/numeric.cuh"

constexpr int kBlock = 1024;  // two on a multiprocessor of Hopper: fewer rows at once, whose second read L2 still holds
constexpr int kWarps = kBlock / 32;
constexpr int kSize = Vector16<ELEMENT>::kSize;
constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

// 2^x by the special function unit (2 ulp), 0 where that is below the normal numbers.
__device__ __forceinline__ float power_of_two(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// The largest of some scores, and the sum of exp(score - largest). Without scores, or with -inf alone, they are -inf
// and 0. The sum is NaN with NaN or +inf among the scores.
struct Total {
    float largest;
    float sum;

    // The sum as if the largest were `base`, which may be -inf: then the exponents would be NaN, and any other base
    // gives 0.
    __device__ __forceinline__ float sum_at(float base) const {
        return sum * power_of_two((largest - (base == minus_infinity() ? 0.0f : base)) * kLog2E);
    }

    __device__ __forceinline__ void add(const Total& other) {
        const float base = fmaxf(largest, other.largest);
        sum = sum_at(base) + other.sum_at(base);
        largest = base;
    }

    template <int kCount>
    __device__ __forceinline__ void add(const float (&scores)[kCount]) {
        float base = largest;
#pragma unroll
        for (int i = 0; i < kCount; ++i) base = fmaxf(base, scores[i]);  // it passes NaN over; the sum does not
        const float finite = base == minus_infinity() ? 0.0f : base;
        sum = sum_at(base);
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum += power_of_two((scores[i] - finite) * kLog2E);
        largest = base;
    }
};

// The total of the block, for all of its threads. Only one thread's value is passed on: adding in another order, the
// others may differ in the last bit.
__device__ __forceinline__ Total total_of_block(Total total) {
    __shared__ Total of_warp[kWarps];
    __shared__ Total of_block;
    const int lane = threadIdx.x % 32;
    const int warps = blockDim.x / 32;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        total.add(Total{__shfl_xor_sync(0xffffffff, total.largest, offset),
                        __shfl_xor_sync(0xffffffff, total.sum, offset)});
    }
    if (lane == 0) of_warp[threadIdx.x / 32] = total;
    __syncthreads();
    if (threadIdx.x < 32) {
        total = lane < warps ? of_warp[lane] : Total{minus_infinity(), 0.0f};
#pragma unroll
        for (int offset = kWarps / 2; offset > 0; offset /= 2) {
            total.add(Total{__shfl_xor_sync(0xffffffff, total.largest, offset),
                            __shfl_xor_sync(0xffffffff, total.sum, offset)});
        }
        if (lane == 0) of_block = total;
    }
    __syncthreads();
    return of_block;
}

extern "C" __global__ void __launch_bounds__(kBlock)
    cross_entropy(ELEMENT* __restrict__ scores, const long long* __restrict__ targets, float* __restrict__ losses,
                  int width, int differentiated) {
    ELEMENT* row = scores + static_cast<long long>(blockIdx.x) * width;
    // Scores ahead of the first whole vector, whole vectors, and all scores that are in none: fewer than 2 kSize, so
    // that there is a thread for each.
    const int past = static_cast<int>(reinterpret_cast<unsigned long long>(row) % 16 / sizeof(ELEMENT));
    const int head = min((kSize - past) % kSize, width);
    const int vectors = (width - head) / kSize;
    Vector16<ELEMENT>* whole = reinterpret_cast<Vector16<ELEMENT>*>(row + head);
    const int thread = threadIdx.x;
    const int threads = blockDim.x;
    const bool takes_one = thread < width - vectors * kSize;
    ELEMENT* single = row + (thread < head ? thread : thread + vectors * kSize);

    const long long target = targets[blockIdx.x];
    const bool known = target >= 0 && target < width;
    float chosen = 0.0f;
    if (thread == 0 && known) chosen = to_float(row[target]);

    Total total = {minus_infinity(), 0.0f};
    if (takes_one) {
        const float score[1] = {to_float(*single)};
        total.add(score);
    }
#pragma unroll 2
    for (int i = thread; i < vectors; i += threads) {
        const Vector16<ELEMENT> loaded = whole[i];
        float vector[kSize];
#pragma unroll
        for (int e = 0; e < kSize; ++e) vector[e] = to_float(loaded.element[e]);
        total.add(vector);
    }
    total = total_of_block(total);  // from here on all threads have read what is overwritten below

    // Where all scores are -inf it is NaN, as it is with NaN or +inf among them.
    const float likelihood = chosen - total.largest - logf(total.sum);
    if (thread == 0) losses[blockIdx.x] = known ? -likelihood : __uint_as_float(0x7FC00000u);
    if (!differentiated) return;

    const float shift = log2f(total.sum);
    const auto softmax = [&](ELEMENT score) {
        return from_float<ELEMENT>(power_of_two((to_float(score) - total.largest) * kLog2E - shift));
    };
    // Each thread the vectors that it has read, the last first.
    const int read = thread < vectors ? (vectors - 1 - thread) / threads + 1 : 0;
    for (int i = thread + (read - 1) * threads; i >= thread; i -= threads) {
        Vector16<ELEMENT> vector = whole[i];
#pragma unroll
        for (int e = 0; e < kSize; ++e) vector.element[e] = softmax(vector.element[e]);
        whole[i] = vector;
    }
    if (takes_one) *single = softmax(*single);
    // Rounded after the subtraction: before it, a likelihood near 1 would become 1.
    __syncthreads();
    if (thread == 0 && known) row[target] = from_float<ELEMENT>(expm1f(likelihood));
}

// Kernels for training a small network besides products and the sigmoid: its bias, its gradients and its update.
//
// ELEMENT = float, __half or __nv_bfloat16, computed in float32; matrices [rows, columns] are row-major and contiguous.
// Every sum is taken in a fixed order, so that training is bitwise repeatable.
//
//   bias_add               out[r, c] = x[r, c] + bias[c]
//   column_sums            out[c] = sum of x[r, c] over r: the gradient of a bias
//   sigmoid_gradient       out[i] = gradient[i] y[i] (1 - y[i]), from the output y of the sigmoid: its input is not kept
//   softmax_cross_entropy  per row the loss -log softmax(x)[label], and the gradient of the mean loss,
//                          (softmax(x) - one_hot(label)) / rows; one warp a row
//   sgd_momentum           velocity = momentum velocity + gradient; parameter -= rate velocity, both in place
#include "common/numeric.cuh"

constexpr int kBlock = 256;
constexpr int kWarp = 32;
constexpr int kGroups = kBlock / kWarp;

__device__ __forceinline__ float infinity() {
    return __int_as_float(0x7f800000);
}

__device__ __forceinline__ float not_a_number() {
    return __int_as_float(0x7fffffff);
}

__device__ __forceinline__ long long first_element() {
    return static_cast<long long>(blockIdx.x) * kBlock + threadIdx.x;
}

__device__ __forceinline__ long long grid_threads() {
    return static_cast<long long>(gridDim.x) * kBlock;
}

extern "C" __global__ void __launch_bounds__(kBlock) bias_add(
    const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ bias, ELEMENT* __restrict__ out, long long size,
    long long columns) {
    for (long long i = first_element(); i < size; i += grid_threads()) {
        out[i] = from_float<ELEMENT>(to_float(x[i]) + to_float(bias[i % columns]));
    }
}

// A block of 32 x 8 threads sums 32 columns: neighbours read neighbours, and 8 groups share the rows.
extern "C" __global__ void __launch_bounds__(kBlock)
    column_sums(const ELEMENT* __restrict__ x, ELEMENT* __restrict__ out, long long rows, long long columns) {
    __shared__ float sums[kGroups][kWarp];
    const long long column = static_cast<long long>(blockIdx.x) * kWarp + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
        for (long long row = threadIdx.y; row < rows; row += kGroups) sum += to_float(x[row * columns + column]);
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {
        for (int group = 1; group < kGroups; ++group) sum += sums[group][threadIdx.x];
        out[column] = from_float<ELEMENT>(sum);
    }
}

extern "C" __global__ void __launch_bounds__(kBlock) sigmoid_gradient(
    const ELEMENT* __restrict__ y, const ELEMENT* __restrict__ gradient, ELEMENT* __restrict__ out, long long size) {
    for (long long i = first_element(); i < size; i += grid_threads()) {
        const float value = to_float(y[i]);
        out[i] = from_float<ELEMENT>(to_float(gradient[i]) * value * (1.0f - value));
    }
}

__device__ __forceinline__ float warp_sum(float value) {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
}

// A label that is no column gives NaN: a kernel cannot raise, and NaN is seen where a wrong number is not.
extern "C" __global__ void __launch_bounds__(kBlock) softmax_cross_entropy(
    const ELEMENT* __restrict__ logits, const long long* __restrict__ labels, float* __restrict__ losses,
    ELEMENT* __restrict__ gradient, long long rows, long long columns) {
    const long long row = static_cast<long long>(blockIdx.x) * kGroups + threadIdx.x / kWarp;
    if (row >= rows) return;  // whole warps leave
    const int lane = threadIdx.x % kWarp;
    const ELEMENT* x = logits + row * columns;

    // The largest logit is subtracted before exp, which cannot overflow then.
    float largest = -infinity();
    for (long long c = lane; c < columns; c += kWarp) largest = fmaxf(largest, to_float(x[c]));
    largest = warp_max(largest);
    float sum = 0.0f;
    for (long long c = lane; c < columns; c += kWarp) sum += expf(to_float(x[c]) - largest);
    sum = warp_sum(sum);

    const long long label = labels[row];
    const bool known = label >= 0 && label < columns;
    if (lane == 0) losses[row] = known ? logf(sum) + largest - to_float(x[label]) : not_a_number();
    const float scale = 1.0f / static_cast<float>(rows);
    for (long long c = lane; c < columns; c += kWarp) {
        const float probability = expf(to_float(x[c]) - largest) / sum;
        const float change = known ? (probability - (c == label ? 1.0f : 0.0f)) * scale : not_a_number();
        gradient[row * columns + c] = from_float<ELEMENT>(change);
    }
}

extern "C" __global__ void __launch_bounds__(kBlock) sgd_momentum(
    ELEMENT* __restrict__ parameter, ELEMENT* __restrict__ velocity, const ELEMENT* __restrict__ gradient,
    long long size, float rate, float momentum) {
    for (long long i = first_element(); i < size; i += grid_threads()) {
        const float speed = momentum * to_float(velocity[i]) + to_float(gradient[i]);
        velocity[i] = from_float<ELEMENT>(speed);
        parameter[i] = from_float<ELEMENT>(to_float(parameter[i]) - rate * speed);
    }
}

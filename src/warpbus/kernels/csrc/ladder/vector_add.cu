// out[i] = a[i] + b[i] for vectors of any length: the first kernel one writes, and a measure of memory bandwidth.
//
// Shapes and layout: a, b, out [size], contiguous, ELEMENT = float, __half or __nv_bfloat16. The sum is taken in float32
// and rounded once.
//
//   vector_add_scalar      one element a step. The grid has a bounded number of threads and each strides over the vector
//                          by the size of the grid, so that any length fits any grid.
//   vector_add_vectorised  16 bytes a load: a quarter or an eighth of the instructions for the same bytes, and several loads
//                          of a thread under way at a time. Needs pointers that are multiples of 16; the last elements,
//                          which fill no vector, are added one by one.
#include "common/numeric.cuh"

constexpr int kBlock = 256;
constexpr int kLoads = 4;
constexpr int kLanes = Vector16<ELEMENT>::kSize;

extern "C" __global__ void __launch_bounds__(kBlock) vector_add_scalar(
    const ELEMENT* __restrict__ a, const ELEMENT* __restrict__ b, ELEMENT* __restrict__ out, long long size) {
    const long long stride = static_cast<long long>(gridDim.x) * kBlock;
    for (long long i = static_cast<long long>(blockIdx.x) * kBlock + threadIdx.x; i < size; i += stride) {
        out[i] = from_float<ELEMENT>(to_float(a[i]) + to_float(b[i]));
    }
}

__device__ Vector16<ELEMENT> add(const Vector16<ELEMENT>& a, const Vector16<ELEMENT>& b) {
    Vector16<ELEMENT> sum;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
        sum.element[lane] = from_float<ELEMENT>(to_float(a.element[lane]) + to_float(b.element[lane]));
    }
    return sum;
}

// One block adds kBlock * kLoads vectors of 16 bytes; in each of the kLoads rounds its threads read neighbours.
extern "C" __global__ void __launch_bounds__(kBlock) vector_add_vectorised(
    const ELEMENT* __restrict__ a, const ELEMENT* __restrict__ b, ELEMENT* __restrict__ out, long long size) {
    const auto* a_vectors = reinterpret_cast<const Vector16<ELEMENT>*>(a);
    const auto* b_vectors = reinterpret_cast<const Vector16<ELEMENT>*>(b);
    auto* out_vectors = reinterpret_cast<Vector16<ELEMENT>*>(out);
    const long long vectors = size / kLanes;
    const long long first = static_cast<long long>(blockIdx.x) * kBlock * kLoads + threadIdx.x;

    if (first - threadIdx.x + kBlock * kLoads <= vectors) {
        Vector16<ELEMENT> left[kLoads], right[kLoads];
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
            left[load] = a_vectors[first + load * kBlock];
            right[load] = b_vectors[first + load * kBlock];
        }
#pragma unroll
        for (int load = 0; load < kLoads; ++load) out_vectors[first + load * kBlock] = add(left[load], right[load]);
        return;
    }

    // The last block: what is left of the vectors, and the elements that fill none.
    for (long long i = first; i < vectors; i += kBlock) out_vectors[i] = add(a_vectors[i], b_vectors[i]);
    const long long tail = vectors * kLanes + threadIdx.x;
    if (tail < size) out[tail] = from_float<ELEMENT>(to_float(a[tail]) + to_float(b[tail]));
}

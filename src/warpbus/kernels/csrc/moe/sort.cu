// Rows of tokens sorted by expert, and back. A token has `per_token` slots, one per expert that it passes through.
//
//   moe_sort     order: the slots sorted by expert, in any order within one; place: where each slot is in `order`;
//                tiles: for each expert its rows in the sorted order, cut into tiles of up to `rows_of_tile`. A slot whose
//                expert is negative belongs to another process: its place is -1, and order ends with as many -1.
//   moe_permute  out[i] = x[order[i] / per_token]; rows of order -1 are left as they are
//   moe_combine  out[t] = residual[t] + sum over j of weights[t, j] * y[place[t * per_token + j]], in fp32, in the order of j,
//                without those of place -1
//
// Shapes: experts, order, place int32 [slots], slots = tokens * per_token; tiles int4, the first entry {number of tiles, 0, 0,
// 0}, each other {expert, first row, rows, 0}; x, residual, out of combine [tokens, width], out of permute and y [slots, width]
// ELEMENT; weights fp32 [tokens, per_token]. residual may be null. Contiguous; width a multiple of 8, addresses of 16 bytes.
//
// Launch: moe_sort one block of 1024 threads, at most 1023 experts, 3 * 4 * experts bytes of shared memory; the others a block
// of 256 threads per row of out. The rows of a product do not depend on each other, so their order within an expert, which
// differs from run to run, changes no bit of a result.
#include "common/numeric.cuh"
#include "common/ptx.cuh"

using Vector = Vector16<ELEMENT>;
constexpr int kSize = Vector::kSize;

__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
}

// The sum of `value` over the threads before this one, of a block of 1024.
__device__ __forceinline__ int sum_before(int value, int* partial) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = value;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xffffffff, sum, offset);
        if (lane >= offset) sum += other;
    }
    __syncthreads();  // the last call's partials have been read
    if (lane == 31) partial[warp] = sum;
    __syncthreads();
    int before = 0;
    for (int w = 0; w < warp; ++w) before += partial[w];
    return before + sum - value;
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    moe_sort(const int* experts, int* order, int* place, int4* tiles, int slots, int count, int rows_of_tile) {
    extern __shared__ int next[];  // of each expert: its rows so far, then the place of its next row
    __shared__ int partial[32], total;
    wait_for_inputs();
    const int expert = threadIdx.x;
    if (expert < count) next[expert] = 0;
    __syncthreads();
    for (int slot = threadIdx.x; slot < slots; slot += 1024) {
        if (experts[slot] >= 0) atomicAdd(&next[experts[slot]], 1);
    }
    __syncthreads();
    const int rows = expert < count ? next[expert] : 0;
    const int first = sum_before(rows, partial);
    const int own_tiles = (rows + rows_of_tile - 1) / rows_of_tile;
    const int tile = sum_before(own_tiles, partial);
    if (expert < count) next[expert] = first;
    for (int i = 0; i < own_tiles; ++i) {
        const int done = i * rows_of_tile;
        tiles[1 + tile + i] = make_int4(expert, first + done, min(rows_of_tile, rows - done), 0);
    }
    if (expert == 1023) {
        tiles[0] = make_int4(tile + own_tiles, 0, 0, 0);
        total = first + rows;
    }
    __syncthreads();
    for (int slot = threadIdx.x; slot < slots; slot += 1024) {
        const bool here = experts[slot] >= 0;
        const int at = here ? atomicAdd(&next[experts[slot]], 1) : -1;
        if (here) order[at] = slot;
        place[slot] = at;
    }
    for (int row = total + threadIdx.x; row < slots; row += 1024) order[row] = -1;
}

extern "C" __global__ void __launch_bounds__(256)
    moe_permute(const ELEMENT* x, const int* order, ELEMENT* out, int width, int per_token) {
    wait_for_inputs();
    if (order[blockIdx.x] < 0) return;
    const int vectors = width / kSize;
    const Vector* const from = reinterpret_cast<const Vector*>(x) + static_cast<long long>(order[blockIdx.x] / per_token) * vectors;
    Vector* const to = reinterpret_cast<Vector*>(out) + static_cast<long long>(blockIdx.x) * vectors;
    for (int i = threadIdx.x; i < vectors; i += 256) to[i] = from[i];
}

extern "C" __global__ void __launch_bounds__(256)
    moe_combine(const ELEMENT* y, const int* place, const float* weights, const ELEMENT* residual, ELEMENT* out, int width,
                int per_token) {
    wait_for_inputs();
    const int vectors = width / kSize;
    const long long token = blockIdx.x;
    for (int i = threadIdx.x; i < vectors; i += 256) {
        float sum[kSize] = {};
#pragma unroll 4
        for (int j = 0; j < per_token; ++j) {
            const float weight = weights[token * per_token + j];
            const int row = place[token * per_token + j];
            if (row < 0) continue;
            const Vector values = reinterpret_cast<const Vector*>(y)[static_cast<long long>(row) * vectors + i];
#pragma unroll
            for (int e = 0; e < kSize; ++e) sum[e] = fmaf(weight, to_float(values.element[e]), sum[e]);
        }
        Vector total;
        if (residual != nullptr) total = reinterpret_cast<const Vector*>(residual)[token * vectors + i];
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
            total.element[e] = from_float<ELEMENT>(residual == nullptr ? sum[e] : sum[e] + to_float(total.element[e]));
        }
        reinterpret_cast<Vector*>(out)[token * vectors + i] = total;
    }
}

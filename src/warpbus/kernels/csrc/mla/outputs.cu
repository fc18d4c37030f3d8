// The heads' outputs of multi-head latent attention: parts of mla/attention.cu added up and multiplied with values' weights.
//
// Computes out[row, head] = round(sum of parts) of_values[head]^T: the sum is rounded to ELEMENT, products are added in
// float32 and rounded once.
//
// Shapes and layout
//   part_values, part_weights  float [rows, heads, parts, kRank], float2 [rows, heads, parts]: exponent and sum of weights
//   positions  int [rows]: a row has parts up to number position / part_keys
//   kv_b       [heads, head_stride / kRank, kRank] ELEMENT; of each head the last value_dim rows are of_values
//   out        [rows, heads, value_dim] ELEMENT, contiguous; value_dim is a multiple of VALUES
//   group      parts that are added up first: kBatch; or 1 where parts are groups
//   All begin at multiples of 16 bytes.
//
// Macros: ELEMENT, __half or __nv_bfloat16; VALUES, 32 or 64: the rows of of_values of a block.
// Grid: (heads * value_dim / VALUES, tiles of kTile rows), 512 threads. A block fetches its weights before the kernel
// ahead has ended. Dynamic shared memory: Memory.
#include "attention/combine.cuh"
#include "common/tile.cuh"
#include "mla/shape.cuh"

constexpr int kTile = 16;  // rows of a block
constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kColumnPairs = VALUES / 16;
constexpr int kSplits = 4;  // of the features of the latent, in two halves each: products are added up in this order
constexpr int kHalves = kWarps / kColumnPairs / kSplits;  // warps that share a split
constexpr int kHalfSteps = kRank / 16 / kSplits / 2;
constexpr int kRowThreads = kRank / 4;  // that add up a row
constexpr int kBatch = 8;               // parts whose loads are under way together: those of a group

struct Memory {
    ELEMENT weights[VALUES * kRank];
    ELEMENT attended[kTile * kRank];
    float sums[kSplits * kHalves][kTile][VALUES + 4];
};

using attention::Sum;

__device__ __forceinline__ Sum nothing() { return {{0.0f, 0.0f, 0.0f, 0.0f}, 0.0f, attention::minus_infinity()}; }

// The sum of two results at the larger exponent: as finish_unit in mla/attention.cu.
__device__ __forceinline__ void add(Sum& sum, const Sum& next) {
    const float joined = fmaxf(sum.exponent, next.exponent);
    const float keep = attention::power_of_two(sum.exponent - joined);
    const float take = attention::power_of_two(next.exponent - joined);
    sum.values.x = fmaf(next.values.x, take, sum.values.x * keep);
    sum.values.y = fmaf(next.values.y, take, sum.values.y * keep);
    sum.values.z = fmaf(next.values.z, take, sum.values.z * keep);
    sum.values.w = fmaf(next.values.w, take, sum.values.w * keep);
    sum.weight = fmaf(next.weight, take, sum.weight * keep);
    sum.exponent = joined;
}

// The kernel ahead writes parts and may write positions: not __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_outputs(const float* part_values, const float2* part_weights, const int* positions,
                const ELEMENT* __restrict__ kv_b, ELEMENT* out, long long head_stride, int rows, int heads,
                int value_dim, int parts, int part_keys, int group) {
    extern __shared__ __align__(128) unsigned char shared[];
    Memory& memory = *reinterpret_cast<Memory*>(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int blocks_of_head = value_dim / VALUES;
    const int head = blockIdx.x / blocks_of_head, first_value = blockIdx.x % blocks_of_head * VALUES;
    const int first_row = blockIdx.y * kTile;
    const int count = min(kTile, rows - first_row);
    const ELEMENT* from = kv_b + (head + 1) * head_stride - static_cast<long long>(value_dim - first_value) * kRank;
    for (int i = threadIdx.x; i < VALUES * kRank / kChunk; i += kThreads) {
        const int row = i / (kRank / kChunk), chunk = i % (kRank / kChunk);
        ptx::cp_async_16(ptx::shared_address(memory.weights + chunk_offset<kRank>(row, chunk)),
                         from + row * kRank + chunk * kChunk);
    }
    ptx::cp_async_commit();
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const int dim = threadIdx.x % kRowThreads * 4;
    for (int row = threadIdx.x / kRowThreads; row < kTile; row += kThreads / kRowThreads) {
        Sum all = nothing();
        if (row < count) {
            const long long first = (static_cast<long long>(first_row + row) * heads + head) * parts;
            const int last = positions[first_row + row] / part_keys;
            for (int part = 0; part <= last; part += kBatch) {
                Sum batch[kBatch];
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    const long long at = first + min(part + i, last);
                    const float2 weight = part_weights[at];
                    const float4 values = *reinterpret_cast<const float4*>(part_values + at * kRank + dim);
                    batch[i] = {values, weight.y, part + i <= last ? weight.x : attention::minus_infinity()};
                }
                if (group == 1) {
#pragma unroll
                    for (int i = 0; i < kBatch; ++i) add(all, batch[i]);
                } else {  // a group is a batch
                    Sum of_group = nothing();
#pragma unroll
                    for (int i = 0; i < kBatch; ++i) add(of_group, batch[i]);
                    add(all, of_group);
                }
            }
        } else {
            all.weight = 1.0f;
        }
        ELEMENT* to = memory.attended + chunk_offset<kRank>(row, dim / kChunk) + dim % kChunk;
        attention::store_normalized(to, all);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    const int pair = warp % kColumnPairs, share = warp / kColumnPairs;
    float products[2][4];
#pragma unroll
    for (int half = 0; half < 2 / kHalves; ++half) {
        float partial[2][4] = {};
#pragma unroll
        for (int i = 0; i < kHalfSteps; ++i) {
            const int step = (share * (2 / kHalves) + half) * kHalfSteps + i;
            ptx::uint32 a[4], b[4];
            load_block<kRank, Second::below, false>(a, memory.attended, 0, 16 * step);
            load_block<kRank, Second::right, false>(b, memory.weights, 16 * pair, 16 * step);
            ptx::mma_m16n8k16<ELEMENT>(partial[0], a, b[0], b[1]);
            ptx::mma_m16n8k16<ELEMENT>(partial[1], a, b[2], b[3]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            products[i / 4][i % 4] = half == 0 ? partial[i / 4][i % 4] : products[i / 4][i % 4] + partial[i / 4][i % 4];
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // i % 2: which eight columns; i / 2: which eight rows
        float* to = &memory.sums[share][lane / 4 + i / 2 * 8][16 * pair + i % 2 * 8 + 2 * (lane % 4)];
        *reinterpret_cast<float2*>(to) = make_float2(products[i % 2][i / 2 * 2], products[i % 2][i / 2 * 2 + 1]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * VALUES / 2; i += kThreads) {
        const int row = i / (VALUES / 2), column = i % (VALUES / 2) * 2;
        float2 sum = {0.0f, 0.0f};
#pragma unroll
        for (int split = 0; split < kSplits; ++split) {
            float2 x = *reinterpret_cast<const float2*>(&memory.sums[split * kHalves][row][column]);
            if constexpr (kHalves == 2) {
                const float2 y = *reinterpret_cast<const float2*>(&memory.sums[split * 2 + 1][row][column]);
                x = make_float2(x.x + y.x, x.y + y.y);
            }
            sum = make_float2(sum.x + x.x, sum.y + x.y);
        }
        const long long at = (static_cast<long long>(first_row + row) * heads + head) * value_dim;
        *reinterpret_cast<unsigned int*>(out + at + first_value + column) = pack_pair<ELEMENT>(sum.x, sum.y);
    }
}

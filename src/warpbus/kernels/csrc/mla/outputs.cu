// The heads' outputs of multi-head latent attention: parts of mla/sm80_attention.cu added up and multiplied with values' weights.
//
// Computes out[row, head] = round(sum of parts) of_values[head]^T: the sum is rounded to ELEMENT, products are added in
// float32 and rounded once.
//
// Shapes and layout
//   part_values, part_weights  float [rows, heads, parts, kRank], float2 [rows, heads, parts]: exponent and sum of weights
//   positions  int [rows]: a row has parts up to number position / part_keys
//   kv_b       [heads, head_stride / kRank, kRank] ELEMENT; of each head the last value_dim rows are of_values
//   out        [rows, heads, value_dim] ELEMENT, contiguous; value_dim is a multiple of kValues
//   group      parts that are added up first: kBatch; or 1 where parts are groups
//   All begin at multiples of 16 bytes.
//
// Macro ELEMENT: __half or __nv_bfloat16.
// Grid: (heads * value_dim / kValues, tiles of kTile rows), 512 threads. A block fetches its weights before the kernel
// ahead has ended. Dynamic shared memory: Memory. Each tile reads the weights again: for many rows mla_combine leaves the
// product to a kernel of its own.
#include "attention/combine.cuh"
#include "common/tile.cuh"
#include "mla/shape.cuh"

constexpr int kTile = 16;    // rows of a block
constexpr int kValues = 32;  // rows of of_values of a block
constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kColumnPairs = kValues / 16;
constexpr int kSplits = kWarps / kColumnPairs;  // of the features of the latent, among warps with the same columns
constexpr int kSplitSteps = kRank / 16 / kSplits;
constexpr int kRowThreads = kRank / 4;  // that add up a row
constexpr int kSlots = kThreads / kRowThreads;
constexpr int kMostGroups = 8;          // of a row: units of a row over those of a group
constexpr int kBatch = 8;               // parts whose loads are in flight together: those of a group

struct Memory {
    ELEMENT weights[kValues * kRank];
    ELEMENT attended[kTile * kRank];
    float sums[kSplits][kTile][kValues + 4];
};

using attention::Sum;

__device__ __forceinline__ Sum nothing() { return {{0.0f, 0.0f, 0.0f, 0.0f}, 0.0f, attention::minus_infinity()}; }

// The sum of two results at the larger exponent: as finish_unit in mla/sm80_attention.cu.
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

// The parts of a row and head: of a thread's four features, and up to number `last`.
struct Parts {
    const float* values;
    const float2* weights;
    int last;
};

// Parts whose loads are in flight together.
struct Batch {
    Sum parts[kBatch];

    // The parts from `first` on. Where there is none, the last one is loaded, and counts nothing.
    __device__ __forceinline__ void load(const Parts& from, int first) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int part = min(first + i, from.last);
            const float2 weight = from.weights[part];
            const float4 values = *reinterpret_cast<const float4*>(from.values + static_cast<long long>(part) * kRank);
            parts[i] = {values, weight.y, first + i <= from.last ? weight.x : attention::minus_infinity()};
        }
    }

    // Add them to those of the row: one by one where they are groups, else as the group that they are.
    __device__ __forceinline__ void add_to(Sum& all, int group) const {
        if (group == 1) {
#pragma unroll
            for (int i = 0; i < kBatch; ++i) add(all, parts[i]);
        } else {
            Sum sum = nothing();
#pragma unroll
            for (int i = 0; i < kBatch; ++i) add(sum, parts[i]);
            add(all, sum);
        }
    }
};

// The groups of one row.
struct Groups {
    float4 values[kMostGroups][kRowThreads];
    float2 weights[kMostGroups];
};
static_assert(sizeof(Groups) <= sizeof(Memory::sums), "the groups of a row take the place of the products");

// The previous kernel writes parts and may write positions: no __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_outputs(const float* part_values, const float2* part_weights, const int* positions,
                const ELEMENT* __restrict__ kv_b, ELEMENT* out, long long head_stride, int rows, int heads,
                int value_dim, int parts, int part_keys, int group) {
    extern __shared__ __align__(128) unsigned char shared[];
    Memory& memory = *reinterpret_cast<Memory*>(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int blocks_of_head = value_dim / kValues;
    const int head = blockIdx.x / blocks_of_head, first_value = blockIdx.x % blocks_of_head * kValues;
    const int first_row = blockIdx.y * kTile;
    const int count = min(kTile, rows - first_row);
    const ELEMENT* from = kv_b + (head + 1) * head_stride - static_cast<long long>(value_dim - first_value) * kRank;
    for (int i = threadIdx.x; i < kValues * kRank / kChunk; i += kThreads) {
        const int row = i / (kRank / kChunk), chunk = i % (kRank / kChunk);
        ptx::cp_async_16(ptx::shared_address(memory.weights + chunk_offset<kRank>(row, chunk)),
                         from + row * kRank + chunk * kChunk);
    }
    ptx::cp_async_commit();
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const int dim = threadIdx.x % kRowThreads * 4, slot = threadIdx.x / kRowThreads;
    const auto parts_of = [&](int row) {
        const long long first = (static_cast<long long>(first_row + row) * heads + head) * parts;
        return Parts{part_values + first * kRank + dim, part_weights + first, positions[first_row + row] / part_keys};
    };
    const auto store = [&](int row, const Sum& all) {
        ELEMENT* to = memory.attended + chunk_offset<kRank>(row, dim / kChunk) + dim % kChunk;
        attention::store_normalized(to, all);
    };
    if (count == 1 && group > 1) {  // the slots share the groups of the only row
        const Parts own = parts_of(0);
        Groups& groups = *reinterpret_cast<Groups*>(&memory.sums);
        for (int number = slot; number * kBatch <= own.last; number += kSlots) {
            Sum all = nothing();
            Batch batch;
            batch.load(own, number * kBatch);
            batch.add_to(all, group);
            groups.values[number][dim / 4] = all.values;
            groups.weights[number] = make_float2(all.exponent, all.weight);
        }
        __syncthreads();
        Sum all = nothing();
        for (int number = 0; number * kBatch <= own.last; ++number) {
            const float2 weight = groups.weights[number];
            add(all, {groups.values[number][dim / 4], weight.y, weight.x});
        }
        for (int row = slot; row < kTile; row += kSlots) {
            store(row, row == 0 ? all : Sum{{0.0f, 0.0f, 0.0f, 0.0f}, 1.0f, 0.0f});
        }
        __syncthreads();  // the groups have been read
    } else {
        Parts next = parts_of(min(slot, count - 1));
        Batch ahead;
        ahead.load(next, 0);
#pragma unroll 1
        for (int row = slot; row < kTile; row += kSlots) {
            Sum all = {{0.0f, 0.0f, 0.0f, 0.0f}, 1.0f, 0.0f};
            if (row < count) {
                const Parts own = next;
                Batch batch = ahead;
                next = parts_of(min(row + kSlots, count - 1));
                ahead.load(next, 0);  // while this row is added up
                all = nothing();
                batch.add_to(all, group);
                for (int part = kBatch; part <= own.last; part += kBatch) {
                    batch.load(own, part);
                    batch.add_to(all, group);
                }
            }
            store(row, all);
        }
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    const int pair = warp % kColumnPairs, split = warp / kColumnPairs;
    float products[2][4] = {};
#pragma unroll
    for (int i = 0; i < kSplitSteps; ++i) {
        const int step = split * kSplitSteps + i;
        ptx::uint32 a[4], b[4];
        load_block<kRank, Second::below, false>(a, memory.attended, 0, 16 * step);
        load_block<kRank, Second::right, false>(b, memory.weights, 16 * pair, 16 * step);
        ptx::mma_m16n8k16<ELEMENT>(products[0], a, b[0], b[1]);
        ptx::mma_m16n8k16<ELEMENT>(products[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // i % 2: which eight columns; i / 2: which eight rows
        float* to = &memory.sums[split][lane / 4 + i / 2 * 8][16 * pair + i % 2 * 8 + 2 * (lane % 4)];
        *reinterpret_cast<float2*>(to) = make_float2(products[i % 2][i / 2 * 2], products[i % 2][i / 2 * 2 + 1]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * kValues / 2; i += kThreads) {
        const int row = i / (kValues / 2), column = i % (kValues / 2) * 2;
        float2 sum = {0.0f, 0.0f};
#pragma unroll
        for (int part = 0; part < kSplits; ++part) {
            const float2 x = *reinterpret_cast<const float2*>(&memory.sums[part][row][column]);
            sum = make_float2(sum.x + x.x, sum.y + x.y);
        }
        const long long at = (static_cast<long long>(first_row + row) * heads + head) * value_dim;
        *reinterpret_cast<unsigned int*>(out + at + first_value + column) = pack_pair<ELEMENT>(sum.x, sum.y);
    }
}

// Only the sums of parts, rounded: attended [rows, heads, kRank] ELEMENT, contiguous. Grid: (heads, rows), kRowThreads
// threads.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    mla_combine(const float* part_values, const float2* part_weights, const int* positions, ELEMENT* attended,
                int heads, int parts, int part_keys, int group) {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const int dim = threadIdx.x * 4;
    const long long index = static_cast<long long>(blockIdx.y) * heads + blockIdx.x;
    const Parts own = {part_values + index * parts * kRank + dim, part_weights + index * parts,
                       positions[blockIdx.y] / part_keys};
    Sum all = nothing();
    for (int part = 0; part <= own.last; part += kBatch) {
        Batch batch;
        batch.load(own, part);
        batch.add_to(all, group);
    }
    attention::store_normalized(attended + index * kRank + dim, all);
}

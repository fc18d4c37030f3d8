// The products of a mixture of experts: which rows of x are multiplied by which expert's weights.
//
// The experts' weights are contiguous: the first `resident` experts in GPU memory, the others in pinned host memory, which
// kernels read over the link. Each token has `per_token` slots, one per expert that it is routed to. Slot `s`, counted over
// all tokens, belongs to token s / per_token and expert `experts[s]`. The work of a kernel is divided into items:
//
//   by slot    (tiles null, slots 1)          item s: row s / per_token of x times the expert of slot s, to row s of out
//   by token   (tiles null, slots per_token)  item t: the sum over the slots s of token t of row s of x times the expert of
//              slot s, to row t of out
//              With expert parallelism the slots of experts of other processes are negative; they add nothing.
//   by tile    item i: tiles[i] = {expert, first row, rows, 0}: rows of x, which is sorted by expert, to the same rows of
//              out. tiles[-1].x is the number of items, because the host that launches the kernel does not know it.
#pragma once
#include "common/ptx.cuh"

// The operands of a product: the expert's number, and the first row of x.
struct Source {
    int expert = 0, row = 0;
};

struct Rows {
    int first, count;  // of out
};

struct Items {
    const int* experts;   // of each slot
    const int4* tiles;    // or null
    const float* factors; // of the rows of out; or null
    int count;            // number of items; with tiles, read from the device
    int per_token;
    int slots;   // whose products are summed in an item
    int shared_expert;  // the expert of each token's first slot; -1: none
    int early;   // `experts` was written before the previous kernel began
    int resident;  // number of experts whose weights are in GPU memory
    int partial;   // whether some `experts` are negative

    // One product of all rows, without experts.
    __device__ __forceinline__ bool dense() const { return experts == nullptr && tiles == nullptr; }
};

// One product of all rows, without experts.
__device__ __forceinline__ Items one_item() { return {nullptr, nullptr, nullptr, 1, 1, 1, -1, 1, 0, 0}; }

// Whether the expert of an item's first slot is known before the previous kernel has ended.
__device__ __forceinline__ bool is_known(const Items& items, int item) {
    if (items.tiles != nullptr) return false;
    return items.early != 0 || (items.shared_expert >= 0 && items.slots == 1 && item % items.per_token == 0);
}

// Reads the number of items. Called after the previous kernel has ended.
__device__ __forceinline__ void count_items(Items& items) {
    if (items.tiles != nullptr) items.count = items.tiles[-1].x;
}

// The row of x of a slot of an item, without tiles.
__device__ __forceinline__ int row_of_slot(const Items& items, int item, int slot) {
    return items.slots > 1 ? item * items.slots + slot : item / items.per_token;
}

__device__ __forceinline__ Source source_of(const Items& items, int item, int slot) {
    if (items.dense()) return {};
    if (items.tiles != nullptr) return {items.tiles[item].x, items.tiles[item].y};
    const int s = item * items.slots + slot;
    const bool first = items.shared_expert >= 0 && s % items.per_token == 0;
    return {first ? items.shared_expert : items.experts[s], row_of_slot(items, item, slot)};
}

// Whether a slot of an item belongs to an expert of another process.
__device__ __forceinline__ bool is_elsewhere(const Items& items, int item, int slot) {
    return items.partial != 0 && source_of(items, item, slot).expert < 0;
}

__device__ __forceinline__ Rows rows_of_item(const Items& items, int item) {
    if (items.tiles != nullptr) return {items.tiles[item].y, items.tiles[item].z};
    return {item, 1};
}

// The factor of a row of out; that of a shared expert is 1, and its place in `factors` may not be written yet.
__device__ __forceinline__ float factor_of(const Items& items, int row) {
    const bool shared = items.shared_expert >= 0 && row % items.per_token == 0;
    return items.factors == nullptr || shared ? 1.0f : items.factors[row];
}

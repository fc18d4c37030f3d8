// The products of a mixture of experts: which rows of x are multiplied by which expert's weights.
//
// The weights of experts lie one behind the other: those of the first `resident` ones in the GPU's memory, those of all others
// in pinned memory of the host, which kernels read across the link between the two. A token has `per_token` slots, one per expert that it passes through;
// slot `s` of all tokens (s / per_token is the token) has the expert `experts[s]`. What a kernel computes is cut into items:
//
//   by slot    (tiles null, slots 1)          item s: the row s / per_token of x times the expert of slot s, to row s of out
//   by token   (tiles null, slots per_token)  item t: the sum over the token's slots s of the row s of x times the expert of
//              slot s, to row t of out.
//   by tile    item i: tiles[i] = {expert, first row, rows, 0}: rows of x, which is sorted by expert, to the same rows of
//              out. There are tiles[-1].x items: kernels are launched by a host that does not know how many.
#pragma once
#include "common/ptx.cuh"

// Where the operands of a product come from: the expert's number, and the first row of x.
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
    int count;            // of items; with tiles not known to the host
    int per_token;
    int slots;   // whose products are added in an item
    int shared_expert;  // that each token's first slot has; -1: there is none
    int early;   // `experts` was written before the kernel ahead began
    int resident;  // experts whose weights lie in the GPU's memory
};

// One product of all rows, with no experts.
__device__ __forceinline__ Items one_item() { return {nullptr, nullptr, nullptr, 1, 1, 1, -1, 1, 0}; }

// Whether the expert of an item's first slots is known before the kernel ahead has ended.
__device__ __forceinline__ bool is_known(const Items& items, int item) {
    if (items.tiles != nullptr) return false;
    return items.early != 0 || (items.shared_expert >= 0 && items.slots == 1 && item % items.per_token == 0);
}

// Called when the kernel ahead has ended.
__device__ __forceinline__ void count_items(Items& items) {
    if (items.tiles != nullptr) items.count = items.tiles[-1].x;
}

__device__ __forceinline__ Source source_of(const Items& items, int item, int slot) {
    if (items.tiles != nullptr) return {items.tiles[item].x, items.tiles[item].y};
    const int s = item * items.slots + slot;
    const bool first = items.shared_expert >= 0 && s % items.per_token == 0;
    return {first ? items.shared_expert : items.experts[s], items.slots > 1 ? s : s / items.per_token};
}

__device__ __forceinline__ Rows rows_of_item(const Items& items, int item) {
    if (items.tiles != nullptr) return {items.tiles[item].y, items.tiles[item].z};
    return {item, 1};
}

__device__ __forceinline__ float factor_of(const Items& items, int row) {
    return items.factors == nullptr ? 1.0f : items.factors[row];
}

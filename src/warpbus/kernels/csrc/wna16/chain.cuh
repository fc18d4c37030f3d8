// The links of `wna16/chain.cu`, the barriers between them, and how blocks share their work.
#pragma once
#include "moe/choice.cuh"
#include "step/chunk.cuh"
#include "wna16/decode_products.cuh"

constexpr int kMostLinks = 6;
constexpr int kMostSlots = 48;  // of the experts of all tokens

enum Kind {
    kDense,   // a product
    kRouter,  // the router's logits: norm(x) times its weight, and nothing of `weight`
    kSlots,   // the products gate and up of the chosen experts, of the x that the router's link has normed
    kTokens,  // the products down of the chosen experts, summed over those of a token
};

struct Link {
    Weight weight;
    const ELEMENT* x;
    const ELEMENT* norm;      // or null
    const ELEMENT* bias;      // or null
    const ELEMENT* residual;  // or null
    ELEMENT* out;
    Problem p;     // of experts: m is 1
    int x_stride;  // from a row of x to the next one, elements
    int kind;      // Kind
    int first;     // the block that computes the first pair of tiles
};

// The router of a chain of experts. Its logits are shared between blocks through global memory; each block chooses by itself.
struct Router {
    Choice choice;
    const ELEMENT* weight;  // [experts, hidden], aligned to 16 bytes
    const float* bias;      // [experts], or null
    float* logits;          // [tokens, experts]
};

struct Chain {
    Link links[kMostLinks];
    Router router;
    int tokens;   // with experts
    int count;    // of links
    int x_bytes;  // of shared memory for x in the largest link, a multiple of 1,024
};

// The experts that this block has chosen, and room for choosing them, in shared memory.
struct Chosen {
    int experts[kMostSlots];
    float weights[kMostSlots];
    // Then: logits and biases [experts] float, keys [experts + groups + top_k] unsigned.
    __device__ __forceinline__ float* logits() { return reinterpret_cast<float*>(this + 1); }
};

// Experts of a token.
__device__ __forceinline__ int slots_of(const Chain& chain) {
    return chain.router.choice.shared_expert + chain.router.choice.top_k;
}

// What a link multiplies: the items of experts.cuh.
__device__ __forceinline__ Items items_of(const Link& link, const Chosen* chosen, const Chain& chain) {
    Items items = one_item();
    items.resident = 0x7fffffff;  // nothing is offloaded
    if (!EXPERTS || link.kind == kDense || link.kind == kRouter) return items;
    const bool by_token = link.kind == kTokens;
    items.experts = chosen->experts;
    items.factors = by_token ? nullptr : chosen->weights;
    items.per_token = slots_of(chain);
    items.count = by_token ? chain.tokens : chain.tokens * items.per_token;
    items.slots = by_token ? items.per_token : 1;
    items.shared_expert = chain.router.choice.shared_expert ? chain.router.choice.experts_of_layer : -1;
    items.early = 0;
    return items;
}

// The pairs of tiles of this block in a link.
__device__ __forceinline__ Work work_of(const Link& link) {
    const int index = static_cast<int>(blockIdx.x) - link.first;
    return {index < 0 ? index + static_cast<int>(gridDim.x) : index};
}

// How many finisher warps of a block store something in a link.
__device__ __forceinline__ int storing_warps(const Link& link) {
    return EXPERTS && link.kind != kDense ? 1 : min(FINISHERS, link.p.m);
}

// Until all blocks have stored link number `link`. One thread calls it.
__device__ __forceinline__ void wait_for(int link, const int* counters, const Chain& chain) {
    const int arrivals = gridDim.x * storing_warps(chain.links[link]);
    while (ptx::load_acquire(counters + link) < arrivals) {
    }
}

// Clears the counters that nobody reads any more, but for the last two. One thread of the grid calls it when all blocks have
// stored link number `link`, for one link after another: before that, each of them has seen the link before complete.
__device__ __forceinline__ void clear_before(int link, int* counters) {
    if (link > 0) counters[link - 1] = 0;
}

// Clears the last counter that blocks wait for, once all have. One thread of a block calls it, after its own wait: the last
// link's counter counts them, and wraps around to zero.
__device__ __forceinline__ void clear_last(int* counters, const Chain& chain) {
    auto* passed = reinterpret_cast<unsigned int*>(counters + chain.count - 1);
    if (atomicInc(passed, gridDim.x - 1) == gridDim.x - 1) counters[chain.count - 2] = 0;
}

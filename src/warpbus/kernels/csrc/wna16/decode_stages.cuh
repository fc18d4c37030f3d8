// The stages of weights of `wna16/decode.cu` in shared memory: their layout, the tiles of a block, and the producer warp, which
// fills them. The macros are those of decode.cu.
#pragma once
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "wna16/dequantize.cuh"
#include "wna16/experts.cuh"

using Packed = Codes<ELEMENT, BITS>;
constexpr int kThreads = 32 * WARPS;  // of the consumer warps
constexpr int kTokenTiles = TOKENS / 8;
constexpr bool kAtOnce = kTokenTiles == 1;  // load all fragments of x ahead; 16 tokens need too many registers
constexpr int kMostStages = 8;
constexpr int kLoads = Packed::kLoads;
constexpr int kChunk = 64;
constexpr int kRound = WARPS * SPAN;      // chunks that the consumer warps multiply at a time
constexpr int kStep = ROUNDS * kRound;  // chunks per stage, a power of two
constexpr int kLine = 2 * kChunk;  // bytes of one token's x per chunk
constexpr int kParts = 8;          // at most, of x: the chunks of one step each, the last one all that remain

struct Problem {
    int m, n, k;     // m: with experts, the rows of x that one copy loads
    int chunks;      // chunks of 64 columns per row
    int groups;      // scales per row
    int shift;       // a group has 2^shift chunks
    int middle;      // the code of zero in a symmetric scheme
    int gate_tiles;  // row tiles of the gate, or 0
    int stages;      // stages of the ring buffer
    int streamed;    // x is loaded with the weights, stage by stage; otherwise all of it stays in shared memory
    float eps;
};

struct Weight {
    const uint4* codes;
    const ptx::uint32* scales;  // pairs: rows g and g + 8
    const ptx::uint32* zeros;   // same layout; null if the scheme is symmetric
};

struct alignas(128) Stage {
    alignas(16) ptx::uint32 codes[2][kStep][kLoads][32 * Packed::kLoadWords];
    ptx::uint32 scales[2][kStep * GROUPS + 1][8];
    ptx::uint32 zeros[2][kStep * GROUPS + 1][8];
};

struct Barriers {
    ptx::uint64 full[kMostStages], empty[kMostStages], x[kParts], finished;
};

constexpr int kSums = WARPS * 2 * kTokenTiles * 32;  // number of float4 values
static_assert(sizeof(Stage) == STAGE_BYTES, "the host asks for stages of another size");
static_assert(kSums * sizeof(float4) + sizeof(Barriers) + WARPS * TOKENS * sizeof(float) == OTHER_BYTES,
              "the host asks for other room for sums, barriers and squares");

__device__ __forceinline__ int tile_of(int pair, int which, const Problem& p) {
    const int tiles = (p.n + 15) / 16;
    return p.gate_tiles > 0 ? pair + which * p.gate_tiles : min(2 * pair + which, tiles - 1);
}

__device__ __forceinline__ int pairs_of(const Problem& p) {
    return p.gate_tiles > 0 ? p.gate_tiles : ((p.n + 15) / 16 + 1) / 2;
}

// The first group of a chunk.
__device__ __forceinline__ int group_of(int chunk, const Problem& p) {
    return GROUPS == 2 ? 2 * chunk : chunk >> p.shift;
}

// A pair of row tiles that a block computes; with experts, of one item.
struct Work {
    int index = blockIdx.x;

    __device__ __forceinline__ bool there(const Items& items, const Problem& p) const {
        return index < items.count * pairs_of(p);
    }
    __device__ __forceinline__ void advance() { index += gridDim.x; }
    __device__ __forceinline__ int item(const Problem& p) const { return EXPERTS ? index / pairs_of(p) : 0; }
    __device__ __forceinline__ int pair(const Problem& p) const { return EXPERTS ? index % pairs_of(p) : index; }
};

// The position of a stage in the work of a block: the pair of tiles, the expert slot if several experts' products are added,
// and the first of up to kStep chunks.
struct Step {
    Work work;
    int pair, slot = 0, chunk = 0;
    Source source;

    __device__ __forceinline__ explicit Step(const Problem& p, Work from = {}) : work(from), pair(work.pair(p)) {}
    __device__ __forceinline__ bool there(const Items& items, const Problem& p) const { return work.there(items, p); }
    // Sets the rows of x and the expert of this step. Requires that `there` is true and that the routing is known.
    __device__ __forceinline__ void find(const Items& items, const Problem& p) {
        if (EXPERTS && chunk == 0) source = source_of(items, work.item(p), slot);
    }
    // Whether this step's expert is one of another process, for which nothing is loaded or multiplied.
    __device__ __forceinline__ bool elsewhere() const { return EXPERTS && source.expert < 0; }
    __device__ __forceinline__ void advance(const Items& items, const Problem& p) {
        chunk += kStep;
        if (chunk < p.chunks) return;
        chunk = 0;
        if (EXPERTS && ++slot < items.slots) return;
        slot = 0;
        work.advance();
        pair = work.pair(p);
    }
};

__device__ __forceinline__ int steps_of(const Problem& p) { return (p.chunks + kStep - 1) / kStep; }

// Bytes of x per step: kStep chunks of all rows, chunk after chunk, swizzled, with zeros beyond the last chunk.
__device__ __forceinline__ int step_bytes(const Problem& p) { return kStep * p.m * kLine; }

// `offloaded` holds the experts from number `resident` on.
__device__ __forceinline__ void load_weights(Stage& stage, ptx::uint32 full, const Weight& weight, const Weight& offloaded,
                                             int resident, const Step& step, const Problem& p) {
    const int chunks = min(kStep, p.chunks - step.chunk);
    const int group = group_of(step.chunk, p);
    const int groups = group_of(step.chunk + chunks - 1, p) + GROUPS - group;
    const int code_bytes = chunks * 128 * BITS;
    const int scale_bytes = groups * 32;
    const int x_bytes = p.streamed ? step_bytes(p) : 0;
    const bool far = EXPERTS && step.source.expert >= resident;
    const Weight& from = far ? offloaded : weight;
    const int expert = step.source.expert - (far ? resident : 0);
    ptx::mbarrier_expect(full, 2 * (code_bytes + scale_bytes * (weight.zeros == nullptr ? 1 : 2)) + x_bytes);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int tile = (EXPERTS ? expert * ((p.n + 15) / 16) : 0) + tile_of(step.pair, r, p);
        const uint4* codes = from.codes + (static_cast<long long>(tile) * p.chunks + step.chunk) * 8 * BITS;
        const int at = (tile * p.groups + group) * 8;
        ptx::bulk_load(ptx::shared_address(stage.codes[r]), codes, code_bytes, full);
        ptx::bulk_load(ptx::shared_address(stage.scales[r]), from.scales + at, scale_bytes, full);
        if (weight.zeros != nullptr) {
            ptx::bulk_load(ptx::shared_address(stage.zeros[r]), from.zeros + at, scale_bytes, full);
        }
    }
}

// Loads all of x, in parts.
__device__ __forceinline__ void load_parts(ptx::uint32 target, ptx::uint32 barriers, const ptx::TensorMap& x,
                                           const Problem& p) {
    const int steps = steps_of(p);
    for (int i = 0; i < steps; ++i) {
        const ptx::uint32 barrier = barriers + 8 * min(i, kParts - 1);
        if (i < kParts) ptx::mbarrier_expect(barrier, (i == kParts - 1 ? steps - i : 1) * step_bytes(p));
        ptx::tma_load(target + i * step_bytes(p), &x, barrier, 0, 0, i * kStep);
    }
}

// Shared-memory addresses of the barriers.
struct Addresses {
    ptx::uint32 full, empty, x, finished;
};

// A position in the ring buffer: the stage, and the parity of its barriers' current phase.
struct Ring {
    int slot = 0, parity = 0;

    __device__ __forceinline__ void advance(const Problem& p) {
        if (++slot == p.stages) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// The producer warp, run by one thread. Weights are not written by earlier kernels, so it loads the first stages before the
// previous kernel has ended; with experts, only if the routing is already known.
__device__ __forceinline__ void produce(Stage* stages, ptx::uint32 staged, const Addresses& at, const Weight& weight,
                                        const Weight& offloaded, const ptx::TensorMap& x, bool in_parts, Items items, const Problem& p) {
    Step ahead(p);
    int asked = 0;
    for (; asked < p.stages && ahead.there(items, p) && is_known(items, ahead.work.item(p)); ahead.advance(items, p)) {
        ahead.find(items, p);
        if (ahead.elsewhere()) continue;
        load_weights(stages[asked], at.full + 8 * asked, weight, offloaded, items.resident, ahead, p);
        ++asked;
    }
    ptx::griddepcontrol_wait();
    count_items(items);
    Step behind(p);
    if (in_parts && behind.there(items, p)) load_parts(staged, at.x, x, p);
    Ring ring;
    for (int i = 0; i < asked; behind.advance(items, p)) {
        behind.find(items, p);
        if (behind.elsewhere()) continue;
        if (p.streamed) ptx::tma_load(staged + i * step_bytes(p), &x, at.full + 8 * i, 0, behind.source.row, behind.chunk);
        ++i;
        ring.advance(p);
    }
    for (; ahead.there(items, p); ahead.advance(items, p)) {
        const ptx::uint32 full = at.full + 8 * ring.slot;
        ahead.find(items, p);
        if (ahead.elsewhere()) continue;
        ptx::mbarrier_wait(at.empty + 8 * ring.slot, ring.parity ^ 1);
        load_weights(stages[ring.slot], full, weight, offloaded, items.resident, ahead, p);
        if (p.streamed) ptx::tma_load(staged + ring.slot * step_bytes(p), &x, full, 0, ahead.source.row, ahead.chunk);
        ring.advance(p);
    }
}

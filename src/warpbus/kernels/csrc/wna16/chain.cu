// Consecutive products of a decoder layer in one launch. A product (link) reads what the links before it have written: o, gate
// and up, down, and the next layer's projections; or, with a mixture of experts, o, the router, the chosen experts, and so on.
//
// Each link: out [m, n] = epilogue(norm(x) [m, k] weight [n, k]^T) for up to TOKENS rows of x, as decode.cu computes it, with
// the same bits where WARPS are the same. Unlike there, all of x lies in shared memory, and k is a multiple of 8.
//
// Macros: those of decode.cu, with RESIDENT 1. EXPERTS 1: there may be a router and experts. Then a link of experts reads each
// row of x by itself, and dense links have no gate.
//
// Why one launch. A kernel that follows another waits until the last block of that one has ended, and cannot ask for weights
// before its own blocks have room: one to two microseconds per kernel in which nothing is read. Here blocks stay. One producer
// warp reads the weights of all links, stage by stage, through one ring buffer. It never waits for a link to end, so that the
// next link's first stages arrive while the blocks wait for each other. Only for the router it waits, as it cannot know the
// experts before.
//
// The barrier between links. The grid has at most as many blocks as can run at the same time, which the host guarantees. When a
// block has stored its part of a link, it adds to the link's counter, once for each of its warps that stored something; one
// thread of each block reads the counter until all have. Counters are zero before and after the kernel (chain.cuh).
//
// Pairs of tiles are dealt to the blocks round robin across links (`Link::first`), so that no block has more in every link.
//
// The router. Each logit is computed by one warp of the grid. The logits are exchanged through global memory, and the producer
// warp of each block chooses the experts by itself, which takes less time than another barrier.
#include "wna16/chain.cuh"

// Named barrier: the consumers have seen the previous link complete.
constexpr int kPrevious = 3;
constexpr int kFollowers = 32 + 32 * FINISHERS;  // threads there: one consumer warp and the finishers

struct Shared {
    ELEMENT* staged;   // x
    Stage* stages;
    float4* sums;      // [WARPS][2][kTokenTiles][32]
    float* squares;    // [WARPS][TOKENS]
    Chosen* chosen;
    Addresses at;      // `x` is the barrier of the chosen experts
};

// ---- The producer warp ----

// Chooses the experts of all tokens, once the logits are there. The whole warp calls it.
__device__ __forceinline__ void choose_experts(const Shared& shared, int link, const Chain& chain, const int* counters) {
    const Router& router = chain.router;
    const int lane = threadIdx.x % 32, count = router.choice.experts_of_layer;
    float* const logits = shared.chosen->logits();
    float* const biases = logits + count;
    unsigned* const keys = reinterpret_cast<unsigned*>(biases + count);
    Choice choice = router.choice;
    if (blockIdx.x != 0) choice.counts = nullptr;  // each choice is counted once
    if (lane == 0) wait_for(link, counters, chain);
    __syncwarp();
    for (int token = 0; token < chain.tokens; ++token) {
        for (int e = lane; e < count; e += 32) logits[e] = __ldcg(router.logits + token * count + e);
        __syncwarp();
        const int slot = token * slots_of(chain);
        choose(logits, keys, router.bias == nullptr ? nullptr : biases, shared.chosen->experts + slot,
               shared.chosen->weights + slot, choice);
        __syncwarp();
    }
    if (lane == 0) ptx::mbarrier_arrive(shared.at.x);
}

__device__ __forceinline__ void load_links(const Shared& shared, const Chain& chain, const int* counters) {
    const int lane = threadIdx.x % 32;
    if (EXPERTS && chain.router.bias != nullptr) {
        float* const biases = shared.chosen->logits() + chain.router.choice.experts_of_layer;
        for (int e = lane; e < chain.router.choice.experts_of_layer; e += 32) biases[e] = chain.router.bias[e];
        __syncwarp();
    }
    Ring ring;
    for (int i = 0; i < chain.count; ++i) {
        const Link& link = chain.links[i];
        if (EXPERTS && link.kind == kRouter) continue;
        const Problem& p = link.p;
        const Items items = items_of(link, shared.chosen, chain);
        bool known = !EXPERTS || link.kind != kSlots;
        for (Step step(p, work_of(link)); step.there(items, p); step.advance(items, p)) {
            if (EXPERTS && !known && !is_known(items, step.work.item(p))) {
                choose_experts(shared, i - 1, chain, counters);
                known = true;
            }
            step.find(items, p);
            if (lane == 0) {
                const ptx::uint32 full = shared.at.full + 8 * ring.slot;
                ptx::mbarrier_wait(shared.at.empty + 8 * ring.slot, ring.parity ^ 1);
                load_weights(shared.stages[ring.slot], full, link.weight, {}, items.resident, step, p);
            }
            ring.advance(p);
        }
        if (EXPERTS && !known) choose_experts(shared, i - 1, chain, counters);
    }
}

// ---- The finisher warps ----

__device__ __forceinline__ void finish_links(const Shared& shared, const Chain& chain, int* counters) {
    const float* const sums = reinterpret_cast<const float*>(shared.sums);
    const int own = threadIdx.x / 32 - WARPS - 1, lane = threadIdx.x % 32;
    for (int i = 0; i < chain.count; ++i) {
        const Link& link = chain.links[i];
        if (i > 0) {
            ptx::named_barrier(kPrevious, kFollowers);
            if (i + 1 == chain.count && own == 0 && lane == 0) clear_last(counters, chain);
        }
        if (EXPERTS && link.kind == kRouter) continue;
        const Items items = items_of(link, shared.chosen, chain);
        finish(sums, shared.at, link.bias, link.residual, link.out, work_of(link), items, link.p);
        if (i + 1 == chain.count || own >= storing_warps(link) || lane != 0) continue;
        // Nobody reads the router's counter any more when the experts' link is complete.
        if (EXPERTS && link.kind == kSlots) ptx::mbarrier_wait(shared.at.x, 0);
        ptx::add_release(counters + i, 1);
    }
}

// ---- The consumer warps ----

// This block's logits of the router: warp w of block b computes those of number (w + i WARPS) gridDim.x + b, which is that of
// the expert plus that of the token times the experts. Lanes take every 32nd vector of 8 columns; sums have the order of
// moe/router.cu.
struct Logits {
    static constexpr int kAhead = 8;  // vectors of the weight that a lane has in flight

    const Router& router;
    int number, count, vectors;

    __device__ __forceinline__ Logits(const Chain& chain, int k)
        : router(chain.router), number(static_cast<int>(threadIdx.x) / 32 * gridDim.x + blockIdx.x),
          count(chain.tokens * chain.router.choice.experts_of_layer), vectors(k / 8) {}

    __device__ __forceinline__ bool there() const { return number < count; }
    __device__ __forceinline__ const Vector* row() const {
        const long long expert = number % router.choice.experts_of_layer;
        return reinterpret_cast<const Vector*>(router.weight) + expert * vectors;
    }

    // Brings the weight into L2, before x is known.
    __device__ __forceinline__ void prefetch() const {
        if (!there()) return;
        for (int i = 8 * (threadIdx.x % 32); i < vectors; i += 8 * 32) step::prefetch_l2(row() + i);
    }

    // Stores the logits, x being in shared memory.
    __device__ __forceinline__ void compute(ELEMENT* staged, const Problem& p) {
        const int lane = threadIdx.x % 32;
        for (; there(); number += WARPS * gridDim.x) {
            const Vector* const weight = row();
            const int token = number / router.choice.experts_of_layer;
            ELEMENT* const x = staged + token * (steps_of(p) * step_bytes(p) / 2);
            float sum = 0.0f;
            for (int first = lane; first < vectors; first += 32 * kAhead) {
                uint4 part[kAhead];
#pragma unroll
                for (int j = 0; j < kAhead; ++j) {
                    part[j] = __ldcg(reinterpret_cast<const uint4*>(weight + (first + 32 * j < vectors ? first + 32 * j : 0)));
                }
#pragma unroll
                for (int j = 0; j < kAhead; ++j) {
                    if (first + 32 * j >= vectors) break;
                    const Vector a = *vector_at(x, 0, 8 * (first + 32 * j), p);
                    const Vector b = *reinterpret_cast<const Vector*>(&part[j]);
#pragma unroll
                    for (int e = 0; e < 8; ++e) sum = fmaf(to_float(a.element[e]), to_float(b.element[e]), sum);
                }
            }
            sum = warp_sum(sum);
            if (lane == 0) router.logits[number] = sum;
        }
    }
};

// Copies `rows` rows of x, contiguous, to shared memory, each by itself as a product of one row reads it.
__device__ __forceinline__ void stage_each(ELEMENT* staged, const ELEMENT* x, int rows, const Problem& p) {
    constexpr int kAhead = 4;
    const int of_row = p.chunks * (kChunk / 8), total = rows * of_row;
    const int place = steps_of(p) * step_bytes(p) / 2;
    for (int begin = threadIdx.x; begin < total; begin += kAhead * kThreads) {
        Vector values[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int i = begin + j * kThreads, row = i / of_row, at = 8 * (i % of_row);
            values[j] = load_x(x + static_cast<long long>(row) * p.k + at, i < total && at < p.k);
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int i = begin + j * kThreads;
            if (i < total) *vector_at(staged + i / of_row * place, 0, 8 * (i % of_row), p) = values[j];
        }
    }
    sync_consumers();
}

// Writes x of a link to shared memory, unless it is there.
__device__ __forceinline__ void stage_link(const Shared& shared, const Link& link, const Vector& norm_weight,
                                           const Chain& chain) {
    const Problem& p = link.p;
    if (EXPERTS && link.kind == kSlots) return;
    if (EXPERTS && link.kind == kTokens) {
        stage_each(shared.staged, link.x, chain.tokens * slots_of(chain), p);
        return;
    }
    const int rows = EXPERTS && link.kind == kRouter ? chain.tokens : 1;
    for (int row = 0; row < rows; ++row) {  // of the router; other links have their rows together
        ELEMENT* const staged = shared.staged + row * (steps_of(p) * step_bytes(p) / 2);
        const ELEMENT* const x = link.x + static_cast<long long>(row) * link.x_stride;
        if (link.norm == nullptr) stage_x(staged, shared.squares, x, link.x_stride, p);
        else stage_normed(staged, shared.squares, x, link.x_stride, link.norm, norm_weight, p);
    }
}

template <bool Joint, bool Symmetric>
__device__ __forceinline__ void multiply_links(const Shared& shared, const Chain& chain, int* counters) {
    Progress progress;
    for (int i = 0; i < chain.count; ++i) {
        const Link& link = chain.links[i];
        const Problem& p = link.p;
        const bool routes = EXPERTS && link.kind == kRouter;
        const Vector norm_weight = load_vector(link.norm + 8 * threadIdx.x, link.norm != nullptr && 8 * threadIdx.x < p.k);
        Logits logits(chain, p.k);
        if (routes) logits.prefetch();
        if (i == 0) {
            ptx::griddepcontrol_wait();
        } else {
            if (threadIdx.x == 0) {
                wait_for(i - 1, counters, chain);
                if (blockIdx.x == 0) clear_before(i - 1, counters);
            }
            sync_consumers();  // no warp of this block reads the previous x any more, and all see what the links wrote
            if (threadIdx.x < 32) ptx::named_barrier_arrive(kPrevious, kFollowers);
        }
        const Items items = items_of(link, shared.chosen, chain);
        const Work work = work_of(link);
        // The experts' link reads what the router's has written to shared memory.
        if (!routes && !work.there(items, p)) continue;
        stage_link(shared, link, norm_weight, chain);
        if (routes) {
            logits.compute(shared.staged, p);
            sync_consumers();
            if (threadIdx.x == 0) ptx::add_release(counters + i, 1);
            continue;
        }
        const Reader reader = make_reader(shared.stages, shared.staged, p);
        multiply_pairs<Joint, Symmetric>(progress, reader, shared.sums, shared.at, false, work, items, p);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads + 32 * (1 + FINISHERS), 1)
    wna16_chain(const __grid_constant__ Chain chain, int* counters) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Problem& p = chain.links[0].p;
    Stage* const stages = reinterpret_cast<Stage*>(memory + chain.x_bytes);
    float4* const sums = reinterpret_cast<float4*>(stages + p.stages);
    Barriers* const barriers = reinterpret_cast<Barriers*>(sums + kSums);
    float* const squares = reinterpret_cast<float*>(barriers + 1);
    const Addresses at = {ptx::shared_address(barriers->full), ptx::shared_address(barriers->empty),
                          ptx::shared_address(barriers->x), ptx::shared_address(&barriers->finished)};
    const Shared shared = {reinterpret_cast<ELEMENT*>(memory), stages, sums, squares,
                           reinterpret_cast<Chosen*>(squares + WARPS * TOKENS), at};
    const int warp = threadIdx.x / 32;

    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; ++i) {
            ptx::mbarrier_init(at.full + 8 * i, 1);
            ptx::mbarrier_init(at.empty + 8 * i, WARPS);
        }
        ptx::mbarrier_init(at.x, 1);
        ptx::mbarrier_init(at.finished, FINISHERS);
        ptx::mbarrier_fence_init();
    }
    __syncthreads();

    if (warp == WARPS) {
        load_links(shared, chain, counters);
        return;
    }
    if (warp > WARPS) {
        ptx::griddepcontrol_wait();
        finish_links(shared, chain, counters);
        return;
    }
    const bool joint = SPAN == 2 && GROUPS == 1 && p.shift > 0;
    const bool symmetric = chain.links[0].weight.zeros == nullptr;
    if (joint && symmetric) multiply_links<true, true>(shared, chain, counters);
    else if (joint) multiply_links<true, false>(shared, chain, counters);
    else if (symmetric) multiply_links<false, true>(shared, chain, counters);
    else multiply_links<false, false>(shared, chain, counters);
}

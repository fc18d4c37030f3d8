// Several products of `wna16/decode.cu` in one launch, one after another: the linear layers of a decoder layer around its
// MLP. A product (link) reads what the links before it have written.
//
// Each link: out [m, n] = epilogue(norm(x) [m, k] weight [n, k]^T) for up to TOKENS rows of x, as decode.cu computes it, with
// the same bits. Unlike there, all of x lies in shared memory, and k is a multiple of 8.
//
// Macros: those of decode.cu, with EXPERTS 0 and RESIDENT 1.
//
// Why one launch. A kernel that follows another waits until the last block of that one has ended, and cannot ask for weights
// before its own blocks have room: one to two microseconds per kernel in which nothing is read. Here blocks stay. One producer
// warp reads the weights of all links, stage by stage, through one ring buffer. It never waits for a link to end, so that the
// next link's first stages arrive while the blocks wait for each other.
//
// The barrier between links. The grid has at most as many blocks as can run at the same time, which the host guarantees. When a
// block has stored its part of a link, each of its finisher warps that had a token adds one to the link's counter; one thread
// of each block reads the counter until all have. Counters are zero before and after the kernel: who has seen link i complete
// knows that all blocks have seen link i - 1 complete, so that block 0 clears that counter; the last one is cleared by the last
// block that has seen it.
//
// Pairs of tiles are dealt to the blocks round robin across links (`Link::first`), so that no block has more in every link.
#include "wna16/decode_products.cuh"

constexpr int kMostLinks = 4;
constexpr int kPrevious = 3;  // named barrier: the consumers have seen the previous link complete

struct Link {
    Weight weight;
    const ELEMENT* x;
    const ELEMENT* norm;      // or null
    const ELEMENT* bias;      // or null
    const ELEMENT* residual;  // or null
    ELEMENT* out;
    Problem p;
    int first;  // the block that computes the first pair of tiles
};

struct Chain {
    Link links[kMostLinks];
    int count;    // of links
    int x_bytes;  // of shared memory for the largest x, a multiple of 1,024
};

// The pairs of tiles of this block in a link.
__device__ __forceinline__ Work work_of(const Link& link) {
    const int index = static_cast<int>(blockIdx.x) - link.first;
    return {index < 0 ? index + static_cast<int>(gridDim.x) : index};
}

// Until all blocks have stored link number `link`. One thread of a block calls it, for one link after another.
__device__ __forceinline__ void wait_for(int link, int* counters, const Chain& chain) {
    const int arrivals = gridDim.x * min(FINISHERS, chain.links[link].p.m);
    while (ptx::load_acquire(counters + link) < arrivals) {
    }
    if (link > 0 && blockIdx.x == 0) counters[link - 1] = 0;
}

// Clears the last counter that blocks wait for, once all have. One thread of a block calls it, after its own wait: the last
// link's counter counts them, and wraps around to zero.
__device__ __forceinline__ void clear_last(int* counters, const Chain& chain) {
    auto* passed = reinterpret_cast<unsigned int*>(counters + chain.count - 1);
    if (atomicInc(passed, gridDim.x - 1) == gridDim.x - 1) counters[chain.count - 2] = 0;
}

__device__ __forceinline__ void load_links(Stage* stages, const Addresses& at, const Chain& chain) {
    const Items items = one_item();
    Ring ring;
    for (int i = 0; i < chain.count; ++i) {
        const Link& link = chain.links[i];
        const Problem& p = link.p;
        for (Step step(p, work_of(link)); step.there(items, p); step.advance(items, p)) {
            ptx::mbarrier_wait(at.empty + 8 * ring.slot, ring.parity ^ 1);
            load_weights(stages[ring.slot], at.full + 8 * ring.slot, link.weight, {}, 0, step, p);
            ring.advance(p);
        }
    }
}

__device__ __forceinline__ void finish_links(const float* sums, const Addresses& at, const Chain& chain, int* counters) {
    const int own = threadIdx.x / 32 - WARPS - 1;  // the first token of this warp
    for (int i = 0; i < chain.count; ++i) {
        const Link& link = chain.links[i];
        if (i > 0) {
            ptx::named_barrier(kPrevious, 32 + 32 * FINISHERS);
            if (i + 1 == chain.count && threadIdx.x == kThreads + 32) clear_last(counters, chain);
        }
        finish(sums, at, link.bias, link.residual, link.out, work_of(link), one_item(), link.p);
        if (i + 1 < chain.count && own < link.p.m && threadIdx.x % 32 == 0) ptx::add_release(counters + i, 1);
    }
}

template <bool Joint, bool Symmetric>
__device__ __forceinline__ void multiply_links(ELEMENT* staged, const Stage* stages, float4* sums, float* squares,
                                               const Addresses& at, const Chain& chain, int* counters) {
    const Items items = one_item();
    Progress progress;
    for (int i = 0; i < chain.count; ++i) {
        const Link& link = chain.links[i];
        const Problem& p = link.p;
        const Vector norm_weight = load_vector(link.norm + 8 * threadIdx.x, link.norm != nullptr && 8 * threadIdx.x < p.k);
        if (i == 0) {
            ptx::griddepcontrol_wait();
        } else {
            if (threadIdx.x == 0) wait_for(i - 1, counters, chain);
            sync_consumers();  // no warp of this block reads the previous x any more, and all see what the links wrote
            if (threadIdx.x < 32) ptx::named_barrier_arrive(kPrevious, 32 + 32 * FINISHERS);
        }
        const Work work = work_of(link);
        if (!work.there(items, p)) continue;
        if (link.norm != nullptr) stage_normed(staged, squares, link.x, link.norm, norm_weight, p);
        else stage_x(staged, squares, link.x, p);
        multiply_pairs<Joint, Symmetric>(progress, make_reader(stages, staged, p), sums, at, false, work, items, p);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads + 32 * (1 + FINISHERS), 1)
    wna16_chain(const __grid_constant__ Chain chain, int* counters) {
    // x; the stages; sums [WARPS][2][kTokenTiles][32]; then what is declared below.
    extern __shared__ __align__(1024) unsigned char memory[];
    const Problem& p = chain.links[0].p;
    ELEMENT* const staged = reinterpret_cast<ELEMENT*>(memory);
    Stage* const stages = reinterpret_cast<Stage*>(memory + chain.x_bytes);
    float4* const sums = reinterpret_cast<float4*>(stages + p.stages);
    Barriers* const barriers = reinterpret_cast<Barriers*>(sums + kSums);
    float* const squares = reinterpret_cast<float*>(barriers + 1);  // [WARPS][TOKENS]
    const Addresses at = {ptx::shared_address(barriers->full), ptx::shared_address(barriers->empty),
                          ptx::shared_address(barriers->x), ptx::shared_address(&barriers->finished)};
    const int warp = threadIdx.x / 32;

    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; ++i) {
            ptx::mbarrier_init(at.full + 8 * i, 1);
            ptx::mbarrier_init(at.empty + 8 * i, WARPS);
        }
        ptx::mbarrier_init(at.finished, FINISHERS);
        ptx::mbarrier_fence_init();
    }
    __syncthreads();

    if (warp == WARPS) {
        if (threadIdx.x % 32 == 0) load_links(stages, at, chain);
        return;
    }
    if (warp > WARPS) {
        ptx::griddepcontrol_wait();
        finish_links(reinterpret_cast<const float*>(sums), at, chain, counters);
        return;
    }
    const bool joint = SPAN == 2 && GROUPS == 1 && p.shift > 0;
    const bool symmetric = chain.links[0].weight.zeros == nullptr;
    if (joint && symmetric) multiply_links<true, true>(staged, stages, sums, squares, at, chain, counters);
    else if (joint) multiply_links<true, false>(staged, stages, sums, squares, at, chain, counters);
    else if (symmetric) multiply_links<false, true>(staged, stages, sums, squares, at, chain, counters);
    else multiply_links<false, false>(staged, stages, sums, squares, at, chain, counters);
}

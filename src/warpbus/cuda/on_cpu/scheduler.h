// Runs the threads of blocks: each is a fiber on one thread of the CPU, which runs until it waits or ends.
//
// Blocks run one after the other, or, in a cooperative launch, from one barrier of the grid to the next. A thread that
// waits in a loop for what another one writes lets the others run after some rounds; if all that is left to run are
// such loops, blocks of a cooperative launch take turns.
#pragma once

#include <chrono>

#include "wgmma.h"

namespace warpbus {

constexpr unsigned kMostIdle = 1000;  // rounds

inline void enter() {
    (*body)();
    end_stores();
    end_products();
    end_in_cluster();
    current->ended = true;
    ++progress;
    swapcontext(&running().context, &scheduler);
}

inline std::string waiting(const Fiber &fiber) {
    return field("waiting", fiber.thread) + field("what", fiber.what) + field("line", fiber.line);
}

[[noreturn]] inline void stop_at_mbarrier(const Fiber &fiber) {
    const Mbarrier &of = barriers.mbarriers[fiber.barrier];
    stop("mbarrier_stuck", place() + waiting(fiber) + shared_place(fiber.barrier) + field("parity", of.phase & 1) +
         field("pending", of.pending) + field("expected", of.expected) + field("bytes", of.bytes));
}

// Explain a wait of a part of the block, if there is one: no thread can go on.
inline void explain_stuck(unsigned threads) {
    const auto waits = [&](Waits kind) {
        return std::find_if(fibers.begin(), fibers.begin() + threads, [&](const Fiber &each) { return !each.ended && each.waits == kind; });
    };
    const auto end = fibers.begin() + threads;
    if (const auto fiber = waits(Waits::warpgroup); fiber != end) {
        const unsigned first = fiber->number / kWarpgroup * kWarpgroup;
        for (unsigned i = first; i < first + kWarpgroup; ++i) {
            const Fiber *its = i < threads ? &fibers[i] : nullptr;
            if (its && !its->ended && its->waits == Waits::warpgroup && its->line == fiber->line) continue;
            stop("warpgroup", place() + waiting(*fiber) + field("missing", thread_of(i)) +
                 (!its ? field("state", "not there") : its->ended ? field("state", "returned")
                  : field("state", "waits") + field("its_what", its->what) + field("its_line", its->line)));
        }
    }
    if (auto fiber = waits(Waits::phase); fiber != end) {
        // An mbarrier at which some have arrived says more than one at which nobody has.
        const auto begun = std::find_if(fibers.begin(), end, [](const Fiber &each) {
            if (each.ended || each.waits != Waits::phase) return false;
            const Mbarrier &of = barriers.mbarriers[each.barrier];
            return of.pending != of.expected || of.bytes != 0;
        });
        stop_at_mbarrier(begun != end ? *begun : *fiber);
    }
    if (const auto fiber = waits(Waits::cluster); fiber != end)
        stop("cluster_stuck", place() + waiting(*fiber) + field("arrived", own_cluster_barrier().arrived) +
             field("expected", threads * cluster_blocks() - own_cluster_barrier().ended));
    if (const auto fiber = waits(Waits::named); fiber != end) {
        const NamedBarrier &of = barriers.named[fiber->barrier];
        stop("named_stuck", place() + waiting(*fiber) + field("number", fiber->barrier) + field("arrived", of.arrived) +
             field("expected", of.expected));
    }
}

// Lanes that asked which ones are with them (mask 0) learn it when no lane of the warp can go on: those at the same line.
inline bool release_converged(unsigned first, unsigned count) {
    const auto asks = [](const Fiber &fiber) { return !fiber.ended && fiber.waits == Waits::warp && !fiber.mask; };
    for (unsigned lane = 0; lane < count; ++lane) {
        const Fiber &fiber = fibers[first + lane];
        if (!asks(fiber)) continue;
        unsigned together = 0;
        const int line = fiber.line;
        for (unsigned other = 0; other < count; ++other)
            together |= unsigned{asks(fibers[first + other]) && fibers[first + other].line == line} << other;
        for (unsigned other = 0; other < count; ++other) {
            if (!(together >> other & 1)) continue;
            fibers[first + other].got = together;
            fibers[first + other].waits = Waits::nothing;
        }
        return true;
    }
    return false;
}

// Whether what a thread waits for may happen while its warp waits for it.
inline bool may_go_on(const Fiber &fiber) {
    return !fiber.ended && (fiber.waits == Waits::named || fiber.waits == Waits::warpgroup || fiber.waits == Waits::phase ||
                            fiber.waits == Waits::cluster || fiber.waits == Waits::spin);
}

// Let the lanes of a warp run until all of them have ended or wait for threads of other warps. `last`: none of those
// waits can end.
inline void run_warp(unsigned first, unsigned count, bool reverse, bool last) {
    for (;;) {
        bool ran = false;
        for (unsigned i = 0; i < count; ++i) {
            Fiber &fiber = fibers[first + (reverse ? count - 1 - i : i)];
            if (fiber.ended || fiber.waits != Waits::nothing) continue;
            ran = true;
            current = &fiber;
            swapcontext(&scheduler, &fiber.context);
        }
        if (ran) continue;
        // All lanes wait or have ended. A group of lanes that names itself in the same mask goes on.
        bool released = false;
        const Fiber *stuck = nullptr, *missing = nullptr;
        for (unsigned lane = 0; lane < count && !released; ++lane) {
            const Fiber &fiber = fibers[first + lane];
            if (fiber.ended || fiber.waits != Waits::warp || !fiber.mask) continue;
            const unsigned mask = count == kWarp ? fiber.mask : fiber.mask & ((1u << count) - 1);
            const Fiber *absent = mask >> lane & 1 ? nullptr : &fiber;
            for (unsigned other = 0; other < count && absent != &fiber; ++other) {
                const Fiber &its = fibers[first + other];
                const bool there = !its.ended && its.waits == Waits::warp && its.mask == fiber.mask && its.what == fiber.what;
                if ((mask >> other & 1) && !there && (!absent || (may_go_on(*absent) && !may_go_on(its)))) absent = &its;
            }
            if (absent) {
                if (!stuck && (last || !may_go_on(*absent))) stuck = &fiber, missing = absent;
                continue;
            }
            uint64_t ballot = 0;
            for (unsigned other = 0; other < count; ++other)
                if (mask >> other & 1) ballot |= uint64_t{fibers[first + other].given != 0} << other;
            for (unsigned other = 0; other < count; ++other) {
                Fiber &its = fibers[first + other];
                if (!(mask >> other & 1)) continue;
                const unsigned source = its.source;
                its.got = source == kWarp ? ballot : source < count && !fibers[first + source].ended
                          ? fibers[first + source].given : its.given;
                its.waits = Waits::nothing;
            }
            if (!strcmp(fiber.what, "__syncwarp()")) check_warp_barrier(first / kWarp);
            released = true;
            ++progress;
        }
        if (released || release_converged(first, count)) continue;
        if (stuck)
            stop("warp", place() + waiting(*stuck) + field("mask", stuck->mask) + field("missing", missing->thread) +
                 (missing == stuck ? field("state", "not in its own mask") : missing->ended ? field("state", "returned")
                  : field("state", "waits") + field("its_what", missing->what) + field("its_line", missing->line)));
        return;
    }
}

// How long nothing has happened but waiting loops.
struct Idle {
    uint64_t before = progress;
    unsigned rounds = 0;
    std::chrono::steady_clock::time_point since;

    // A round of all threads has ended: whether nothing happened in it.
    bool lasts() {
        if (progress != before) rounds = 0;
        if (++rounds == 1) since = std::chrono::steady_clock::now();
        before = progress;
        return rounds > 1;
    }
    bool too_long() const {
        return rounds > kMostIdle && std::chrono::steady_clock::now() - since > std::chrono::seconds(2);
    }
};

inline std::string spinning(const Fiber &fiber) {
    return place(fiber) + field("what", fiber.what) +
           (fiber.line ? field("line", fiber.line) : field("pc", reinterpret_cast<uintptr_t>(fiber.pc) - 1));
}

// Run the current block to its end, or to a barrier of the grid. `shared`: other blocks can run if it only waits for them.
inline Ran run_block(unsigned threads, bool reverse, bool cooperative, bool shared) {
    const unsigned warps = (threads + kWarp - 1) / kWarp;
    const auto begin = fibers.begin(), end = begin + threads;
    const auto run_warps = [&](bool last) {
        for (unsigned i = 0; i < warps; ++i) {
            const unsigned first = (reverse ? warps - 1 - i : i) * kWarp;
            run_warp(first, std::min(kWarp, threads - first), reverse, last);
        }
    };
    Idle idle;
    for (;;) {
        run_warps(false);
        release_phases(threads);
        release_warpgroups(threads);
        release_cluster(threads);
        if (std::any_of(begin, end, [](const Fiber &each) { return !each.ended && each.waits == Waits::nothing; })) {
            ++progress;
            continue;
        }
        const auto spins = [](const Fiber &each) { return !each.ended && each.waits == Waits::spin; };
        if (const auto first = std::find_if(begin, end, spins); first != end) {
            const bool lasts = idle.lasts();
            // Those that do not test an mbarrier may wait for another block.
            const auto others = std::find_if(first, end, [&](const Fiber &each) { return spins(each) && !each.barrier; });
            if (idle.too_long()) {
                if (others == end) stop_at_mbarrier(*first);
                if (!shared) stop(cooperative ? "spin" : "spin_launch", spinning(*others));
            }
            for (auto each = first; each != end; ++each)
                if (spins(*each)) each->waits = Waits::nothing;
            if (lasts && shared && others != end) return Ran::spinning;
            continue;
        }
        if (shared && std::any_of(begin, end, [](const Fiber &each) {
                return !each.ended && (each.waits == Waits::phase || each.waits == Waits::cluster);
            })) return Ran::waiting;
        explain_stuck(threads);
        run_warps(true);
        const Fiber *waits = nullptr, *ended = nullptr;
        unsigned at_barrier = 0;
        for (unsigned i = 0; i < threads; ++i) {
            const Fiber &fiber = fibers[i];
            if (fiber.ended) {
                if (!ended) ended = &fiber;
                continue;
            }
            if (waits && waits->line != fiber.line)
                stop("divergent", place() + waiting(*waits) + field("other", fiber.thread) + field("its_line", fiber.line));
            if (!waits) waits = &fiber;
            ++at_barrier;
        }
        if (waits && ended)
            stop("barrier", place() + waiting(*waits) + field("count", at_barrier) + field("ended", threads - at_barrier) +
                 field("returned", ended->thread));
        check_barrier();
        ++phase;
        ++progress;
        if (!waits || waits->waits == Waits::grid) print_block();
        if (!waits) {
            end_barriers();
            return Ran::ended;
        }
        if (waits->waits == Waits::grid) {
            if (!cooperative) stop("grid_launch", place() + field("line", waits->line));
            return Ran::at_grid;
        }
        uint64_t sum = 0;
        for (unsigned i = 0; i < threads; ++i) sum += fibers[i].given != 0;
        for (unsigned i = 0; i < threads; ++i) {
            fibers[i].got = sum;
            fibers[i].waits = Waits::nothing;
        }
    }
}

// Writes that hit the rest of an allocation's pages, before its begin or right behind its end, are found after the kernel.
inline void check_ends() {
    for (const auto &[key, each] : allocations)
        for (const char *at = each.pages; at < each.pages + each.mapped; ++at) {
            if (at == each.begin) at += each.size;
            if (at < each.pages + each.mapped && static_cast<unsigned char>(*at) != kPadding)
                stop("padding", field("kernel", kernel) + outside(each, at));
        }
}

inline void begin_block(unsigned threads) {
    if (fibers.size() < threads) fibers.resize(threads);
    barriers = {};
    for (const SharedArray &each : shared_arrays) memset(each.begin, kUnwritten, each.size);
    for (unsigned i = 0; i < threads; ++i) {
        Fiber &fiber = fibers[i];
        if (!fiber.stack) fiber.stack = new_stack();
        fiber.number = i;
        fiber.thread = thread_of(i);
        fiber.waits = Waits::nothing;
        fiber.ended = false;
        fiber.given = 0;
        fiber.warp_instructions = 0;
        fiber.spins = 0;
        fiber.barrier = 0;
        fiber.cluster_arrived = false;
        fiber.copies.clear();
        fiber.batches = 0;
        fiber.store_groups = fiber.product_groups = 0;
        fiber.wgmma_fenced = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    check_block();
}

inline void suspend_block(Resident &block) {
    for (size_t i = 0; i < shared_arrays.size(); ++i) memcpy(kept_array(block, i), shared_arrays[i].begin, shared_arrays[i].size);
    check_suspend();
}

inline void resume_block(const Resident &block, unsigned threads) {
    for (size_t i = 0; i < block.shared.size(); ++i)
        if (block.shared[i]) memcpy(shared_arrays[i].begin, block.shared[i], shared_arrays[i].size);
    if (block.ran == Ran::at_grid)
        for (unsigned i = 0; i < threads; ++i) fibers[i].waits = Waits::nothing;
    check_resume();
}

inline void exchange_block(Resident &block) {
    fibers.swap(block.fibers);
    std::swap(barriers, block.barriers);
}

// Run blocks that are resident together to their ends, or, in a cooperative launch, up to a barrier of the grid, and so
// on. A block that only waits for others lets them run.
inline void run_together(unsigned count, const std::function<uint3(unsigned)> &place_of, unsigned threads, bool reverse, bool cooperative) {
    if (residents.size() < count) residents.resize(count);
    Idle idle;
    for (bool first = true, together = true;; first = false) {
        const uint64_t before = progress;
        unsigned ended = 0, at_grid = 0, returned = 0, waiting = 0;
        const Resident *spins = nullptr, *stuck = nullptr;
        for (unsigned i = 0; i < count; ++i) {
            Resident &block = residents[i];
            if (first || block.ran == Ran::spinning || block.ran == Ran::waiting || (together && block.ran == Ran::at_grid)) {
                block_at = place_of(i);
                exchange_block(block);
                if (first) begin_block(threads);
                else resume_block(block, threads);
                block.ran = run_block(threads, reverse, cooperative, count > 1);
                if (block.ran != Ran::ended) suspend_block(block);
                exchange_block(block);
            }
            ended += block.ran == Ran::ended;
            at_grid += block.ran == Ran::at_grid;
            if (block.ran == Ran::spinning) spins = &block;
            else if (block.ran == Ran::waiting) stuck = &block;
            else (block.ran == Ran::ended ? returned : waiting) = i;
        }
        if (ended == count) return;
        together = at_grid == count;
        if (stuck && !spins && progress == before) {
            const auto number = static_cast<unsigned>(stuck - residents.data());
            block_at = place_of(number);
            exchange_block(residents[number]);
            explain_stuck(threads);
        }
        if (at_grid && ended && ended + at_grid == count)
            stop("grid", field("kernel", kernel) + field("block", place_of(waiting)) + field("returned", place_of(returned)) +
                 field("line", residents[waiting].fibers[0].line));
        if (together) check_grid_barrier();
        idle.lasts();
        if (spins && idle.too_long()) {
            block_at = place_of(static_cast<unsigned>(spins - residents.data()));
            stop("spin", spinning(*std::find_if(spins->fibers.begin(), spins->fibers.end(), [](const Fiber &each) {
                return !each.ended && each.waits == Waits::nothing;
            })));
        }
    }
}

// Run the blocks of a grid: all together, cluster by cluster, or one after the other.
inline void run_blocks(const Launch &launch, unsigned threads, bool reverse) {
    const uint3 grid = launch.grid, size = launch.cluster;
    cluster_size = size;
    cluster_barriers.clear();
    whole_grid = launch.cooperative;
    const auto place_of = [](unsigned i, uint3 of) { return uint3{i % of.x, i / of.x % of.y, i / of.x / of.y}; };
    const unsigned blocks = grid.x * grid.y * grid.z;
    if (launch.cooperative) {
        run_together(blocks, [&](unsigned i) { return place_of(i, grid); }, threads, reverse, true);
        return;
    }
    for (unsigned i = 0; i < blocks / cluster_blocks(); ++i) {
        const uint3 at = place_of(i, clusters()), origin{at.x * size.x, at.y * size.y, at.z * size.z};
        if (cluster_blocks() > 1) {
            run_together(cluster_blocks(), [&](unsigned rank) { return block_of_rank(rank, origin); }, threads, reverse, false);
        } else {
            block_at = origin;
            begin_block(threads);
            run_block(threads, reverse, false, false);
        }
        cluster_barriers.clear();
    }
}

inline void run_kernel(const Launch &launch, const std::function<void()> &call) {
    const dim3 grid = launch.grid, block = launch.block;
    const unsigned threads = block.x * block.y * block.z;
    const char *order = getenv("WARPBUS_ORDER");
    const bool reverse = order && !strcmp(order, "reverse");
    install();
    kernel = launch.name;
    body = &call;
    grid_size = grid;
    block_size = block;
    dynamic_size = launch.shared;
    if (shared_arrays.empty()) shared_arrays.push_back({});
    shared_arrays.front() = {dynamic + kGap, launch.shared, 4, "shared memory", ++launches};
    expose(true);
    check_launch();
    run_blocks(launch, threads, reverse);
    check_launch_end();
    current = nullptr;
    check_ends();
    expose(false);
}

}  // namespace warpbus

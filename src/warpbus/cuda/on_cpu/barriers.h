// Barriers of parts of a block: named barriers (bar.sync with a number) and warpgroups; and the state of all barriers of
// the block that runs. `mbarriers.h` has what mbarriers do.
#pragma once

#include "async_ptx.h"
#include "threads.h"

namespace warpbus {

constexpr unsigned kNamedBarriers = 16, kWarpgroup = 128;
constexpr int64_t kMostArrivals = (1 << 20) - 1;  // and bytes of a phase

struct NamedBarrier {
    unsigned expected, arrived;  // threads
};

struct Mbarrier {
    uint64_t phase;
    int64_t expected, pending, bytes;  // arrivals of a phase; those, and bytes of copies, that the current one waits for

    // Parity and counts, as the 8 bytes of the object and as the state that an arrival returns.
    uint64_t state() const {
        return (phase & 1) << 63 | static_cast<uint64_t>(bytes & (1 << 22) - 1) << 40 |
               static_cast<uint64_t>(expected) << 20 | static_cast<uint64_t>(pending);
    }
};

// A copy that is under way, or an arrival after copies of `cp.async`.
struct InFlight {
    uint64_t mbarrier;
    int64_t bytes, arrivals;     // that the mbarrier gets
    std::function<void()> run;
    uint3 thread;
    int line;
};

struct BlockBarriers {
    NamedBarrier named[kNamedBarriers];
    std::map<uint64_t, Mbarrier> mbarriers;
    std::vector<InFlight> in_flight;
};

inline BlockBarriers barriers;  // of the block that runs

inline unsigned block_threads() { return block_size.x * block_size.y * block_size.z; }

// The shared array and the element that an address is in.
inline std::string shared_place(uint64_t address) {
    const char *at = reinterpret_cast<const char *>(address);
    for (const SharedArray &each : shared_arrays)
        if (at >= each.begin - kGap && at < each.begin + each.size + kGap) {
            const std::ptrdiff_t bytes = at - each.begin, element = static_cast<std::ptrdiff_t>(std::max<size_t>(1, each.element));
            return field("array", each.name) + field("index", (bytes - (bytes < 0 ? element - 1 : 0)) / element);
        }
    return field("array", "") + field("index", 0);
}

// ---- named barriers

inline void release_named(unsigned number) {
    for (unsigned i = 0; i < block_threads(); ++i) {
        Fiber &fiber = fibers[i];
        if (fiber.ended || fiber.waits != Waits::named || fiber.barrier != number) continue;
        check_acquire(&barriers.named[number], i);
        fiber.waits = Waits::nothing;
    }
    barriers.named[number] = {};
    ++progress;
}

// A thread arrives at a named barrier of `count` threads, 0: all of the block, and waits for the others.
inline void arrive_named(unsigned number, unsigned count, bool waits, const char *what, int line) {
    const unsigned threads = block_threads(), all = (threads + kWarp - 1) / kWarp * kWarp;
    const auto misused = [&](const char *problem, unsigned found) {
        stop("named_misused", place(*current) + field("what", what) + field("line", line) + field("number", number) +
             field("problem", problem) + field("found", found) + field("threads", all));
    };
    if (number >= kNamedBarriers) misused("number", number);
    if (count % kWarp) misused("multiple", count);
    if (count > all) misused("many", count);
    NamedBarrier &barrier = barriers.named[number];
    const unsigned expected = count ? std::min(count, threads) : threads;
    if (barrier.arrived && barrier.expected != expected) misused("differs", expected);
    barrier.expected = expected;
    check_release(&barrier);
    if (++barrier.arrived == expected) {
        if (waits) check_acquire(&barrier, current->number);
        release_named(number);
    } else if (waits) {
        current->barrier = number;
        wait_for(Waits::named, what, line);
        current->barrier = 0;
    }
}

// ---- warpgroups

// Four warps that all wait at the same instruction go on.
inline bool release_warpgroups(unsigned threads) {
    bool released = false;
    for (unsigned first = 0; first + kWarpgroup <= threads; first += kWarpgroup) {
        const Fiber *begin = &fibers[first], *end = begin + kWarpgroup;
        if (!std::all_of(begin, end, [&](const Fiber &each) {
                return !each.ended && each.waits == Waits::warpgroup && !strcmp(each.what, begin->what) && each.line == begin->line;
            })) continue;
        for (unsigned i = first; i < first + kWarpgroup; ++i) fibers[i].waits = Waits::nothing;
        released = true;
    }
    return released;
}

namespace ptx {

void named_barrier(unsigned number, unsigned count, bool waits, const char *what, int line) {
    arrive_named(number, count, waits, what, line);
}

unsigned elect(unsigned mask, int line) {
    wait_for(Waits::warp, "elect.sync", line, mask);
    return static_cast<unsigned>(__builtin_ctz(mask));
}

// A GPU moves registers between warpgroups; here, all threads of one have to be there.
void set_max_registers(unsigned count, int line) {
    if (count < 24 || count > 256 || count % 8) stop("registers", place(*current) + field("count", count) + field("line", line));
    wait_for(Waits::warpgroup, "setmaxnreg", line);
}

void fence_proxy_async() { check_proxy_fence(); }

}  // namespace ptx

}  // namespace warpbus

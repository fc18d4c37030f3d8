// mbarriers: barriers in shared memory, for threads and asynchronous copies.
//
// Their state is in `barriers`; the 8 bytes in shared memory hold the same state as a number, so that a program that
// overwrites them is found. Copies that report to an mbarrier happen when a thread waits for its phase, no earlier: who
// reads their destination without waiting gets the old bytes.
#pragma once

#include "cluster.h"

namespace warpbus {

[[noreturn]] inline void stop_mbarrier(uint64_t at, const char *problem, const char *what, int line, int64_t number = 0) {
    stop("mbarrier_misused", place(*current) + shared_place(at) + field("what", what) + field("line", line) +
         field("problem", problem) + field("number", number));
}

inline void store_state(uint64_t at, uint64_t state) { memcpy(reinterpret_cast<void *>(at), &state, sizeof state); }

inline Mbarrier &mbarrier_at(uint64_t at, const char *what, int line) {
    const OwnedAddress place = owned_address(at);
    auto &all = barriers_of(place.rank).mbarriers;
    const auto found = all.find(place.address);
    if (found == all.end()) stop_mbarrier(at, at % 8 ? "address" : "unknown", what, line);
    uint64_t state;
    memcpy(&state, reinterpret_cast<const void *>(at), sizeof state);
    if (state != found->second.state()) stop_mbarrier(at, "overwritten", what, line);
    return found->second;
}

// A phase ends when all have arrived and all bytes are there.
inline void update(uint64_t at, Mbarrier &of) {
    if (of.pending == 0 && of.bytes == 0) {
        ++of.phase;
        of.pending = of.expected;
        ++progress;
    }
    store_state(at, of.state());
}

inline void change_bytes(uint64_t at, Mbarrier &of, int64_t bytes, const char *what, int line) {
    of.bytes += bytes;
    if (of.bytes > kMostArrivals || of.bytes < -kMostArrivals) stop_mbarrier(at, "bytes", what, line, of.bytes);
}

inline void take_arrivals(uint64_t at, Mbarrier &of, int64_t count, const char *what, int line) {
    if (count < 1 || count > kMostArrivals) stop_mbarrier(at, "count", what, line, count);
    if (count > of.pending) stop_mbarrier(at, "arrivals", what, line, of.expected);
    of.pending -= count;
}

// Whether a phase has ended: the copies that it waits for happen now, one after the other, and no others.
inline bool phase_ended(uint64_t at, uint64_t phase, const char *what, int line) {
    Mbarrier &of = mbarrier_at(at, what, line);
    auto &all = barriers.in_flight;
    while (of.phase <= phase) {
        const auto next = std::find_if(all.begin(), all.end(), [&](const InFlight &each) { return each.mbarrier == at; });
        if (next == all.end()) return false;
        const InFlight copy = std::move(*next);
        all.erase(next);
        copy.run();
        change_bytes(at, of, -copy.bytes, "a copy", copy.line);
        if (copy.arrivals) take_arrivals(at, of, copy.arrivals, "cp.async.mbarrier.arrive", copy.line);
        update(at, of);
    }
    return true;
}

inline bool release_phases(unsigned threads) {
    bool released = false;
    for (unsigned i = 0; i < threads; ++i) {
        Fiber &fiber = fibers[i];
        if (fiber.ended || fiber.waits != Waits::phase) continue;
        current = &fiber;
        if (!phase_ended(fiber.barrier, fiber.phase, fiber.what, fiber.line)) continue;
        fiber.waits = Waits::nothing;
        released = true;
    }
    return released;
}

// A block ends: what still writes to its shared memory would write to that of another one.
inline void end_barriers() {
    if (!barriers.in_flight.empty()) {
        const InFlight &each = barriers.in_flight.front();
        stop("in_flight", place() + field("waiting", each.thread) + field("line", each.line));
    }
}

namespace ptx {

void mbarrier_init(uint64_t at, uint32_t count, int line) {
    if (at % 8 || !in_shared_memory(at, 8)) stop_mbarrier(at, "address", "mbarrier.init", line);
    if (count < 1 || count > kMostArrivals) stop_mbarrier(at, "count", "mbarrier.init", line, count);
    check_mbarriers();
    Mbarrier &of = barriers.mbarriers[at] = {0, count, count, 0};
    store_state(at, of.state());
}

void mbarrier_invalidate(uint64_t at, int line) {
    mbarrier_at(at, "mbarrier.inval", line);
    barriers.mbarriers.erase(at);
}

void mbarrier_expect(uint64_t at, uint32_t bytes, int line) {
    Mbarrier &of = mbarrier_at(at, "mbarrier.expect_tx", line);
    change_bytes(at, of, bytes, "mbarrier.expect_tx", line);
    store_state(at, of.state());
}

void mbarrier_complete(uint64_t at, uint32_t bytes, int line) {
    Mbarrier &of = mbarrier_at(at, "mbarrier.complete_tx", line);
    change_bytes(at, of, -static_cast<int64_t>(bytes), "mbarrier.complete_tx", line);
    update(at, of);
}

uint64_t mbarrier_arrive(uint64_t at, uint32_t count, bool drop, bool completes, const char *what, int line) {
    Mbarrier &of = mbarrier_at(at, what, line);
    const uint64_t before = of.state();
    check_release(reinterpret_cast<const void *>(at));
    take_arrivals(at, of, count, what, line);
    if (!completes && of.pending == 0 && of.bytes == 0) stop_mbarrier(at, "completes", what, line);
    if (drop) of.expected -= count;
    ++progress;
    update(at, of);
    return before;
}

uint64_t mbarrier_arrive_expect(uint64_t at, uint32_t bytes, bool drop, const char *what, int line) {
    mbarrier_expect(at, bytes, line);
    return mbarrier_arrive(at, 1, drop, true, what, line);
}

void mbarrier_arrive_after_copies(uint64_t at, bool counted, int line) {
    Mbarrier &of = mbarrier_at(at, "cp.async.mbarrier.arrive", line);
    if (!counted && ++of.pending > kMostArrivals) stop_mbarrier(at, "count", "cp.async.mbarrier.arrive", line, of.pending);
    store_state(at, of.state());
    std::vector<DeferredCopy> copies;
    copies.swap(running().copies);
    barriers.in_flight.push_back({at, 0, 1, [at, copies, fiber = current] {
        Thread *const waits = current;
        current = fiber;  // whose accesses they are
        for (const DeferredCopy &each : copies) each.run(each);
        check_release(reinterpret_cast<const void *>(at));
        current = waits;
    }, current->thread, line});
}

bool mbarrier_wait_parity(uint64_t at, uint32_t parity, bool blocks, const char *what, int line) {
    const uint64_t phase = mbarrier_at(at, what, line).phase;
    // The phase of the other parity is the one before, which has ended.
    if ((phase & 1) == (parity & 1) && !phase_ended(at, phase, what, line)) {
        current->barrier = at;
        current->phase = phase;
        if (blocks) wait_for(Waits::phase, what, line);
        else let_others_run(what, line, nullptr);
        current->barrier = 0;
        if (!phase_ended(at, phase, what, line)) return false;
    }
    check_acquire(reinterpret_cast<const void *>(at), current->number);
    return true;
}

bool mbarrier_wait_state(uint64_t at, uint64_t state, bool blocks, const char *what, int line) {
    return mbarrier_wait_parity(at, static_cast<uint32_t>(state >> 63), blocks, what, line);
}

}  // namespace ptx

}  // namespace warpbus

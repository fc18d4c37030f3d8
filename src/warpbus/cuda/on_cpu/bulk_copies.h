// Bulk copies (cp.async.bulk): from device to shared memory, reported to an mbarrier, and back, in groups of a thread.
//
// A copy happens when a thread waits for it, no earlier, and is an access of the asynchronous proxy: what threads have
// written to shared memory is visible to it after fence.proxy.async.
#pragma once

#include "mbarriers.h"

namespace warpbus {

constexpr unsigned kBulk = 16;  // bytes, of which addresses and sizes are multiples

inline void stop_outside(const char *array, bool shared, std::ptrdiff_t bytes, size_t size, size_t element, bool writes, int line) {
    const auto step = static_cast<std::ptrdiff_t>(std::max<size_t>(1, element));
    stop("outside", place(*current) + field("array", array) + field("memory", shared ? "shared" : "device") +
         field("index", (bytes - (bytes < 0 ? step - 1 : 0)) / step) + field("count", static_cast<std::ptrdiff_t>(size) / step) +
         field("element", step) + field("writes", writes ? 1 : 0) + field("line", line));
}

[[noreturn]] inline void stop_copy(const char *problem, const char *what, uint64_t number, int line) {
    stop("copy_misused", place(*current) + field("what", what) + field("problem", problem) + field("number", number) +
         field("line", line));
}

// Bytes of shared memory that a copy accesses have to be in an array.
inline void require_shared(uint64_t address, size_t size, bool writes, const char *what, int line) {
    const char *at = reinterpret_cast<const char *>(address);
    for (const SharedArray &each : shared_arrays) {
        if (at < each.begin - kGap || at >= each.begin + each.size + kGap) continue;
        const std::ptrdiff_t from = at - each.begin, end = from + static_cast<std::ptrdiff_t>(size);
        if (from < 0 || end > static_cast<std::ptrdiff_t>(each.size))
            stop_outside(each.name, true, from < 0 ? from : end - 1, each.size, each.element, writes, line);
        return;
    }
    stop_copy("not_shared", what, address, line);
}

// Those of device memory in an allocation; variables of the program are not known.
inline void require_device(uint64_t address, size_t size, bool writes, int line) {
    const char *at = reinterpret_cast<const char *>(address);
    for (const auto &[begin, each] : allocations) {
        if (at < each.reserved || at >= each.pages + each.mapped + kGuard) continue;
        const std::ptrdiff_t from = at - each.begin, end = from + static_cast<std::ptrdiff_t>(size);
        if (from < 0 || end > static_cast<std::ptrdiff_t>(each.size))
            stop_outside(each.name.c_str(), false, from < 0 ? from : end - 1, each.size, each.element, writes, line);
    }
}

inline void require_multiples(uint64_t shared, uint64_t device, uint64_t bytes, const char *what, int line) {
    if (shared % kBulk) stop_copy("shared_address", what, shared % kBulk, line);
    if (device % kBulk) stop_copy("device_address", what, device % kBulk, line);
    if (bytes % kBulk || bytes == 0) stop_copy("size", what, bytes, line);
}

// A load into the shared memory of a block of the cluster has begun: `run` copies `bytes` when a thread of that block
// waits for its mbarrier.
inline void begin_load(unsigned rank, uint64_t mbarrier, int64_t bytes, const AsyncAccess &access, std::function<void()> run,
                       int line) {
    barriers_of(rank).in_flight.push_back({mbarrier, bytes, 0, [=] {
        run();
        check_async_end(reinterpret_cast<const void *>(mbarrier), access);
    }, current->thread, line});
}

// Where a load writes, and the mbarrier that it reports to: in the same block.
struct LoadTarget {
    unsigned rank;
    uint64_t to, mbarrier;
};
inline LoadTarget load_target(uint64_t to, uint64_t mbarrier, const char *what, int line) {
    mbarrier_at(mbarrier, what, line);
    const OwnedAddress place = owned_address(to), barrier = owned_address(mbarrier);
    if (place.rank != barrier.rank) stop_copy("other_block", what, barrier.rank, line);
    return {place.rank, place.address, barrier.address};
}

inline void begin_store(std::function<void()> run, const AsyncAccess &access, int line) {
    running().stores.push_back({std::move(run), running().store_groups, access, line});
}

// A thread ends: what its stores read may belong to another block afterwards.
inline void end_stores() {
    if (running().stores.empty()) return;
    stop("store_not_waited", place(*current) + field("line", running().stores.front().line));
}

namespace ptx {

void bulk_load(uint64_t to, uint64_t from, uint32_t bytes, uint64_t mbarrier, int line) {
    const void *pc = __builtin_return_address(0);
    require_multiples(to, from, bytes, "cp.async.bulk", line);
    const LoadTarget target = load_target(to, mbarrier, "cp.async.bulk", line);
    require_shared(target.to, bytes, true, "cp.async.bulk", line);
    require_device(from, bytes, false, line);
    const AsyncAccess access = check_async_begin(AsyncKind::copy, target.mbarrier);
    check_async_access(access, reinterpret_cast<const void *>(from), bytes, false, pc);
    if (target.rank == own_rank()) check_async_access(access, reinterpret_cast<const void *>(to), bytes, true, pc);
    begin_load(target.rank, target.mbarrier, bytes, access, [=] {
        memcpy(reinterpret_cast<void *>(target.to), reinterpret_cast<const void *>(from), bytes);
    }, line);
}

void bulk_store(uint64_t to, uint64_t from, uint32_t bytes, Join join, int line) {
    const void *pc = __builtin_return_address(0);
    require_multiples(from, to, bytes, "cp.async.bulk", line);
    require_shared(from, bytes, false, "cp.async.bulk", line);
    require_device(to, bytes, true, line);
    const AsyncAccess access = check_async_begin(AsyncKind::store, current->number);
    check_async_access(access, reinterpret_cast<const void *>(from), bytes, false, pc);
    if (join == replace) check_async_access(check_async_begin(AsyncKind::store, current->number), reinterpret_cast<const void *>(to), bytes, true, pc);
    begin_store([=] { join(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), bytes); }, access, line);
}

void bulk_prefetch(uint64_t from, uint32_t bytes, int line) {
    require_multiples(0, from, bytes, "cp.async.bulk.prefetch", line);
    require_device(from, bytes, false, line);
}

void bulk_commit() { ++running().store_groups; }

// Make the stores of all groups but the last ones. `read`: what they have written is not known to be visible.
void bulk_wait(uint32_t last, bool read) {
    Fiber &own = running();
    std::vector<BulkStore> rest;
    for (BulkStore &each : own.stores) {
        if (each.group + last < own.store_groups) {
            each.run();
            check_async_end(current->number, each.access);
        } else {
            rest.push_back(std::move(each));
        }
    }
    own.stores = std::move(rest);
    if (!read && last == 0) check_stores_end(current->number);
}

}  // namespace ptx

}  // namespace warpbus

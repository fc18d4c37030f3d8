// Checks of memory accesses: `warpbus cuda run --check` and `warpbus learn --check` compile a program with
// -fsanitize=thread, so that the compiler calls a function before each access, and link these functions instead of a
// sanitizer's. They are part of a second object file of `runtime.cpp`, which is compiled without that flag.
//
// For each element of device and shared memory a cell remembers who wrote and read it last. Two accesses of two threads
// conflict if one of them writes, not both are atomic, and nothing orders them: __syncthreads() orders the threads of a
// block, __syncwarp() those of a warp, named barriers and mbarriers those that arrive before those that wait (`clocks.h`),
// a fence and an atomic operation the threads whose atomic operations come later (a lock), and nothing the blocks of a
// kernel. Asynchronous copies and wgmma are like threads whose accesses are ordered by the wait for them. An element that is read before anything was
// written to it is remembered until the next barrier: if another thread writes it meanwhile, a barrier is missing.
//
// The same calls give the memory traffic: accesses of one instruction by the lanes of a warp, in the same round, are one
// request. A request to device memory moves sectors of 32 bytes; one to shared memory takes as many passes as a bank has
// different words.
#pragma once

#include "clocks.h"

#include <unordered_map>

namespace {

struct Visit {
    uint32_t block, interval, sync, pc, stamp, epoch;  // `block` 0: nobody
    uint16_t thread;
    bool atomic;
    uint8_t engine;  // an asynchronous access that the thread has begun, see `clocks.h`
};

// Of a thread of the block: accesses before its fence `fenced`, or `released` if an atomic operation followed at
// `released_at`, and its last atomic operation and proxy fence. The numbers are those of `stamp`.
struct Fences { uint32_t fenced, released, released_at, acquired, proxied; };

struct Cell { Visit wrote, read[2]; };

struct Region {
    char *reserved, *end;      // an access within these limits and outside of the array is a mistake
    char *begin;
    size_t size, element;
    bool shared;
    Cell *cells;
    unsigned char *written;    // of device memory, per element
    const char *name;
};

struct Access {
    uint32_t pc;
    uint16_t region;
    uint8_t size;
    bool write;
    const char *at;
};

struct Site {
    std::string array;
    bool shared, write;
    uint64_t requests, moved, least;
};

struct Request {
    unsigned count;
    Access of[32];
};

struct Unwritten {
    bool found;
    Region region;
    size_t index;
    uint32_t pc;
    uint3 thread, block;
};

std::vector<Region> regions;
size_t recent;
uint32_t serial, first_serial = 1;         // of the block, and of the first one of the launch
uint32_t blocks;                           // of the launch
uint32_t interval;                         // of barriers
uint32_t syncs[32];                        // barriers of each warp
uint32_t stamp = 1;                        // of fences and atomic operations
Fences fences[warpbus::kMostThreads];
bool unordered = true, device_unordered = true;
Unwritten unwritten;
std::vector<std::vector<Access>> logs;     // per thread of the block
std::unordered_map<uint32_t, Site> sites;
uint64_t logged;

constexpr uint64_t kMostLogged = 20'000'000;

Region *region_of(const char *at) {
    if (recent < regions.size() && at >= regions[recent].reserved && at < regions[recent].end) return &regions[recent];
    for (size_t i = 0; i < regions.size(); ++i)
        if (at >= regions[i].reserved && at < regions[i].end) {
            recent = i;
            return &regions[i];
        }
    return nullptr;
}

bool there(const Visit &visit) { return visit.block >= first_serial && visit.block != 0; }

// Whether an earlier access happens before one of the current thread.
bool ordered(const Visit &earlier, bool shared) {
    if (!there(earlier) || (shared && earlier.block != serial)) return true;
    if (earlier.block != serial) return !device_unordered;
    const unsigned own = current->number;
    if (earlier.engine) return clocks.ordered_engine(own, earlier.engine, earlier.epoch);
    if (earlier.thread == own || earlier.interval != interval) return true;
    if (clocks.ordered(own, earlier.thread, earlier.epoch)) return true;
    if (earlier.thread / 32u == own / 32 && earlier.sync < syncs[own / 32]) return true;
    const Fences &its = fences[earlier.thread];
    return its.released > earlier.stamp && fences[own].acquired > its.released_at;
}

void note_atomic() {
    Fences &own = fences[current->number];
    own.acquired = ++stamp;
    if (own.fenced > own.released) own.released = own.fenced, own.released_at = stamp;
}

std::string element(const Region &region, size_t index) {
    return field("array", region.name) + field("memory", region.shared ? "shared" : "device") + field("index", index) +
           field("count", region.size / region.element) + field("element", region.element);
}

[[noreturn]] void stop_unwritten() {
    warpbus::stop("unwritten", field("kernel", warpbus::kernel) + field("block", unwritten.block) +
                  field("thread", unwritten.thread) + element(unwritten.region, unwritten.index) + field("pc", unwritten.pc));
}

[[noreturn]] void stop_race(const Region &region, size_t index, const Visit &earlier, bool wrote, bool writes, uint32_t pc) {
    const bool same_block = earlier.block == serial;
    const uint32_t number = earlier.block - first_serial;
    const uint3 grid = warpbus::grid_size;
    const uint3 block{number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
    warpbus::stop("race", warpbus::place(*current) + element(region, index) + field("writes", writes ? 1 : 0) +
                  field("pc", pc) + field("its_block", same_block ? warpbus::block_at : block) +
                  field("its_thread", warpbus::thread_of(earlier.thread)) + field("its_writes", wrote ? 1 : 0) +
                  field("its_pc", earlier.pc) + field("same_block", same_block ? 1 : 0) +
                  field("same_warp", same_block && earlier.thread / 32u == current->number / 32 ? 1 : 0));
}

// An access that an asynchronous one of the same block does not allow yet.
[[noreturn]] void stop_asynchronous(const Region &region, size_t index, const Visit &earlier, bool wrote, bool writes, uint32_t pc) {
    warpbus::stop(wrote ? "not_waited" : "still_read", warpbus::place(*current) + element(region, index) +
                  field("writes", writes ? 1 : 0) + field("pc", pc) + field("its_what", engine_name(earlier.engine)) +
                  field("its_thread", warpbus::thread_of(earlier.thread)) + field("its_pc", earlier.pc));
}

[[noreturn]] void stop_conflict(const Region &region, size_t index, const Visit &earlier, bool wrote, bool writes, uint32_t pc) {
    if (earlier.engine && earlier.block == serial) stop_asynchronous(region, index, earlier, wrote, writes, pc);
    stop_race(region, index, earlier, wrote, writes, pc);
}

// A local variable: if it is an accumulator of wgmma, its warpgroup has to have waited for the product.
void check_accumulators(const char *at, bool write, uint32_t pc) {
    for (const auto &[first, each] : static_cast<warpbus::Fiber *>(current)->accumulators)
        for (const void *its : each.at)
            if (at == its)
                warpbus::stop("accumulator", warpbus::place(*current) + field("writes", write ? 1 : 0) + field("pc", pc) +
                              field("its_line", each.line));
}

void access(const void *address, size_t size, bool write, bool atomic, const void *counter) {
    if (!current) return;
    const char *at = static_cast<const char *>(address);
    Region *region = region_of(at);
    const uint32_t pc = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(counter) - 1);
    if (!region) {
        check_accumulators(at, write, pc);
        return;
    }
    if (at < region->begin || at + size > region->begin + region->size) {
        if (unwritten.found) stop_unwritten();
        const std::ptrdiff_t bytes = at - region->begin, step = static_cast<std::ptrdiff_t>(region->element);
        const std::ptrdiff_t index = (bytes - (bytes < 0 ? step - 1 : 0)) / step;
        warpbus::stop("outside", warpbus::place(*current) + field("array", region->name) +
                      field("memory", region->shared ? "shared" : "device") + field("index", index) +
                      field("count", region->size / region->element) + field("element", region->element) +
                      field("writes", write ? 1 : 0) + field("pc", pc));
    }
    if (!atomic && size > 1 && size <= 16 && reinterpret_cast<uintptr_t>(at) % size)
        warpbus::stop("misaligned", warpbus::place(*current) +
                      element(*region, static_cast<size_t>(at - region->begin) / region->element) +
                      field("bytes", size) + field("writes", write ? 1 : 0) + field("pc", pc));
    const unsigned thread = current->number;
    if (!atomic && logged < kMostLogged) {
        ++logged;
        logs[thread].push_back({pc, static_cast<uint16_t>(region - regions.data()), static_cast<uint8_t>(size), write, at});
    }
    const Visit now{serial, interval, syncs[thread / 32], pc, stamp, clocks.epoch(thread), static_cast<uint16_t>(thread), atomic, 0};
    const size_t offset = static_cast<size_t>(at - region->begin);
    for (size_t i = offset / region->element; i <= (offset + size - 1) / region->element; ++i) {
        Cell &cell = region->cells[i];
        if (!ordered(cell.wrote, region->shared) && !(atomic && cell.wrote.atomic))
            stop_conflict(*region, i, cell.wrote, true, write, pc);
        if (write) {
            for (const Visit &read : cell.read)
                if (!ordered(read, region->shared) && !(atomic && read.atomic))
                    stop_conflict(*region, i, read, false, true, pc);
        }
        const bool known = region->shared ? cell.wrote.block == serial : region->written[i] != 0;
        if (!known && (!write || atomic) && !unwritten.found)
            unwritten = {true, *region, i, pc, current->thread, warpbus::block_at};
        if (write) {
            cell.wrote = now;
            if (!region->shared) region->written[i] = 1;
        } else {
            Visit &place = ordered(cell.read[0], region->shared) ? cell.read[0] : cell.read[1];
            if (ordered(place, region->shared)) place = now;
        }
    }
}

// An aggregate, or a number whose address need not be a multiple of its size: as accesses that fit its address.
void access_in_pieces(const void *address, size_t size, bool write, const void *counter) {
    size_t piece = 16;
    while (piece > 1 && (size % piece || reinterpret_cast<uintptr_t>(address) % piece)) piece /= 2;
    for (size_t at = 0; at < size; at += piece)
        access(static_cast<const char *>(address) + at, piece, write, false, counter);
}

void add(Site &site, const Request &request) {
    ++site.requests;
    if (!site.shared) {
        std::vector<uint64_t> sectors, places;
        for (unsigned i = 0; i < request.count; ++i) {
            const auto at = reinterpret_cast<uintptr_t>(request.of[i].at);
            places.push_back(at);
            for (uintptr_t sector = at / 32; sector <= (at + request.of[i].size - 1) / 32; ++sector)
                sectors.push_back(sector);
        }
        const auto different = [](std::vector<uint64_t> &all) {
            std::sort(all.begin(), all.end());
            return static_cast<uint64_t>(std::unique(all.begin(), all.end()) - all.begin());
        };
        site.moved += different(sectors);
        site.least += (different(places) * request.of[0].size + 31) / 32;
        return;
    }
    // 32 banks of 4 bytes: lanes with 8 or 16 bytes are served in 2 or 4 groups.
    const unsigned lanes = 32 / std::max<unsigned>(1, request.of[0].size / 4);
    for (unsigned first = 0; first < request.count; first += lanes) {
        std::vector<uintptr_t> banks[32];
        size_t passes = 1;
        for (unsigned i = first; i < std::min(request.count, first + lanes); ++i) {
            const auto at = reinterpret_cast<uintptr_t>(request.of[i].at);
            for (uintptr_t word = at / 4; word <= (at + request.of[i].size - 1) / 4; ++word) {
                auto &bank = banks[word % 32];
                if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
                passes = std::max(passes, bank.size());
            }
        }
        site.moved += passes;
        site.least += 1;
    }
}

// Group the accesses since the last barrier into requests.
void count_requests() {
    std::unordered_map<uint64_t, Request> requests;
    std::vector<std::pair<uint32_t, uint32_t>> rounds;
    for (size_t first = 0; first < logs.size(); first += 32) {
        requests.clear();
        for (size_t thread = first; thread < std::min(logs.size(), first + 32); ++thread) {
            rounds.clear();
            for (const Access &each : logs[thread]) {
                auto round = std::find_if(rounds.begin(), rounds.end(), [&](auto &known) { return known.first == each.pc; });
                if (round == rounds.end()) round = rounds.insert(round, {each.pc, 0});
                Request &request = requests[uint64_t{each.pc} << 32 | round->second++];
                request.of[request.count++] = each;
            }
            logs[thread].clear();
        }
        for (const auto &[key, request] : requests) {
            const Region &region = regions[request.of[0].region];
            Site &site = sites[request.of[0].pc];
            if (site.array.empty()) site = {region.name, region.shared, request.of[0].write, 0, 0, 0};
            add(site, request);
        }
    }
}

void write_traffic() {
    for (const auto &[pc, site] : sites)
        warpbus::write_finding("traffic", (field("array", site.array.c_str()) + field("memory", site.shared ? "shared" : "device") +
                               field("writes", site.write ? 1 : 0) + field("requests", site.requests) +
                               field("moved", site.moved) + field("least", site.least) + field("pc", pc)).c_str());
}

struct Shadow { Cell *cells; unsigned char *written; size_t element, count; };
std::map<const void *, Shadow> shadows;

Shadow &shadow_of(const warpbus::Allocation &of) {
    Shadow &found = shadows[of.begin];
    if (found.cells) return found;
    found.element = of.element ? of.element : 4;
    found.count = (of.size + found.element - 1) / found.element;
    found.cells = static_cast<Cell *>(calloc(found.count, sizeof(Cell)));
    found.written = static_cast<unsigned char *>(calloc(found.count, 1));
    return found;
}

}  // namespace

namespace warpbus {

void check_launch() {
    clocks = {};
    static bool registered = false;
    if (!registered) atexit(write_traffic);
    registered = true;
    first_serial += blocks;
    blocks = grid_size.x * grid_size.y * grid_size.z;
    device_unordered = unordered;
    regions.clear();
    recent = 0;
    for (const auto &[key, each] : allocations) {
        const Shadow &shadow = shadow_of(each);
        regions.push_back({each.reserved, each.pages + each.mapped + kGuard, each.begin, each.size, shadow.element, false,
                           shadow.cells, each.managed ? (memset(shadow.written, 1, shadow.count), shadow.written)
                           : shadow.written, each.name.c_str()});
    }
    for (const SharedArray &each : shared_arrays) check_new_array(each);
    logs.resize(std::max<size_t>(logs.size(), block_size.x * block_size.y * block_size.z));
}

void check_new_array(const SharedArray &each) {
    static std::map<const void *, Cell *> cells;
    Cell *&found = cells[each.begin];
    const size_t room = each.begin == dynamic + kGap ? kMostOptIn : each.size / each.element + 1;
    if (!found) found = static_cast<Cell *>(calloc(room, sizeof(Cell)));
    regions.push_back({each.begin - kGap, each.begin + each.size + kGap, each.begin, each.size, each.element, true, found,
                       nullptr, each.name});
}

void check_dynamic_array(const SharedArray &each) {
    for (Region &region : regions)
        if (region.begin == each.begin) region.element = each.element, region.name = each.name;
}

void check_block() {
    const uint3 grid = grid_size;
    serial = first_serial + block_at.x + grid.x * (block_at.y + grid.y * block_at.z);
    ++interval;
    clocks.begin(block_size.x * block_size.y * block_size.z);
}

void check_suspend() { count_requests(); }

// A block after a barrier of the grid is another one than before: nothing that came earlier conflicts with it. Its shared
// memory was exchanged, so that it is not known what was written there.
void check_resume() {
    check_block();
    for (const Region &region : regions) {
        if (!region.shared) continue;
        for (size_t i = 0; i < region.size / region.element; ++i)
            region.cells[i] = {{serial, interval - 1, 0, 0, 0, 0, 0, false, 0}, {}};
    }
}

void check_grid_barrier() { first_serial += blocks; }

void check_barrier() {
    count_requests();
    if (unwritten.found && unwritten.region.shared) stop_unwritten();
    ++interval;
    clocks.join_block();
}

void check_warp_barrier(unsigned warp) {
    ++syncs[warp];
    clocks.join_warp(warp);
}

AsyncAccess check_async_begin(AsyncKind kind, uint64_t key) {
    const unsigned engine = engine_of(kind, key);
    return {engine, clocks.begin_access(engine)};
}

// The bytes are in an array: see `bulk_copies.h`.
void check_async_access(const AsyncAccess &of, const void *address, size_t size, bool writes, const void *counter) {
    const char *at = static_cast<const char *>(address);
    Region *region = region_of(at);
    if (!region) return;
    const uint32_t pc = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(counter) - 1);
    const unsigned thread = current->number;
    const Visit now{serial, interval, syncs[thread / 32], pc, stamp, of.epoch, static_cast<uint16_t>(thread), false,
                    static_cast<uint8_t>(of.engine)};
    const size_t offset = static_cast<size_t>(at - region->begin);
    for (size_t i = offset / region->element; i <= (offset + size - 1) / region->element; ++i) {
        Cell &cell = region->cells[i];
        const Visit wrote = cell.wrote;
        if (!ordered(wrote, region->shared)) stop_conflict(*region, i, wrote, true, writes, pc);
        if (writes) {
            for (const Visit &read : cell.read)
                if (!ordered(read, region->shared)) stop_conflict(*region, i, read, false, true, pc);
            cell.wrote = now;
            if (!region->shared) region->written[i] = 1;
            continue;
        }
        const bool known = region->shared ? wrote.block == serial : region->written[i] != 0;
        if (!known && !unwritten.found) unwritten = {true, *region, i, pc, current->thread, warpbus::block_at};
        const bool fenced = fences[wrote.thread].proxied > wrote.stamp || fences[thread].proxied > wrote.stamp;
        if (region->shared && known && !wrote.engine && wrote.stamp && !fenced)
            warpbus::stop("proxy_fence", warpbus::place(*current) + element(*region, i) + field("pc", pc) +
                          field("what", engine_name(of.engine)) + field("its_thread", warpbus::thread_of(wrote.thread)) +
                          field("its_pc", wrote.pc));
        Visit &place = ordered(cell.read[0], region->shared) ? cell.read[0] : cell.read[1];
        place = now;
    }
}

void check_async_end(const void *mbarrier, const AsyncAccess &of) { clocks.end_access(mbarrier, of.engine, of.epoch); }
void check_async_end(unsigned thread, const AsyncAccess &of) { clocks.end_access(thread, of.engine, of.epoch); }
void check_stores_end(unsigned thread) {
    const unsigned engine = engine_of(AsyncKind::store, thread);
    clocks.end_access(thread, engine, clocks.last_access(engine));
}
void check_mbarriers() { clocks.use(); }
void check_release(const void *barrier) { clocks.release(current->number, barrier); }
void check_acquire(const void *barrier, unsigned thread) { clocks.acquire(thread, barrier); }
void check_proxy_fence() { fences[current->number].proxied = ++stamp; }

void check_launch_end() {
    if (unwritten.found) stop_unwritten();
}

void check_host_write(const void *at, size_t size) {
    const Allocation *found = owner(at);
    if (!found) return;
    const Shadow &shadow = shadow_of(*found);
    const size_t offset = static_cast<size_t>(static_cast<const char *>(at) - found->begin);
    memset(shadow.written + offset / shadow.element, 1, (size + shadow.element - 1) / shadow.element);
}

void check_freed(const void *at) {
    const auto found = shadows.find(at);
    if (found == shadows.end()) return;
    free(found->second.cells);
    free(found->second.written);
    shadows.erase(found);
}

void check_atomic(const void *at, size_t size, const void *pc) {
    access(at, size, true, true, pc);
    if (current) note_atomic();
}

// An asynchronous copy may write at once: nobody else may have accessed its destination since the last barrier.
void check_copy(const void *to, size_t size, const void *counter) {
    const char *at = static_cast<const char *>(to);
    const Region *region = region_of(at);
    if (!region || !region->shared || at < region->begin || at + size > region->begin + region->size) return;
    const uint32_t pc = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(counter) - 1);
    const size_t offset = static_cast<size_t>(at - region->begin);
    for (size_t i = offset / region->element; i <= (offset + size - 1) / region->element; ++i) {
        const Cell &cell = region->cells[i];
        if (!ordered(cell.wrote, true)) stop_conflict(*region, i, cell.wrote, true, true, pc);
        for (const Visit &read : cell.read)
            if (!ordered(read, true)) stop_conflict(*region, i, read, false, true, pc);
    }
}

void check_fence(bool of_block) {
    if (current) fences[current->number].fenced = ++stamp;
    if (!of_block) unordered = device_unordered = false;
}

void forget_traffic() {
    sites.clear();
    logged = 0;
}

}  // namespace warpbus

#define WARPBUS_ACCESS(name, size, write) \
    extern "C" void __tsan_##name(void *at) { access(at, size, write, false, __builtin_return_address(0)); }
#define WARPBUS_PIECES(name, size, write) \
    extern "C" void __tsan_##name(void *at) { access_in_pieces(at, size, write, __builtin_return_address(0)); }
// A loop may wait for a volatile value.
#define WARPBUS_VOLATILE(name, size, write) \
    extern "C" void __tsan_##name(void *at) { \
        access_in_pieces(at, size, write, __builtin_return_address(0)); \
        if (current && ++current->spins >= warpbus::kMostSpins) \
            warpbus::let_others_run("a volatile access", 0, __builtin_return_address(0)); \
    }
#define WARPBUS_ACCESSES(size) \
    WARPBUS_VOLATILE(volatile_read##size, size, false) \
    WARPBUS_VOLATILE(volatile_write##size, size, true) \
    WARPBUS_VOLATILE(unaligned_volatile_read##size, size, false) \
    WARPBUS_VOLATILE(unaligned_volatile_write##size, size, true) \
    WARPBUS_ACCESS(read##size, size, false) \
    WARPBUS_ACCESS(write##size, size, true) \
    WARPBUS_PIECES(unaligned_read##size, size, false) \
    WARPBUS_PIECES(unaligned_write##size, size, true)
WARPBUS_ACCESSES(1)
WARPBUS_ACCESSES(2)
WARPBUS_ACCESSES(4)
WARPBUS_ACCESSES(8)
WARPBUS_ACCESSES(16)
extern "C" void __tsan_read_range(void *at, size_t size) { access_in_pieces(at, size, false, __builtin_return_address(0)); }
extern "C" void __tsan_write_range(void *at, size_t size) { access_in_pieces(at, size, true, __builtin_return_address(0)); }
extern "C" void __tsan_read_write4(void *at) {
    access(at, 4, false, false, __builtin_return_address(0));
    access(at, 4, true, false, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void **, void *) {}
extern "C" void __tsan_vptr_read(void **) {}

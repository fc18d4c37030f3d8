// Threads, blocks and device memory on a CPU: what `runtime.cpp` builds on.
//
// The threads of a block are fibers on one thread of the CPU. A fiber runs until a barrier or its end; blocks run one
// after the other, or, in a cooperative launch, from one barrier of the grid to the next. What a kernel does wrong is written as one line of JSON, a finding, into the file that
// WARPBUS_FINDINGS names, and the program ends with status 70. `warpbus.cuda.findings` puts findings into words.
//
// With WARPBUS_CHECKS, `checks.h` is told of what happens here, and of each access to memory.
#pragma once

#include "cuda_runtime.h"

#include <csignal>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

namespace warpbus {

struct Allocation {
    char *reserved, *pages, *begin;  // kGuard bytes before `pages` and behind the last page cannot be accessed
    size_t mapped, size, element;    // `element`: bytes of what the pointer points to, 0 if that is void
    bool managed;                    // also for host code
    std::string name;
};

struct SharedArray {
    char *begin;
    size_t size, element;
    const char *name;
};

// `stack`: kStack bytes, 512 KB of local memory as on a GPU and what the runtime needs; kStackGuard before them cannot be accessed.
struct Fiber : Thread {
    ucontext_t context;
    char *stack = nullptr;
    std::vector<DeferredCopy> copies;  // that it has not waited for
    unsigned batches = 0;              // of copies that it has committed
};

// A block of a cooperative launch that waits for the grid: what belongs to a block alone.
struct Resident {
    std::vector<Fiber> fibers;
    std::vector<std::vector<char>> shared;
    bool ended;
};

// A call of printf by a thread of the block, after so many barriers.
struct Printed {
    unsigned phase, thread;
    std::string text;
};

// Memory that was freed: accesses to it are explained as long as nothing else is there.
struct Freed {
    char *reserved, *end;
    std::string name;
};

inline std::map<char *, Allocation> allocations;
inline std::vector<Freed> freed;
inline std::vector<Printed> printed;
inline unsigned phase;
inline std::vector<SharedArray> shared_arrays;
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline const std::function<void()> *body;
inline const char *kernel = "";
alignas(128) inline char dynamic[kGap + kMostOptIn + kGap];
inline size_t dynamic_size;

#ifdef WARPBUS_CHECKS
void check_launch();                       // a kernel begins
void check_block();                        // a block begins: shared memory holds nothing
void check_resume();                       // a block goes on behind a barrier of the grid
void check_grid_barrier();                 // all blocks are at a barrier
void check_barrier();                      // all threads of the block are at a barrier
void check_warp_barrier(unsigned warp);    // so are the threads of a warp
void check_launch_end();
void check_host_write(const void *, size_t);
void check_freed(const void *);
void check_copy(const void *, size_t, const void *pc);  // an asynchronous copy begins
void check_fence(bool of_block);           // if not of a block, the program orders blocks by fences
void check_new_array(const SharedArray &);
void check_dynamic_array(const SharedArray &);
#else
inline void check_launch() {}
inline void check_block() {}
inline void check_resume() {}
inline void check_grid_barrier() {}
inline void check_barrier() {}
inline void check_warp_barrier(unsigned) {}
inline void check_launch_end() {}
inline void check_host_write(const void *, size_t) {}
inline void check_freed(const void *) {}
inline void check_copy(const void *, size_t, const void *) {}
inline void check_fence(bool) {}
inline void check_new_array(const SharedArray &) {}
inline void check_dynamic_array(const SharedArray &) {}
#endif

inline size_t page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

inline std::string quoted(const char *text) {
    std::string found = "\"";
    for (; *text; ++text) {
        if (*text == '"' || *text == '\\') found += '\\';
        if (static_cast<unsigned char>(*text) >= 32) found += *text;
    }
    return found + "\"";
}

inline std::string field(const char *name, const std::string &json) { return ", " + quoted(name) + ": " + json; }
inline std::string field(const char *name, const char *text) { return field(name, quoted(text)); }
template <class N, class = std::enable_if_t<std::is_arithmetic_v<N>>>
std::string field(const char *name, N value) { return field(name, std::to_string(value)); }
inline std::string field(const char *name, uint3 at) {
    return field(name, "[" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + "]");
}

// What the block has printed, in the order of its barriers and threads: the same in both orders of threads.
inline void print_block() {
    std::stable_sort(printed.begin(), printed.end(), [](const Printed &a, const Printed &b) {
        return a.phase != b.phase ? a.phase < b.phase : a.thread < b.thread;
    });
    for (const Printed &each : printed) fwrite(each.text.data(), 1, each.text.size(), stdout);
    printed.clear();
}

[[noreturn]] inline void stop(const std::string &kind, const std::string &fields) {
    print_block();
    fflush(stdout);
    write_finding(kind.c_str(), fields.c_str());
    _exit(70);
}

inline std::string place() { return field("kernel", kernel) + field("block", block_at); }
inline std::string place(const Thread &thread) { return place() + field("thread", thread.thread); }

// The thread with this number in its block.
inline uint3 thread_of(unsigned number) {
    return {number % block_size.x, number / block_size.x % block_size.y, number / block_size.x / block_size.y};
}

// Kernels can access device memory, host code cannot.
inline void expose(bool visible) {
    for (auto &[key, each] : allocations)
        if (!each.managed) mprotect(each.pages, each.mapped, visible ? PROT_READ | PROT_WRITE : PROT_NONE);
}

inline std::string outside(const Allocation &each, const char *at) {
    const auto bytes = at - each.begin, element = static_cast<std::ptrdiff_t>(std::max<size_t>(1, each.element));
    return field("array", each.name.c_str()) + field("memory", "device") +
           field("index", (bytes - (bytes < 0 ? element - 1 : 0)) / element) +
           field("count", static_cast<std::ptrdiff_t>(each.size) / element) + field("element", element);
}

inline Fiber &running() { return *static_cast<Fiber *>(current); }

inline char *new_stack() {
    char *guard = static_cast<char *>(mmap(nullptr, kStackGuard + kStack, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (guard == MAP_FAILED || mprotect(guard, kStackGuard, PROT_NONE)) {
        fprintf(stderr, "no memory for the stack of a thread\n");
        _exit(71);
    }
    return guard + kStackGuard;
}

inline uintptr_t counter_of(void *context) {
    const auto *machine = &static_cast<ucontext_t *>(context)->uc_mcontext;
#if defined(__x86_64__)
    return static_cast<uintptr_t>(machine->gregs[REG_RIP]);
#elif defined(__aarch64__)
    return static_cast<uintptr_t>(machine->pc);
#else
    return machine ? 0 : 1;
#endif
}

inline void explain_fault(int, siginfo_t *info, void *context) {
    const char *at = static_cast<const char *>(info->si_addr);
    const std::string pc = field("pc", counter_of(context));
    for (const auto &[key, each] : allocations) {
        if (at < each.reserved || at >= each.pages + each.mapped + kGuard) continue;
        if (!current) stop("host", field("array", each.name.c_str()) + field("bytes", each.size) + pc);
        stop("outside", place(*current) + outside(each, at) + pc);
    }
    if (current && at < running().stack && at >= running().stack - kStackGuard) stop("stack", place(*current) + pc);
    for (auto each = freed.rbegin(); each != freed.rend(); ++each)
        if (at >= each->reserved && at < each->end)
            stop("freed", (current ? place(*current) : std::string()) + field("array", each->name.c_str()) + pc);
    char address[40];
    snprintf(address, sizeof address, "%p", static_cast<const void *>(at));
    stop("wild", (current ? place(*current) : std::string()) + field("address", address) + pc);
}

inline void explain_division(int, siginfo_t *, void *context) {
    stop("division", (current ? place(*current) : std::string()) + field("pc", counter_of(context)));
}

// A failed assert has printed its condition.
inline void explain_abort(int signal, siginfo_t *, void *) {
    if (current) stop("assertion", place(*current));
    std::signal(signal, SIG_DFL);
    raise(signal);
}

inline void explain_limit(int, siginfo_t *, void *context) {
    stop("endless", (current ? place(*current) : std::string()) + field("pc", counter_of(context)));
}

inline void handle(int signal, void (*handler)(int, siginfo_t *, void *)) {
    struct sigaction action{};
    action.sa_sigaction = handler;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(signal, &action, nullptr);
}

// Explain faults, and programs that take more seconds of the CPU than WARPBUS_LIMIT says.
inline void install() {
    static bool done = false;
    if (done) return;
    done = true;
    static char stack[64 << 10];
    stack_t other{};
    other.ss_sp = stack;
    other.ss_size = sizeof stack;
    sigaltstack(&other, nullptr);
    handle(SIGSEGV, explain_fault);
    handle(SIGBUS, explain_fault);
    handle(SIGFPE, explain_division);
    handle(SIGABRT, explain_abort);
    if (const char *limit = getenv("WARPBUS_LIMIT")) {
        handle(SIGVTALRM, explain_limit);
        struct itimerval timer{};
        timer.it_value.tv_sec = std::max(1, atoi(limit));
        setitimer(ITIMER_VIRTUAL, &timer, nullptr);
    }
}

inline void enter() {
    (*body)();
    current->ended = true;
    swapcontext(&running().context, &scheduler);
}

inline std::string waiting(const Fiber &fiber) {
    return field("waiting", fiber.thread) + field("what", fiber.what) + field("line", fiber.line);
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

// Let the lanes of a warp run until all of them have ended or wait for the block.
inline void run_warp(unsigned first, unsigned count, bool reverse) {
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
            for (unsigned other = 0; other < count && !absent; ++other) {
                const Fiber &its = fibers[first + other];
                const bool there = !its.ended && its.waits == Waits::warp && its.mask == fiber.mask && its.what == fiber.what;
                if ((mask >> other & 1) && !there) absent = &its;
            }
            if (absent) {
                if (!stuck) stuck = &fiber, missing = absent;
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
        }
        if (released || release_converged(first, count)) continue;
        if (stuck)
            stop("warp", place() + waiting(*stuck) + field("mask", stuck->mask) + field("missing", missing->thread) +
                 (missing == stuck ? field("state", "not in its own mask") : missing->ended ? field("state", "returned")
                  : field("state", "waits") + field("its_what", missing->what) + field("its_line", missing->line)));
        return;
    }
}

// Run the current block to its end, or to a barrier of the grid; whether it has ended.
inline bool run_block(unsigned threads, bool reverse, bool cooperative) {
    const unsigned warps = (threads + kWarp - 1) / kWarp;
    for (;;) {
        for (unsigned i = 0; i < warps; ++i) {
            const unsigned first = (reverse ? warps - 1 - i : i) * kWarp;
            run_warp(first, std::min(kWarp, threads - first), reverse);
        }
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
        if (!waits || waits->waits == Waits::grid) print_block();
        if (!waits) return true;
        if (waits->waits == Waits::grid) {
            if (!cooperative) stop("grid_launch", place() + field("line", waits->line));
            return false;
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
        fiber.copies.clear();
        fiber.batches = 0;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    check_block();
}

// Shared memory is static: blocks that are resident together exchange it.
inline void suspend_block(Resident &block) {
    block.shared.clear();
    for (const SharedArray &each : shared_arrays) block.shared.emplace_back(each.begin, each.begin + each.size);
}

inline void resume_block(const Resident &block, unsigned threads) {
    for (size_t i = 0; i < block.shared.size(); ++i)
        memcpy(shared_arrays[i].begin, block.shared[i].data(), block.shared[i].size());
    for (unsigned i = 0; i < threads; ++i) fibers[i].waits = Waits::nothing;
    check_block();
    check_resume();
}

// Run all blocks up to a barrier of the grid, and so on to their ends.
inline void run_cooperative(dim3 grid, unsigned threads, bool reverse) {
    static std::vector<Resident> blocks;  // with the stacks of their threads
    const unsigned count = grid.x * grid.y * grid.z;
    const auto place_of = [&](unsigned i) { return uint3{i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y}; };
    if (blocks.size() < count) blocks.resize(count);
    for (bool first = true;; first = false) {
        unsigned ended = 0, returned = 0, waiting = 0;
        for (unsigned i = 0; i < count; ++i) {
            block_at = place_of(i);
            fibers.swap(blocks[i].fibers);
            if (first) begin_block(threads);
            else resume_block(blocks[i], threads);
            blocks[i].ended = run_block(threads, reverse, true);
            if (!blocks[i].ended) suspend_block(blocks[i]);
            fibers.swap(blocks[i].fibers);
            (blocks[i].ended ? returned : waiting) = i;
            ended += blocks[i].ended;
        }
        if (ended == count) return;
        if (ended)
            stop("grid", field("kernel", kernel) + field("block", place_of(waiting)) + field("returned", place_of(returned)) +
                 field("line", blocks[waiting].fibers[0].line));
        check_grid_barrier();
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
    shared_arrays.front() = {dynamic + kGap, launch.shared, 4, "shared memory"};
    expose(true);
    check_launch();
    if (launch.cooperative) run_cooperative(grid, threads, reverse);
    else
        for (unsigned z = 0; z < grid.z; ++z)
            for (unsigned y = 0; y < grid.y; ++y)
                for (unsigned x = 0; x < grid.x; ++x) {
                    block_at = {x, y, z};
                    begin_block(threads);
                    run_block(threads, reverse, false);
                }
    check_launch_end();
    current = nullptr;
    check_ends();
    expose(false);
}

inline const Allocation *owner(const void *pointer) {
    auto after = allocations.upper_bound(static_cast<char *>(const_cast<void *>(pointer)));
    if (after == allocations.begin()) return nullptr;
    const Allocation &found = std::prev(after)->second;
    return static_cast<const char *>(pointer) < found.begin + found.size ? &found : nullptr;
}

// Whether `size` bytes from a pointer are device memory, or none of them is.
inline bool is_of(const void *pointer, size_t size, bool device) {
    const Allocation *found = owner(pointer);
    if (found && found->managed) return true;
    if (!device) return found == nullptr;
    return found && static_cast<const char *>(pointer) + size <= found->begin + found->size;
}

inline bool release(void *pointer) {
    const auto found = allocations.find(static_cast<char *>(pointer));
    if (found == allocations.end()) return false;
    check_freed(pointer);
    const Allocation &old = found->second;
    freed.push_back({old.reserved, old.pages + old.mapped + kGuard, old.name});
    munmap(found->second.reserved, kGuard + found->second.mapped + kGuard);
    allocations.erase(found);
    return true;
}

}  // namespace warpbus

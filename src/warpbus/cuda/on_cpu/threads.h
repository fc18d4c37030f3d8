// Threads, blocks and device memory on a CPU: what `runtime.cpp` builds on.
//
// The threads of a block are fibers on one thread of the CPU, which `scheduler.h` runs. What a kernel does wrong is
// written as one line of JSON, a finding, into the file that WARPBUS_FINDINGS names, and the program ends with status 70.
// `warpbus.cuda.findings` puts findings into words.
//
// With WARPBUS_CHECKS, `checks.h` is told of what happens here, and of each access to memory.
#pragma once

#include "async_ptx.h"
#include "cuda_runtime.h"

#include <csignal>

#include <algorithm>
#include <deque>
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
    uint64_t launch;  // the last one whose kernel declares it
};

// An asynchronous access: the engine that makes it and the number of the access, see `clocks.h`.
struct AsyncAccess { unsigned engine; uint32_t epoch; };
enum class AsyncKind { copy, product, store };

// A copy from shared to device memory that its thread has not waited for.
struct BulkStore {
    std::function<void()> run;
    unsigned group;
    AsyncAccess access;
    int line;
};

// Products of wgmma that their warpgroup has not waited for, and the registers that they add to: `at` are variables of the
// program, which are undefined meanwhile, and `bits` what they are going to hold.
struct Product {
    Wgmma of;
    const void *accumulators;  // the first one
    unsigned group;
    AsyncAccess access;
    int line;
};
struct Accumulators {
    std::vector<void *> at;
    std::vector<uint32_t> bits;
    unsigned products;
    int line;
};

// `stack`: kStack bytes, 512 KB of local memory as on a GPU and what the runtime needs; kStackGuard before them cannot be accessed.
struct Fiber : Thread {
    ucontext_t context;
    char *stack = nullptr;
    std::vector<DeferredCopy> copies;  // that it has not waited for
    unsigned batches = 0;              // of copies that it has committed
    std::vector<BulkStore> stores;
    unsigned store_groups = 0;         // that it has committed
    std::deque<Product> products;
    std::map<const void *, Accumulators> accumulators;
    unsigned product_groups = 0;       // that it has committed
    bool wgmma_fenced = false;         // whether it has executed wgmma.fence
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
alignas(1024) inline char dynamic[kGap + kMostOptIn + kGap];
inline size_t dynamic_size;
inline uint64_t launches;

#ifdef WARPBUS_CHECKS
void check_launch();                       // a kernel begins
void check_block();                        // a block begins: shared memory holds nothing
void check_resume();                       // a block goes on that was suspended
void check_grid_barrier();                 // all blocks are at a barrier
void check_barrier();                      // all threads of the block are at a barrier
void check_warp_barrier(unsigned warp);    // so are the threads of a warp
void check_launch_end();
void check_host_write(const void *, size_t);
void check_freed(const void *);
void check_copy(const void *, size_t, const void *pc);  // an asynchronous copy begins
void check_fence(bool of_block);           // if not of a block, the program orders blocks by fences
void check_release(const void *barrier);   // what the thread did is ordered before those that acquire the barrier
void check_acquire(const void *barrier, unsigned thread);
void check_suspend();                      // the block stops in the middle: other blocks run
void check_mbarriers();                    // the block has barriers of single threads: warps have to be followed, too
// An access by an engine, the copies of `key`: an mbarrier, a warpgroup or a thread.
AsyncAccess check_async_begin(AsyncKind kind, uint64_t key);
void check_async_access(const AsyncAccess &access, const void *at, size_t size, bool writes, const void *pc);
void check_async_end(const void *mbarrier, const AsyncAccess &access);  // for those that wait for the mbarrier
void check_async_end(unsigned thread, const AsyncAccess &access);
void check_stores_end(unsigned thread);    // what the thread's stores have written is visible to it
void check_proxy_fence();                  // what the thread wrote is visible to asynchronous copies and wgmma
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
inline void check_release(const void *) {}
inline void check_acquire(const void *, unsigned) {}
inline void check_suspend() {}
inline void check_mbarriers() {}
inline AsyncAccess check_async_begin(AsyncKind, uint64_t) { return {}; }
inline void check_async_access(const AsyncAccess &, const void *, size_t, bool, const void *) {}
inline void check_async_end(const void *, const AsyncAccess &) {}
inline void check_async_end(unsigned, const AsyncAccess &) {}
inline void check_stores_end(unsigned) {}
inline void check_proxy_fence() {}
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

// Whether bytes are in an array of shared memory.
inline bool in_shared_memory(uint64_t address, size_t size) {
    const char *at = reinterpret_cast<const char *>(address);
    return std::any_of(shared_arrays.begin(), shared_arrays.end(), [&](const SharedArray &each) {
        return at >= each.begin && at + size <= each.begin + each.size;
    });
}

// An address with the bits exchanged that a swizzle over so many bytes exchanges; 16: none. Source: PTX ISA.
inline uint64_t swizzled(uint64_t address, unsigned bytes) { return address ^ (address >> 3 & (bytes - 16)); }

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

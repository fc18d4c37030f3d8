// CUDA programs on a CPU: the part of the runtime API and of the language that a first course uses.
//
// `warpbus cuda run FILE --device cpu` compiles a .cu file with the host's C++ compiler and this header in the place of
// CUDA's own. It is for learning: right and wrong programs behave as on a GPU, only slowly.
//
// - The threads of a block are fibers on one thread of the CPU. A fiber runs until a barrier or its end. Blocks run one
//   after the other. WARPBUS_ORDER=reverse runs threads from the last to the first: a program whose output then differs
//   depends on the order, which no GPU promises.
// - Memory of cudaMalloc ends at a page that cannot be accessed, and only kernels and cudaMemcpy can access it at all: an
//   index beyond the end, and host code that dereferences a device pointer, end the program with an explanation.
// - Limits, statuses and messages are those of a GPU: more than 1024 threads in a block is an invalid configuration.
//
// Not here: textures, cooperative groups, half precision, tensor cores, streams that overlap.
#pragma once

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static  // one block runs at a time
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define CUDART_VERSION 13000

using std::max;
using std::min;

struct uint3 { unsigned x, y, z; };
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    operator uint3() const { return {x, y, z}; }
};
struct alignas(8) float2 { float x, y; };
struct float3 { float x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidMemcpyDirection = 21,
    cudaErrorInvalidDevice = 101,
};
using cudaError = cudaError_t;
enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4,
};
using cudaStream_t = struct warpbus_stream *;
struct warpbus_event { std::chrono::steady_clock::time_point at; };
using cudaEvent_t = warpbus_event *;

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerMultiprocessor;
    int regsPerBlock, warpSize, maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], major, minor;
    int multiProcessorCount, maxThreadsPerMultiProcessor, l2CacheSize, memoryBusWidth, concurrentKernels;
    size_t totalConstMem;
};

namespace warpbus {

constexpr unsigned kWarp = 32, kMostThreads = 1024;
constexpr size_t kMostShared = 48 << 10, kStack = 128 << 10;

struct Allocation {
    char *pages, *begin;   // `begin + size`, rounded up, is the page that cannot be accessed
    size_t mapped, size;
    bool managed;          // also for host code
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    uint3 thread;
    unsigned number;
    const char *waits;     // for what; nullptr while it can run
    bool ended;
    double shuffled;       // what it hands to the other lanes of its warp
};

inline std::map<char *, Allocation> allocations;
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline Fiber *current;
inline const std::function<void()> *body;
inline const char *kernel = "";
inline uint3 block_at, block_size, grid_size;
inline std::vector<char> dynamic;
inline cudaError_t last;

inline cudaError_t remember(cudaError_t status) {
    if (status != cudaSuccess) last = status;
    return status;
}

inline size_t page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

// Kernels can access device memory, host code cannot.
inline void expose(bool visible) {
    for (auto &[key, each] : allocations)
        if (!each.managed) mprotect(each.pages, each.mapped, visible ? PROT_READ | PROT_WRITE : PROT_NONE);
}

[[noreturn]] inline void stop(const char *text) {
    fflush(stdout);
    fprintf(stderr, "error: %s\n", text);
    _exit(70);
}

inline void where(char *text, size_t room) {
    const uint3 b = block_at, t = current->thread;
    snprintf(text, room, "kernel %s, block (%u, %u, %u), thread (%u, %u, %u)", kernel, b.x, b.y, b.z, t.x, t.y, t.z);
}

inline void explain_fault(int, siginfo_t *info, void *) {
    const char *at = static_cast<const char *>(info->si_addr);
    char text[600], place[200] = "";
    if (current) where(place, sizeof place);
    for (const auto &[key, each] : allocations) {
        if (at < each.pages || at >= each.pages + each.mapped + page()) continue;
        if (!current)
            snprintf(text, sizeof text, "host code accesses device memory (%zu bytes of cudaMalloc): copy it with "
                     "cudaMemcpy first", each.size);
        else
            snprintf(text, sizeof text, "%s: access %td bytes behind the end of %zu bytes of cudaMalloc: compare the "
                     "index with the number of elements", place, at - (each.begin + each.size), each.size);
        stop(text);
    }
    if (current)
        snprintf(text, sizeof text, "%s: access to address %p, which no cudaMalloc returned: a wild index, or a host "
                 "pointer that does not exist", place, static_cast<const void *>(at));
    else
        snprintf(text, sizeof text, "host code: access to address %p, which is not allocated",
                 static_cast<const void *>(at));
    stop(text);
}

inline void install() {
    static bool done = false;
    if (done) return;
    done = true;
    static char stack[64 << 10];
    stack_t other{};
    other.ss_sp = stack;
    other.ss_size = sizeof stack;
    sigaltstack(&other, nullptr);
    struct sigaction action{};
    action.sa_sigaction = explain_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

inline void enter() {
    (*body)();
    current->ended = true;
    swapcontext(&current->context, &scheduler);
}

inline void wait_for(const char *what) {
    current->waits = what;
    swapcontext(&current->context, &scheduler);
}

// Run the fibers of a group until all of them wait for the same barrier or have ended.
inline void run_to_barrier(unsigned first, unsigned count, bool reverse, bool *running) {
    *running = false;
    const char *awaited = nullptr;
    unsigned waiting = 0, ended = 0;
    for (unsigned i = 0; i < count; ++i) {
        Fiber &fiber = fibers[first + (reverse ? count - 1 - i : i)];
        if (!fiber.ended && !fiber.waits) {
            current = &fiber;
            swapcontext(&scheduler, &fiber.context);
        }
        if (fiber.ended) {
            ++ended;
            continue;
        }
        if (awaited && strcmp(awaited, fiber.waits)) {
            char text[400];
            snprintf(text, sizeof text, "kernel %s, block (%u, %u, %u): threads of one block wait for different things, "
                     "%s and %s: a barrier inside a branch that not all threads take", kernel, block_at.x, block_at.y,
                     block_at.z, awaited, fiber.waits);
            stop(text);
        }
        awaited = fiber.waits;
        ++waiting;
    }
    if (waiting && ended) {
        char text[400];
        snprintf(text, sizeof text, "kernel %s, block (%u, %u, %u): %u threads wait at %s, but %u have returned: on a GPU "
                 "this is undefined; all threads of the group have to reach it", kernel, block_at.x, block_at.y,
                 block_at.z, waiting, awaited, ended);
        stop(text);
    }
    *running = waiting > 0;
}

// A block: warps run to the barrier of the block; within one, shuffles and __syncwarp are barriers of the warp.
inline void run_block(unsigned threads, bool reverse) {
    const unsigned warps = (threads + kWarp - 1) / kWarp;
    for (bool alive = true; alive;) {
        alive = false;
        unsigned waiting = 0, ended = 0;
        for (unsigned i = 0; i < warps; ++i) {
            const unsigned first = (reverse ? warps - 1 - i : i) * kWarp, count = std::min(kWarp, threads - first);
            for (bool running = true; running;) {
                run_to_barrier(first, count, reverse, &running);
                if (!running) ended += count;
                else if (!strcmp(fibers[first].waits, "__syncthreads()")) {
                    waiting += count;
                    running = false;
                } else {
                    for (unsigned lane = 0; lane < count; ++lane) fibers[first + lane].waits = nullptr;
                }
            }
        }
        if (waiting && ended) {
            char text[300];
            snprintf(text, sizeof text, "kernel %s, block (%u, %u, %u): %u threads wait at __syncthreads(), but %u have "
                     "returned: on a GPU this is undefined; all threads of the block have to reach it", kernel,
                     block_at.x, block_at.y, block_at.z, waiting, ended);
            stop(text);
        }
        for (unsigned i = 0; i < threads; ++i) {
            alive = alive || !fibers[i].ended;
            fibers[i].waits = nullptr;
        }
    }
}

inline void check_ends();

struct Launch {
    const char *name;
    dim3 grid, block;
    size_t shared;
    Launch(const char *name, dim3 grid, dim3 block, size_t shared = 0, cudaStream_t = nullptr)
        : name(name), grid(grid), block(block), shared(shared) {}

    void operator()(const std::function<void()> &call) const {
        const uint64_t threads = uint64_t{block.x} * block.y * block.z;
        const bool fits = threads >= 1 && threads <= kMostThreads && block.z <= 64 && grid.x >= 1 && grid.y >= 1 &&
                          grid.z >= 1 && grid.x <= 2147483647u && grid.y <= 65535 && grid.z <= 65535;
        if (!fits || shared > kMostShared) {
            remember(cudaErrorInvalidConfiguration);
            return;
        }
        install();
        static const char *order = getenv("WARPBUS_ORDER");
        const bool reverse = order && !strcmp(order, "reverse");
        if (fibers.size() < threads) fibers.resize(threads);
        kernel = name;
        body = &call;
        grid_size = grid;
        block_size = block;
        dynamic.assign(shared, 0);
        expose(true);
        for (unsigned z = 0; z < grid.z; ++z)
            for (unsigned y = 0; y < grid.y; ++y)
                for (unsigned x = 0; x < grid.x; ++x) {
                    block_at = {x, y, z};
                    for (unsigned i = 0; i < threads; ++i) {
                        Fiber &fiber = fibers[i];
                        if (fiber.stack.empty()) fiber.stack.resize(kStack);
                        fiber.number = i;
                        fiber.thread = {i % block.x, i / block.x % block.y, i / block.x / block.y};
                        fiber.waits = nullptr;
                        fiber.ended = false;
                        getcontext(&fiber.context);
                        fiber.context.uc_stack.ss_sp = fiber.stack.data();
                        fiber.context.uc_stack.ss_size = fiber.stack.size();
                        fiber.context.uc_link = nullptr;
                        makecontext(&fiber.context, enter, 0);
                    }
                    run_block(static_cast<unsigned>(threads), reverse);
                }
        current = nullptr;
        check_ends();
        expose(false);
    }
};

// Writes that hit the rest of an allocation's pages, before its begin or right behind its end, are found after the kernel.
inline void check_ends() {
    for (const auto &[key, each] : allocations)
        for (const char *at = each.pages; at < each.pages + each.mapped; ++at) {
            if (at == each.begin) at += each.size;
            if (at < each.pages + each.mapped && *at != 0x5A) {
                char text[300];
                snprintf(text, sizeof text, "kernel %s wrote %s %zu bytes of cudaMalloc: compare the index with the number "
                         "of elements", kernel, at < each.begin ? "before the begin of" : "behind the end of", each.size);
                stop(text);
            }
        }
}

inline cudaError_t allocate(void **pointer, size_t size, bool managed) {
    if (!pointer || !size) return remember(cudaErrorInvalidValue);
    const size_t padded = (size + 15) / 16 * 16, mapped = (padded + page() - 1) / page() * page();
    char *pages = static_cast<char *>(
        mmap(nullptr, mapped + page(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (pages == MAP_FAILED) return remember(cudaErrorMemoryAllocation);
    install();
    char *begin = pages + mapped - padded;
    memset(pages, 0x5A, mapped);
    memset(begin, 0xA5, size);  // new memory of a GPU is not zero either
    mprotect(pages + mapped, page(), PROT_NONE);
    allocations[begin] = {pages, begin, mapped, size, managed};
    if (!managed) mprotect(pages, mapped, PROT_NONE);
    *pointer = begin;
    return cudaSuccess;
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

inline double shuffle(double value, unsigned from) {
    current->shuffled = value;
    wait_for("a shuffle");
    const unsigned first = current->number / kWarp * kWarp;
    const unsigned threads = block_size.x * block_size.y * block_size.z;
    const double got = from < kWarp && first + from < threads ? fibers[first + from].shuffled : value;
    wait_for("the end of a shuffle");
    return got;
}

inline unsigned lane() { return current->number % kWarp; }

}  // namespace warpbus

#define threadIdx (warpbus::current->thread)
#define blockIdx (warpbus::block_at)
#define blockDim (warpbus::block_size)
#define gridDim (warpbus::grid_size)
constexpr int warpSize = 32;

inline void __syncthreads() { warpbus::wait_for("__syncthreads()"); }
inline void __syncwarp(unsigned = ~0u) { warpbus::wait_for("__syncwarp()"); }
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T> T __shfl_sync(unsigned, T value, int from, int = 32) {
    return static_cast<T>(warpbus::shuffle(value, static_cast<unsigned>(from) % 32));
}
template <class T> T __shfl_down_sync(unsigned, T value, unsigned by, int = 32) {
    return static_cast<T>(warpbus::shuffle(value, warpbus::lane() + by));
}
template <class T> T __shfl_up_sync(unsigned, T value, unsigned by, int = 32) {
    return static_cast<T>(warpbus::shuffle(value, warpbus::lane() - by));
}
template <class T> T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
    return static_cast<T>(warpbus::shuffle(value, warpbus::lane() ^ static_cast<unsigned>(mask)));
}

template <class T, class U> T atomicAdd(T *at, U value) { const T old = *at; *at = old + static_cast<T>(value); return old; }
template <class T, class U> T atomicSub(T *at, U value) { const T old = *at; *at = old - static_cast<T>(value); return old; }
template <class T, class U> T atomicMax(T *at, U value) { const T old = *at; *at = max(old, static_cast<T>(value)); return old; }
template <class T, class U> T atomicMin(T *at, U value) { const T old = *at; *at = min(old, static_cast<T>(value)); return old; }
template <class T, class U> T atomicExch(T *at, U value) { const T old = *at; *at = static_cast<T>(value); return old; }
template <class T> T atomicCAS(T *at, T expected, T value) { const T old = *at; if (old == expected) *at = value; return old; }

template <class T> T __ldg(const T *at) { return *at; }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

inline const char *cudaGetErrorName(cudaError_t status) {
    switch (status) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
        case cudaErrorInvalidMemcpyDirection: return "cudaErrorInvalidMemcpyDirection";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    }
    return "cudaErrorUnknown";
}
inline const char *cudaGetErrorString(cudaError_t status) {
    switch (status) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorInvalidMemcpyDirection: return "invalid copy direction for memcpy";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
    }
    return "unknown error";
}
inline cudaError_t cudaPeekAtLastError() { return warpbus::last; }
inline cudaError_t cudaGetLastError() { const cudaError_t found = warpbus::last; warpbus::last = cudaSuccess; return found; }

template <class T> cudaError_t cudaMalloc(T **pointer, size_t size) {
    return warpbus::allocate(reinterpret_cast<void **>(pointer), size, false);
}
template <class T> cudaError_t cudaMallocManaged(T **pointer, size_t size, unsigned = 1) {
    return warpbus::allocate(reinterpret_cast<void **>(pointer), size, true);
}
template <class T> cudaError_t cudaMallocHost(T **pointer, size_t size) {
    *pointer = static_cast<T *>(malloc(size));
    return *pointer ? cudaSuccess : warpbus::remember(cudaErrorMemoryAllocation);
}
inline cudaError_t cudaFreeHost(void *pointer) { free(pointer); return cudaSuccess; }
inline cudaError_t cudaFree(void *pointer) {
    if (!pointer) return cudaSuccess;
    const auto found = warpbus::allocations.find(static_cast<char *>(pointer));
    if (found == warpbus::allocations.end()) return warpbus::remember(cudaErrorInvalidValue);
    munmap(found->second.pages, found->second.mapped + warpbus::page());
    warpbus::allocations.erase(found);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (!warpbus::is_of(to, size, to_device) || !warpbus::is_of(from, size, from_device)))
        return warpbus::remember(cudaErrorInvalidValue);
    warpbus::expose(true);
    memcpy(to, from, size);
    warpbus::expose(false);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t = nullptr) {
    return cudaMemcpy(to, from, size, kind);
}
inline cudaError_t cudaMemset(void *at, int value, size_t size) {
    if (!warpbus::is_of(at, size, true)) return warpbus::remember(cudaErrorInvalidValue);
    warpbus::expose(true);
    memset(at, value, size);
    warpbus::expose(false);
    return cudaSuccess;
}
template <class T> cudaError_t cudaMemcpyToSymbol(T &symbol, const void *from, size_t size) {
    if (size > sizeof symbol) return warpbus::remember(cudaErrorInvalidValue);
    memcpy(&symbol, from, size);
    return cudaSuccess;
}

inline cudaError_t cudaDeviceSynchronize() { return warpbus::last; }
inline cudaError_t cudaDeviceReset() { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return device ? warpbus::remember(cudaErrorInvalidDevice) : cudaSuccess; }
inline cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int device) {
    if (device) return warpbus::remember(cudaErrorInvalidDevice);
    *found = {};
    snprintf(found->name, sizeof found->name, "CPU, in the place of a GPU (warpbus cuda run)");
    found->totalGlobalMem = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * warpbus::page();
    found->sharedMemPerBlock = found->sharedMemPerMultiprocessor = warpbus::kMostShared;
    found->totalConstMem = 64 << 10;
    found->regsPerBlock = 65536;
    found->warpSize = 32;
    found->maxThreadsPerBlock = found->maxThreadsPerMultiProcessor = warpbus::kMostThreads;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->major = 8;
    found->multiProcessorCount = 1;
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t *stream) { *stream = nullptr; return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return warpbus::last; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t *event) { *event = new warpbus_event; return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { delete event; return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t = nullptr) {
    event->at = std::chrono::steady_clock::now();
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    *milliseconds = std::chrono::duration<float, std::milli>(to->at - from->at).count();
    return cudaSuccess;
}

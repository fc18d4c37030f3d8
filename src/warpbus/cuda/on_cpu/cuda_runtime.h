// CUDA programs on a CPU: the part of the runtime API and of the language that a first course uses.
//
// `warpbus cuda run FILE --device cpu` compiles a .cu file with the host's C++ compiler and this header in the place of
// CUDA's own. It is for learning: right and wrong programs behave as on a GPU, only slowly.
//
// - The threads of a block are fibers on one thread of the CPU (`threads.h`). A fiber runs until a barrier or its end.
//   Blocks run one after the other, but for those of cooperative launches. WARPBUS_ORDER=reverse runs threads from the last to the first: a program whose output
//   then differs depends on the order, which no GPU promises.
// - Memory of cudaMalloc ends at a page that cannot be accessed, and only kernels and cudaMemcpy can access it at all: an
//   index beyond the end, and host code that dereferences a device pointer, end the program with an explanation.
// - Limits, statuses and messages are those of a GPU: more than 1024 threads in a block is an invalid configuration.
//
// - Streams are queues that run when the program waits for them, see `streams.h`.
//
// A program is compiled with this header alone, which has to be quick. Functions without a type of the program among their
// parameters are in `runtime.cpp`, which is compiled once.
//
// Cooperative groups, asynchronous copies, half precision and tensor cores have headers of their own, as in CUDA.
//
// Not here: textures, more than one device.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <limits>
#include <type_traits>
#include <utility>
#if __has_include(<bits/stl_algobase.h>)
#include <bits/stl_algobase.h>  // max and min: the part of <algorithm> that has them
#else
#include <algorithm>
#endif

#include "device_functions.h"
#include "simd_functions.h"
#include "runtime_types.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __managed__
#define __shared__ static  // one block runs at a time; `translate` rewrites most declarations
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__  // nothing: the C++ library writes __attribute__((__noinline__)), which this name must not break
#define __launch_bounds__(...)
#define __grid_constant__
#define CUDART_CB
#define __align__(n) alignas(n)
#define CUDART_VERSION 13000

using std::max;
using std::min;

namespace warpbus {

constexpr unsigned kWarp = 32, kMostThreads = 1024;
constexpr size_t kMostShared = 48 << 10, kStack = 640 << 10, kStackGuard = 64 << 10, kGuard = 64 << 20, kGap = 1024;
constexpr size_t kMostOptIn = 227 << 10;  // shared memory of a kernel that asks for it, as compute capability 9.0
constexpr unsigned kMostBlocks = 32;          // of a multiprocessor
constexpr unsigned kMostCooperative = 16384;  // threads of a cooperative launch: each has a stack
constexpr unsigned kMostCluster = 8;          // blocks of a cluster
constexpr unsigned kMostSpins = 1000;         // rounds of a waiting loop after which other threads run
constexpr unsigned char kUnwritten = 0xA5, kPadding = 0x5A;

// `named`: at bar.sync with a number; `phase`: of an mbarrier; `spin`: for nothing, the others run first.
enum class Waits : unsigned char { nothing, block, named, warp, warpgroup, cluster, grid, phase, spin };

// A thread of a block: a fiber.
struct Thread {
    uint3 thread;
    unsigned number;
    bool ended;
    Waits waits;
    const char *what;       // what it waits for: "__syncthreads()"
    int line;               // of the source, where it waits
    unsigned mask;          // of the lanes that it waits for; 0: those that are at the same line
    unsigned source;        // the lane whose value it asks for
    uint64_t given, got;    // the bits that it hands over, and those that it gets
    unsigned warp_instructions;  // that it has executed together with the other lanes of its warp, see `ptx.h`
    uint64_t barrier;       // that it waits for or tests: the address of an mbarrier, or the number of a named barrier
    uint64_t phase;         // of the mbarrier
    unsigned spins;         // rounds of waiting loops since it last let the others run
    const void *pc;         // where it spins
    bool cluster_arrived;   // at the barrier of the cluster, in the phase `cluster_phase`, and has not waited yet
    uint64_t cluster_phase;
};

// Where the block is in its cluster, and the cluster in the grid; without clusters, each block is one.
struct ClusterPlace {
    uint3 block, size, cluster, clusters;
    unsigned rank, count;
};

// An asynchronous copy to shared memory: it happens when its thread waits for it, no earlier.
struct DeferredCopy {
    void (*run)(const DeferredCopy &);
    void *to;
    const void *from;
    size_t size, zeros;  // bytes that are written, and how many of them, at the end, are 0
    unsigned batch;
};

extern Thread *current;     // nullptr while host code runs
extern uint3 block_at, block_size, grid_size;
extern uint64_t progress;   // counts what may end a waiting loop of another thread

void wait_for(Waits waits, const char *what, int line, unsigned mask = ~0u);
ClusterPlace cluster_place();
void arrive_cluster(int line);
void wait_cluster(int line);
uint64_t map_shared(uint64_t address, unsigned rank, int line);  // the same place in the shared memory of another block
unsigned rank_of_address(uint64_t address);
bool set_cluster(const char *kernel, dim3 size);                 // __cluster_dims__
void let_others_run(const char *what, int line, const void *pc);
void defer_copy(const DeferredCopy &copy);
void commit_copies();
void wait_for_copies(unsigned last);
cudaError_t remember(cudaError_t status);
char *allocate(size_t size, size_t element, bool managed, const char *name);
void *allocate_pinned(size_t size);
size_t add_shared_array(char *begin, size_t size, size_t element, const char *name);
void use_shared_array(size_t number);  // the kernel that runs declares it
char *dynamic_memory(size_t element, const char *name);
void check_atomic(const void *at, size_t size, const void *pc);
cudaError_t copy_symbol(char *symbol, size_t has, size_t offset, void *other, size_t size, cudaMemcpyKind kind);
void forget_traffic();
void write_finding(const char *kind, const char *fields);
[[noreturn]] void refuse_instruction(const char *instruction, int line);

// A kernel with its arguments: a lambda of `translate`.
struct Call {
    const void *lambda;
    void (*run)(const void *);
    const void *(*copy)(const void *);
    void (*drop)(const void *);
};

struct Launch {
    const char *name;
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
    bool cooperative = false;
    dim3 cluster{0, 0, 0};  // 0: that of __cluster_dims__, or a single block
    Launch(const char *name, dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = nullptr)
        : name(name), grid(grid), block(block), shared(shared), stream(stream) {}

    template <class Lambda> cudaError_t operator()(const Lambda &lambda) const {
        return start({&lambda, [](const void *of) { (*static_cast<const Lambda *>(of))(); },
               [](const void *of) -> const void * { return new Lambda(*static_cast<const Lambda *>(of)); },
               [](const void *of) { delete static_cast<const Lambda *>(of); }});
    }
    cudaError_t start(const Call &call) const;
};

template <class... T, size_t... I>
cudaError_t launch_with(const Launch &launch, void (*kernel)(T...), void **arguments, std::index_sequence<I...>) {
    const auto start = [&](std::decay_t<T>... values) { return launch([=] { kernel(values...); }); };
    return start(*static_cast<std::decay_t<T> *>(arguments[I])...);
}

// A launch through a pointer: `translate` adds the kernel's name, and drops a cast to void *.
template <class... T>
cudaError_t cudaLaunchKernel(const char *name, void (*kernel)(T...), dim3 grid, dim3 block, void **arguments,
                             size_t shared = 0, cudaStream_t stream = nullptr) {
    return launch_with(Launch(name, grid, block, shared, stream), kernel, arguments, std::index_sequence_for<T...>{});
}
template <class... T>
cudaError_t cudaLaunchCooperativeKernel(const char *name, void (*kernel)(T...), dim3 grid, dim3 block, void **arguments,
                                        size_t shared = 0, cudaStream_t stream = nullptr) {
    Launch launch(name, grid, block, shared, stream);
    launch.cooperative = true;
    return launch_with(launch, kernel, arguments, std::index_sequence_for<T...>{});
}

// `translate` adds the kernel's name.
template <class... T, class... Arguments>
cudaError_t cudaLaunchKernelEx(const char *name, const cudaLaunchConfig_t *config, void (*kernel)(T...), Arguments &&...arguments) {
    Launch launch(name, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const cudaLaunchAttribute &each = config->attrs[i];
        if (each.id == cudaLaunchAttributeClusterDimension)
            launch.cluster = dim3(each.val.clusterDim.x, each.val.clusterDim.y, each.val.clusterDim.z);
        if (each.id == cudaLaunchAttributeCooperative) launch.cooperative = each.val.cooperative != 0;
    }
    const auto start = [&](std::decay_t<T>... values) { return launch([=] { kernel(values...); }); };
    return start(static_cast<std::decay_t<T>>(arguments)...);
}

cudaError_t set_function_attribute(const char *name, cudaFuncAttribute attribute, int value);
template <class F>
cudaError_t cudaFuncSetAttribute(const char *name, F *, cudaFuncAttribute attribute, int value) {
    return set_function_attribute(name, attribute, value);
}
cudaError_t count_resident(int *blocks, int block, size_t dynamic);
cudaError_t best_block(int *grid, int *block, size_t dynamic, int limit);

template <class T> constexpr size_t element_of = sizeof(T);
template <> inline constexpr size_t element_of<void> = 0;

template <class T> cudaError_t allocate_named(const char *name, T **pointer, size_t size, bool managed) {
    if (!pointer || !size) return remember(cudaErrorInvalidValue);
    char *begin = allocate(size, element_of<T>, managed, name);
    if (!begin) return remember(cudaErrorMemoryAllocation);
    *pointer = reinterpret_cast<T *>(begin);
    return cudaSuccess;
}

// Atomic operations: one thread at a time, and not a race with each other.
template <class T, class Change> __attribute__((noinline, no_sanitize("thread"))) T change(T *at, Change new_value) {
    check_atomic(at, sizeof(T), __builtin_return_address(0));
    T old;
    memcpy(&old, at, sizeof(T));
    const T now = new_value(old);
    memcpy(at, &now, sizeof(T));
    if (memcmp(&old, &now, sizeof(T))) {
        ++progress;
        if (current) current->spins = 0;
    } else if (current && ++current->spins >= kMostSpins) {
        let_others_run("an atomic operation", 0, __builtin_return_address(0));
    }
    return old;
}

// The condition of a loop without a body: it waits for what another thread writes.
inline bool spun(bool again, int line) {
    if (again && current && ++current->spins >= kMostSpins) let_others_run("a loop", line, nullptr);
    return again;
}

template <class T> using Type = T;

// An array of __shared__ memory, with a gap before and behind it in which an access is a mistake.
template <class T, size_t Alignment = 16> struct Shared {
    alignas(128) char before[kGap];
    alignas(Alignment < 128 ? 128 : Alignment) T value;
    char behind[kGap];
    explicit Shared(const char *name) {
        static_assert(sizeof(T) <= kMostShared, "a block has 48 KB of shared memory");
        number = add_shared_array((char *)&value, sizeof(T), sizeof(std::remove_all_extents_t<T>), name);
    }
    T &declared() {
        use_shared_array(number);
        return value;
    }
    size_t number;
};

template <class T> T *dynamic_array(const char *name) { return reinterpret_cast<T *>(dynamic_memory(sizeof(T), name)); }

// The value that a lane gets from lane `source` of its warp; kWarp: one bit per lane, set if its value is not 0.
template <class T> T exchange(unsigned mask, T value, unsigned source, const char *what, int line) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "shuffles take values of at most 8 bytes");
    current->given = 0;
    memcpy(&current->given, &value, sizeof value);
    current->source = source;
    wait_for(Waits::warp, what, line, mask);
    memcpy(&value, &current->got, sizeof value);
    return value;
}

// The values of all lanes of a mask as one.
template <class T, class Join>
T reduce_lanes(unsigned mask, T value, const char *what, int line, const Join &join) {
    bool begun = false;
    T found{};
    for (unsigned lane = 0; lane < kWarp; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const T its = exchange(mask, value, lane, what, line);
        found = begun ? join(found, its) : its;
        begun = true;
    }
    return found;
}

inline unsigned lane() { return current->number % kWarp; }

// The lane to read from: `to` if it is in this lane's group of `width`, else this lane.
inline unsigned within(long to, int width) {
    const long own = lane(), begin = own / width * width;
    return static_cast<unsigned>(to >= begin && to < begin + width ? to : own);
}

}  // namespace warpbus

#define threadIdx (warpbus::current->thread)
inline const uint3 &blockIdx = warpbus::block_at, &blockDim = warpbus::block_size, &gridDim = warpbus::grid_size;
constexpr int warpSize = 32;

#define WARPBUS_LINE int line = __builtin_LINE()

inline void __syncthreads(WARPBUS_LINE) { warpbus::wait_for(warpbus::Waits::block, "__syncthreads()", line); }
inline int __syncthreads_count(int predicate, WARPBUS_LINE) {
    warpbus::current->given = predicate != 0;
    warpbus::wait_for(warpbus::Waits::block, "__syncthreads_count()", line);
    warpbus::current->given = 0;
    return static_cast<int>(warpbus::current->got);
}
inline int __syncthreads_or(int predicate, WARPBUS_LINE) { return __syncthreads_count(predicate, line) > 0; }
inline int __syncthreads_and(int predicate, WARPBUS_LINE) { return __syncthreads_count(!predicate, line) == 0; }
inline void __syncwarp(unsigned mask = ~0u, WARPBUS_LINE) {
    warpbus::wait_for(warpbus::Waits::warp, "__syncwarp()", line, mask);
}
void __threadfence();
inline void __threadfence_system() { __threadfence(); }
void __threadfence_block();

template <class T> T __shfl_sync(unsigned mask, T value, int from, int width = 32, WARPBUS_LINE) {
    const int begin = static_cast<int>(warpbus::lane()) / width * width;
    return warpbus::exchange(mask, value, static_cast<unsigned>(begin + (from & (width - 1))), "__shfl_sync", line);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, WARPBUS_LINE) {
    return warpbus::exchange(mask, value, warpbus::within(long{warpbus::lane()} + by, width), "__shfl_down_sync", line);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, WARPBUS_LINE) {
    return warpbus::exchange(mask, value, warpbus::within(long{warpbus::lane()} - by, width), "__shfl_up_sync", line);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32, WARPBUS_LINE) {
    return warpbus::exchange(mask, value, warpbus::within(long{warpbus::lane()} ^ with, width), "__shfl_xor_sync", line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, WARPBUS_LINE) {
    return warpbus::exchange(mask, static_cast<unsigned>(predicate != 0), warpbus::kWarp, "__ballot_sync", line);
}
inline int __any_sync(unsigned mask, int predicate, WARPBUS_LINE) { return __ballot_sync(mask, predicate, line) != 0; }
inline int __all_sync(unsigned mask, int predicate, WARPBUS_LINE) { return __ballot_sync(mask, !predicate, line) == 0; }
// The lanes that execute this line together.
inline unsigned __activemask(WARPBUS_LINE) {
    warpbus::wait_for(warpbus::Waits::warp, "__activemask()", line, 0);
    return static_cast<unsigned>(warpbus::current->got);
}
#define WARPBUS_REDUCE(name, joined) \
    template <class T> T __reduce_##name##_sync(unsigned mask, T value, WARPBUS_LINE) { \
        return warpbus::reduce_lanes(mask, value, "__reduce_" #name "_sync", line, [](T a, T b) { return joined; }); \
    }
WARPBUS_REDUCE(add, a + b)
WARPBUS_REDUCE(min, min(a, b))
WARPBUS_REDUCE(max, max(a, b))
WARPBUS_REDUCE(and, a & b)
WARPBUS_REDUCE(or, a | b)
WARPBUS_REDUCE(xor, a ^ b)
#undef WARPBUS_REDUCE
template <class T> unsigned __match_any_sync(unsigned mask, T value, WARPBUS_LINE) {
    unsigned found = 0;
    for (unsigned lane = 0; lane < warpbus::kWarp; ++lane)
        if (mask >> lane & 1)
            found |= unsigned{warpbus::exchange(mask, value, lane, "__match_any_sync", line) == value} << lane;
    return found;
}

template <class T, class U> __forceinline__ T atomicAdd(T *at, U value) {
    return warpbus::change(at, [&](T old) { return static_cast<T>(old + static_cast<T>(value)); });
}
template <class T, class U> __forceinline__ T atomicSub(T *at, U value) {
    return warpbus::change(at, [&](T old) { return static_cast<T>(old - static_cast<T>(value)); });
}
template <class T, class U> __forceinline__ T atomicMax(T *at, U value) {
    return warpbus::change(at, [&](T old) { return max(old, static_cast<T>(value)); });
}
template <class T, class U> __forceinline__ T atomicMin(T *at, U value) {
    return warpbus::change(at, [&](T old) { return min(old, static_cast<T>(value)); });
}
template <class T, class U> __forceinline__ T atomicExch(T *at, U value) {
    return warpbus::change(at, [&](T) { return static_cast<T>(value); });
}
template <class T> __forceinline__ T atomicCAS(T *at, T expected, T value) {
    return warpbus::change(at, [&](T old) { return old == expected ? value : old; });
}

template <class T, class U> __forceinline__ T atomicAnd(T *at, U value) {
    return warpbus::change(at, [&](T old) { return static_cast<T>(old & static_cast<T>(value)); });
}
template <class T, class U> __forceinline__ T atomicOr(T *at, U value) {
    return warpbus::change(at, [&](T old) { return static_cast<T>(old | static_cast<T>(value)); });
}
template <class T, class U> __forceinline__ T atomicXor(T *at, U value) {
    return warpbus::change(at, [&](T old) { return static_cast<T>(old ^ static_cast<T>(value)); });
}
__forceinline__ unsigned atomicInc(unsigned *at, unsigned last) {
    return warpbus::change(at, [&](unsigned old) { return old >= last ? 0 : old + 1; });
}
__forceinline__ unsigned atomicDec(unsigned *at, unsigned last) {
    return warpbus::change(at, [&](unsigned old) { return old == 0 || old > last ? last : old - 1; });
}

#define WARPBUS_SCOPES(name) \
    template <class T, class U> __forceinline__ T name##_block(T *at, U value) { return name(at, value); } \
    template <class T, class U> __forceinline__ T name##_system(T *at, U value) { return name(at, value); }
WARPBUS_SCOPES(atomicAdd)
WARPBUS_SCOPES(atomicMax)
WARPBUS_SCOPES(atomicMin)
WARPBUS_SCOPES(atomicExch)
#undef WARPBUS_SCOPES

template <class T> T __ldg(const T *at) { return *at; }
template <class T> T __ldcg(const T *at) { return *at; }
template <class T> T __ldcs(const T *at) { return *at; }
template <class T> void __stcg(T *at, T value) { *at = value; }
template <class T> void __stcs(T *at, T value) { *at = value; }
[[noreturn]] inline void __trap() { abort(); }

// Shared memory lies below 4 GB: its addresses are also valid in 32 bits.
inline size_t __cvta_generic_to_shared(const void *at) { return reinterpret_cast<size_t>(at); }
inline void *__cvta_shared_to_generic(size_t at) { return reinterpret_cast<void *>(at); }
inline size_t __cvta_generic_to_global(const void *at) { return reinterpret_cast<size_t>(at); }
inline void *__cvta_global_to_generic(size_t at) { return reinterpret_cast<void *>(at); }
long long clock64();
__forceinline__ void __nanosleep(unsigned, WARPBUS_LINE) { warpbus::let_others_run("__nanosleep()", line, nullptr); }

template <class T> cudaError_t cudaMalloc(T **pointer, size_t size) {
    return warpbus::allocate_named("device memory", pointer, size, false);
}
template <class T> cudaError_t cudaMallocManaged(T **pointer, size_t size, unsigned = 1) {
    return warpbus::allocate_named("managed memory", pointer, size, true);
}
// With the text of the argument, an allocation has the name of its pointer.
#define cudaMalloc(pointer, size) warpbus::allocate_named(#pointer, pointer, size, false)
template <class T> cudaError_t cudaMallocAsync(T **pointer, size_t size, cudaStream_t) {
    return warpbus::allocate_named("device memory", pointer, size, false);
}
template <class T> cudaError_t cudaHostAlloc(T **pointer, size_t size, unsigned) {
    *pointer = static_cast<T *>(warpbus::allocate_pinned(size));
    return *pointer ? cudaSuccess : warpbus::remember(cudaErrorMemoryAllocation);
}
template <class T> cudaError_t cudaHostGetDevicePointer(T **device, void *host, unsigned) {
    *device = static_cast<T *>(host);
    return cudaSuccess;
}
template <class T> cudaError_t cudaMallocHost(T **pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }
template <class T> cudaError_t cudaMallocPitch(T **pointer, size_t *pitch, size_t width, size_t height) {
    *pitch = (width + 511) / 512 * 512;
    return warpbus::allocate_named("pitched memory", pointer, *pitch * height, false);
}
template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, F, int block, size_t dynamic) {
    return warpbus::count_resident(blocks, block, dynamic);
}
template <class F>
cudaError_t cudaOccupancyMaxPotentialBlockSize(int *grid, int *block, F, size_t dynamic = 0, int limit = 0) {
    return warpbus::best_block(grid, block, dynamic, limit);
}
template <class F> cudaError_t cudaFuncSetCacheConfig(F, cudaFuncCache) { return cudaSuccess; }
template <class T>
cudaError_t cudaMemcpyToSymbol(T &symbol, const void *from, size_t size, size_t offset = 0,
                               cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
    return warpbus::copy_symbol((char *)&symbol, sizeof symbol, offset, const_cast<void *>(from), size, kind);
}
template <class T>
cudaError_t cudaMemcpyFromSymbol(void *to, const T &symbol, size_t size, size_t offset = 0,
                                 cudaMemcpyKind kind = cudaMemcpyDeviceToHost) {
    return warpbus::copy_symbol((char *)&symbol, sizeof symbol, offset, to, size, kind);
}

const char *cudaGetErrorName(cudaError_t status);
const char *cudaGetErrorString(cudaError_t status);
cudaError_t cudaPeekAtLastError();
cudaError_t cudaGetLastError();
cudaError_t cudaFreeHost(void *pointer);
cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags);
cudaError_t cudaHostUnregister(void *pointer);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *pointer);
cudaError_t cudaMemAdvise(const void *at, size_t size, cudaMemoryAdvise advice, int device);
cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult *result = nullptr);
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                             cudaDriverEntryPointQueryResult *result = nullptr);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaFree(void *pointer);
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream);
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind);
cudaError_t cudaMemset2D(void *at, size_t pitch, int value, size_t width, size_t height);
cudaError_t cudaMemGetInfo(size_t *available, size_t *total);
cudaError_t cudaMemPrefetchAsync(const void *at, size_t size, int device, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpyPeer(void *to, int, const void *from, int, size_t size);
cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void *at, int value, size_t size);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceReset();
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int);
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned);
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int device);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventDestroy(cudaEvent_t);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *count);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long = 0);
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, cudaGraphNode_t *, char *, size_t) {
    return cudaGraphInstantiate(exec, graph, 0);
}
inline cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(exec, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphDestroy(cudaGraph_t);

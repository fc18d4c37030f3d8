// CUDA programs on a CPU: the part of the runtime API and of the language that a first course uses.
//
// `warpbus cuda run FILE --device cpu` compiles a .cu file with the host's C++ compiler and this header in the place of
// CUDA's own. It is for learning: right and wrong programs behave as on a GPU, only slowly.
//
// - The threads of a block are fibers on one thread of the CPU (`threads.h`). A fiber runs until a barrier or its end.
//   Blocks run one after the other. WARPBUS_ORDER=reverse runs threads from the last to the first: a program whose output
//   then differs depends on the order, which no GPU promises.
// - Memory of cudaMalloc ends at a page that cannot be accessed, and only kernels and cudaMemcpy can access it at all: an
//   index beyond the end, and host code that dereferences a device pointer, end the program with an explanation.
// - Limits, statuses and messages are those of a GPU: more than 1024 threads in a block is an invalid configuration.
//
// Not here: textures, cooperative groups, half precision, tensor cores, streams that overlap.
#pragma once

#include <chrono>
#include <cmath>

#include "threads.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static  // one block runs at a time
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define CUDART_VERSION 13000

using std::max;
using std::min;

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

inline cudaError_t last;

inline cudaError_t remember(cudaError_t status) {
    if (status != cudaSuccess) last = status;
    return status;
}

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
        run_kernel(name, grid, block, shared, call);
    }
};

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
    return old;
}

}  // namespace warpbus

#define threadIdx (warpbus::current->thread)
#define blockIdx (warpbus::block_at)
#define blockDim (warpbus::block_size)
#define gridDim (warpbus::grid_size)
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
inline void __threadfence() { warpbus::check_unordered(); }
inline void __threadfence_block() {}

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
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(static_cast<unsigned>(bits)) : 32; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

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
    return warpbus::allocate_named("device memory", pointer, size, false);
}
template <class T> cudaError_t cudaMallocManaged(T **pointer, size_t size, unsigned = 1) {
    return warpbus::allocate_named("managed memory", pointer, size, true);
}
// With the text of the argument, an allocation has the name of its pointer.
#define cudaMalloc(pointer, size) warpbus::allocate_named(#pointer, pointer, size, false)
template <class T> cudaError_t cudaMallocHost(T **pointer, size_t size) {
    *pointer = static_cast<T *>(malloc(size));
    return *pointer ? cudaSuccess : warpbus::remember(cudaErrorMemoryAllocation);
}
inline cudaError_t cudaFreeHost(void *pointer) { free(pointer); return cudaSuccess; }
inline cudaError_t cudaFree(void *pointer) {
    return !pointer || warpbus::release(pointer) ? cudaSuccess : warpbus::remember(cudaErrorInvalidValue);
}
inline cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (!warpbus::is_of(to, size, to_device) || !warpbus::is_of(from, size, from_device)))
        return warpbus::remember(cudaErrorInvalidValue);
    warpbus::expose(true);
    memcpy(to, from, size);
    warpbus::check_host_write(to, size);
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
    warpbus::check_host_write(at, size);
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

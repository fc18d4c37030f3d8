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
// - Streams are queues that run when the program waits for them, see `streams.h`.
//
// Not here: textures, cooperative groups, half precision, tensor cores, more than one device.
#pragma once

#include <chrono>
#include <cmath>

#include "streams.h"
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
    cudaErrorNotReady = 600,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureUnjoined = 904,
    cudaErrorStreamCaptureImplicit = 906,
};
using cudaError = cudaError_t;
enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4,
};
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2,
};
constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;
constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1;
using cudaStream_t = warpbus_stream *;
using cudaEvent_t = warpbus_event *;
using cudaGraph_t = warpbus_graph *;
using cudaGraphExec_t = struct warpbus_graph_exec *;
using cudaGraphNode_t = struct warpbus_graph_node *;
using cudaHostFn_t = void (*)(void *);
struct warpbus_graph_exec { std::vector<std::function<void()>> nodes; };

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
    cudaStream_t stream;
    Launch(const char *name, dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = nullptr)
        : name(name), grid(grid), block(block), shared(shared), stream(stream) {}

    void operator()(const std::function<void()> &call) const {
        const uint64_t threads = uint64_t{block.x} * block.y * block.z;
        const bool fits = threads >= 1 && threads <= kMostThreads && block.z <= 64 && grid.x >= 1 && grid.y >= 1 &&
                          grid.z >= 1 && grid.x <= 2147483647u && grid.y <= 65535 && grid.z <= 65535;
        if (!fits || shared > kMostShared) {
            remember(cudaErrorInvalidConfiguration);
            return;
        }
        if (!stream && capturing) stop("default_stream", field("kernel", name));
        if (!stream) {
            run_streams(false);
            run_kernel(name, grid, block, shared, call);
            return;
        }
        // A launch with a stream captures its arguments by value, see `translate`.
        enqueue(stream, [launch = *this, call] {
            run_kernel(launch.name, launch.grid, launch.block, launch.shared, call);
        });
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
        case cudaErrorNotReady: return "cudaErrorNotReady";
        case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
        case cudaErrorStreamCaptureUnjoined: return "cudaErrorStreamCaptureUnjoined";
        case cudaErrorStreamCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
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
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
        case cudaErrorStreamCaptureImplicit: return "operation would make the legacy stream depend on a capturing blocking stream";
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
template <class T> cudaError_t cudaHostAlloc(T **pointer, size_t size, unsigned) {
    *pointer = static_cast<T *>(malloc(size));
    if (!*pointer) return warpbus::remember(cudaErrorMemoryAllocation);
    warpbus::pinned[reinterpret_cast<char *>(*pointer)] = size;
    return cudaSuccess;
}
template <class T> cudaError_t cudaMallocHost(T **pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }
inline cudaError_t cudaFreeHost(void *pointer) {
    warpbus::run_streams(true);
    warpbus::pinned.erase(static_cast<char *>(pointer));
    free(pointer);
    return cudaSuccess;
}
inline cudaError_t cudaFree(void *pointer) {
    warpbus::run_streams(true);
    return !pointer || warpbus::release(pointer) ? cudaSuccess : warpbus::remember(cudaErrorInvalidValue);
}

namespace warpbus {

inline void copy(void *to, const void *from, size_t size) {
    expose(true);
    memcpy(to, from, size);
    check_host_write(to, size);
    expose(false);
}

inline bool copies(const void *to, const void *from, size_t size, cudaMemcpyKind kind) {
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    return kind == cudaMemcpyDefault || (is_of(to, size, to_device) && is_of(from, size, from_device));
}

}  // namespace warpbus

inline cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
    if (!warpbus::copies(to, from, size, kind)) return warpbus::remember(cudaErrorInvalidValue);
    if (warpbus::breaks_capture()) return warpbus::remember(cudaErrorStreamCaptureImplicit);
    warpbus::run_streams(false);
    warpbus::copy(to, from, size);
    return cudaSuccess;
}
// From pageable memory the driver takes the bytes before it returns, to pageable memory it waits for the copy.
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t stream = nullptr) {
    if (!warpbus::copies(to, from, size, kind)) return warpbus::remember(cudaErrorInvalidValue);
    if (!stream) return cudaMemcpy(to, from, size, kind);
    if (!stream->graph && kind == cudaMemcpyHostToDevice && !warpbus::is_pinned(from, size)) {
        const char *begin = static_cast<const char *>(from);
        const std::vector<char> taken(begin, begin + size);
        warpbus::enqueue(stream, [=] { warpbus::copy(to, taken.data(), taken.size()); });
        return cudaSuccess;
    }
    warpbus::enqueue(stream, [=] { warpbus::copy(to, from, size); });
    if (!stream->graph && kind == cudaMemcpyDeviceToHost && !warpbus::is_pinned(to, size))
        warpbus::run_until(stream);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream = nullptr) {
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}
inline cudaError_t cudaMemcpyPeer(void *to, int, const void *from, int, size_t size) {
    return cudaMemcpy(to, from, size, cudaMemcpyDeviceToDevice);
}
inline cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream = nullptr) {
    if (!warpbus::is_of(at, size, true)) return warpbus::remember(cudaErrorInvalidValue);
    if (!stream && warpbus::breaks_capture()) return warpbus::remember(cudaErrorStreamCaptureImplicit);
    warpbus::enqueue(stream, [=] {
        warpbus::expose(true);
        memset(at, value, size);
        warpbus::check_host_write(at, size);
        warpbus::expose(false);
    });
    return cudaSuccess;
}
inline cudaError_t cudaMemset(void *at, int value, size_t size) { return cudaMemsetAsync(at, value, size); }
template <class T> cudaError_t cudaMemcpyToSymbol(T &symbol, const void *from, size_t size) {
    if (size > sizeof symbol) return warpbus::remember(cudaErrorInvalidValue);
    memcpy(&symbol, from, size);
    return cudaSuccess;
}

inline cudaError_t cudaDeviceSynchronize() {
    if (warpbus::breaks_capture()) return warpbus::remember(cudaErrorStreamCaptureUnsupported);
    warpbus::run_streams(true);
    return warpbus::last;
}
inline cudaError_t cudaDeviceReset() { return cudaSuccess; }
inline cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { *can = 0; return cudaSuccess; }
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return warpbus::remember(cudaErrorInvalidDevice); }
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

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    *stream = new warpbus_stream;
    (*stream)->blocking = !(flags & cudaStreamNonBlocking);
    warpbus::streams.push_back(*stream);
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (stream ? stream->graph != nullptr : warpbus::capturing != nullptr) {
        warpbus::breaks_capture();
        return warpbus::remember(cudaErrorStreamCaptureUnsupported);
    }
    if (!stream) warpbus::run_streams(false);
    if (stream) warpbus::run_until(stream);
    return warpbus::last;
}
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return stream && warpbus::step(stream) ? cudaErrorNotReady : cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    const cudaError_t status = cudaStreamSynchronize(stream);  // an event may still name it, so it is kept
    std::erase(warpbus::streams, stream);
    return status;
}
inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    warpbus::enqueue(stream, [=] { function(data); });
    return cudaSuccess;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { *event = new warpbus_event; return cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }  // an operation may still set it, so it is kept
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
    warpbus::record(event, stream);
    return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
    warpbus::wait_for_event(stream, event);
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event->graph && warpbus::breaks_capture()) return warpbus::remember(cudaErrorStreamCaptureUnsupported);
    if (event->stream) warpbus::run_until(event->stream, event, event->recorded);
    return warpbus::last;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (event->done == event->recorded) return cudaSuccess;
    warpbus::step(event->stream);
    return cudaErrorNotReady;
}
inline cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    if (!from->recorded || !to->recorded) return warpbus::remember(cudaErrorInvalidValue);
    if (from->done < from->recorded || to->done < to->recorded) return warpbus::remember(cudaErrorNotReady);
    *milliseconds = std::chrono::duration<float, std::milli>(to->at - from->at).count();
    return cudaSuccess;
}

// A graph's operations run in the order in which they were captured, which the dependencies of the graph allow.
inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (!stream || warpbus::capturing) return warpbus::remember(cudaErrorStreamCaptureUnsupported);
    stream->graph = warpbus::capturing = new warpbus_graph;
    stream->graph->origin = stream;
    return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    warpbus_graph *found = warpbus::capturing;
    *graph = nullptr;
    if (!found || found->origin != stream) return warpbus::remember(cudaErrorInvalidValue);
    bool unjoined = false;
    for (warpbus_stream *each : warpbus::streams)
        if (each->graph == found) {
            unjoined = unjoined || (each != stream && each->joined < each->captured);
            each->graph = nullptr;
            each->captured = each->joined = 0;
        }
    warpbus::capturing = nullptr;
    if (found->invalid) return warpbus::remember(cudaErrorStreamCaptureInvalidated);
    if (unjoined) return warpbus::remember(cudaErrorStreamCaptureUnjoined);
    *graph = found;
    return cudaSuccess;
}
inline cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *count) {
    *count = graph->nodes.size();
    return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long = 0) {
    *exec = nullptr;
    if (!graph) return warpbus::remember(cudaErrorInvalidValue);
    *exec = new warpbus_graph_exec{graph->nodes};
    return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    if (!exec) return warpbus::remember(cudaErrorInvalidValue);
    for (const auto &node : exec->nodes) warpbus::enqueue(stream, node);
    return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { delete exec; return cudaSuccess; }
inline cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }  // an event may still name it, so it is kept

// The functions of `cuda_runtime.h` that programs call: compiled once, and linked with every program.
//
// With WARPBUS_CHECKS, they are those of a program whose accesses to memory are checked.
#include <chrono>
#include <cstdarg>
#include <memory>

#include "scheduler.h"
#include "streams.h"
#include "tensor_maps.h"
#ifdef WARPBUS_CHECKS
#include "checks.h"
#endif

namespace warpbus {

Thread *current;
uint3 block_at, block_size, grid_size;
uint64_t progress;
// The last error of a call. A launch that is refused is such an error: calls that wait return only the errors of kernels
// that ran, which end the program here.
cudaError_t last;

#ifndef WARPBUS_CHECKS
void check_atomic(const void *, size_t, const void *) {}
void forget_traffic() {}
#endif

cudaError_t remember(cudaError_t status) {
    if (status != cudaSuccess) last = status;
    return status;
}

void write_finding(const char *kind, const char *fields) {
    if (const char *path = getenv("WARPBUS_FINDINGS"))
        if (FILE *file = fopen(path, "a")) {
            fprintf(file, "{\"kind\": \"%s\"%s}\n", kind, fields);
            fclose(file);
        }
}

void refuse_instruction(const char *instruction, int line) {
    stop("ptx", (current ? place(*current) : std::string()) + field("instruction", instruction) + field("line", line));
}

void wait_for(Waits waits, const char *what, int line, unsigned mask) {
    current->waits = waits;
    current->what = what;
    current->line = line;
    current->mask = mask;
    swapcontext(&running().context, &scheduler);
}

void let_others_run(const char *what, int line, const void *pc) {
    current->spins = 0;
    current->pc = pc;
    wait_for(Waits::spin, what, line);
}

void defer_copy(const DeferredCopy &copy) {
    check_copy(copy.to, copy.size, __builtin_return_address(0));
    running().copies.push_back(copy);
    running().copies.back().batch = running().batches;
}

void commit_copies() { ++running().batches; }

// Make the copies of all batches but the last ones.
void wait_for_copies(unsigned last) {
    Fiber &own = running();
    size_t kept = 0;
    for (const DeferredCopy &each : own.copies) {
        if (each.batch + last < own.batches) each.run(each);
        else own.copies[kept++] = each;
    }
    own.copies.resize(kept);
}

char *allocate(size_t size, size_t element, bool managed, const char *name) {
    const size_t padded = (size + 15) / 16 * 16, mapped = (padded + page() - 1) / page() * page();
    char *reserved = static_cast<char *>(mmap(nullptr, kGuard + mapped + kGuard, PROT_NONE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (reserved == MAP_FAILED) return nullptr;
    char *pages = reserved + kGuard, *begin = pages + mapped - padded;
    if (mprotect(pages, mapped, PROT_READ | PROT_WRITE)) return nullptr;
    install();
    memset(pages, kPadding, mapped);
    memset(begin, kUnwritten, size);  // new memory of a GPU is not zero either
    while (*name == '&' || *name == ' ') ++name;
    if (*name == '(') name = strrchr(name, '&') ? strrchr(name, '&') + 1 : name;  // (void **)&x
    allocations[begin] = {reserved, pages, begin, mapped, size, element, managed, name};
    if (!managed) mprotect(pages, mapped, PROT_NONE);
    return begin;
}

void *allocate_pinned(size_t size) {
    void *found = malloc(size);
    if (found) pinned[static_cast<char *>(found)] = size;
    return found;
}

size_t add_shared_array(char *begin, size_t size, size_t element, const char *name) {
    if (shared_arrays.empty()) shared_arrays.push_back({});  // the first one is dynamic memory
    shared_arrays.push_back({begin, size, element, name, 0});
    memset(begin, kUnwritten, size);
    check_new_array(shared_arrays.back());
    return shared_arrays.size() - 1;
}

void use_shared_array(size_t number) { shared_arrays[number].launch = launches; }

char *dynamic_memory(size_t element, const char *name) {
    if (shared_arrays.empty()) shared_arrays.push_back({});  // declared outside of functions: before the first launch
    SharedArray &found = shared_arrays.front();
    if (found.name != name) {
        found.name = name;
        found.element = element;
        check_dynamic_array(found);
    }
    return dynamic + kGap;
}

// A kernel's name without the namespace and arguments of a template.
static std::string base_name(const char *name) {
    const std::string whole(name, strcspn(name, "<"));
    const size_t begin = whole.rfind(':') == std::string::npos ? 0 : whole.rfind(':') + 1;
    return whole.substr(begin, whole.find_last_not_of(' ') + 1 - begin);
}

static std::map<std::string, size_t> raised;  // kernels that may have more than kMostShared bytes of dynamic memory

static size_t most_dynamic(const char *name) {
    const auto found = raised.find(base_name(name));
    return found == raised.end() ? kMostShared : found->second;
}

cudaError_t set_function_attribute(const char *name, cudaFuncAttribute attribute, int value) {
    const bool carveout = attribute == cudaFuncAttributePreferredSharedMemoryCarveout;
    if (value < (carveout ? -1 : 0) || (carveout ? value > 100 : static_cast<size_t>(value) > kMostOptIn))
        return remember(cudaErrorInvalidValue);
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize)
        raised[base_name(name)] = std::max(static_cast<size_t>(value), kMostShared);
    return cudaSuccess;
}

// Of the limits of a multiprocessor, those of threads and shared memory: registers are not known here.
static int resident_blocks(int block, size_t dynamic) {
    const int padded = (block + 31) / 32 * 32;
    const size_t by_memory = dynamic ? kMostOptIn / dynamic : kMostBlocks;
    return block > static_cast<int>(kMostThreads) ? 0
         : static_cast<int>(std::min({size_t{kMostThreads} / padded, by_memory, size_t{kMostBlocks}}));
}

static std::map<std::string, dim3> kernel_clusters;

bool set_cluster(const char *kernel, dim3 size) {
    kernel_clusters[kernel] = size;
    return true;
}

cudaError_t Launch::start(const Call &call) const {
    if (current) stop("nested", place(*current) + field("launched", name));
    const uint64_t threads = uint64_t{block.x} * block.y * block.z;
    const bool fits = threads >= 1 && threads <= kMostThreads && block.z <= 64 && grid.x >= 1 && grid.y >= 1 &&
                      grid.z >= 1 && grid.x <= 2147483647u && grid.y <= 65535 && grid.z <= 65535;
    if (!fits || shared > most_dynamic(name))
        return remember(fits ? cudaErrorInvalidValue : cudaErrorInvalidConfiguration);
    if (cooperative && threads * grid.x * grid.y * grid.z > kMostCooperative)
        return remember(cudaErrorCooperativeLaunchTooLarge);
    Launch own = *this;
    if (const auto of = kernel_clusters.find(base_name(name)); own.cluster.x == 0)
        own.cluster = of == kernel_clusters.end() ? dim3(1) : of->second;
    const uint3 size = own.cluster;
    if (!size.x || !size.y || !size.z || uint64_t{size.x} * size.y * size.z > kMostCluster || grid.x % size.x || grid.y % size.y ||
        grid.z % size.z)
        return remember(cudaErrorInvalidClusterSize);
    if (!stream && capturing) stop("default_stream", field("kernel", name));
    if (!stream) {
        run_streams(false);
        run_kernel(own, [&call] { call.run(call.lambda); });
        return cudaSuccess;
    }
    // A launch with a stream captures its arguments by value, see `translate`.
    const std::shared_ptr<const void> kept(call.copy(call.lambda), call.drop);
    enqueue(stream, [launch = own, run = call.run, kept] {
        run_kernel(launch, [&] { run(kept.get()); });
    });
    return cudaSuccess;
}

}  // namespace warpbus

// The linker puts these in the place of printf, and of what a compiler makes of simple calls of it, see `programs.py`.
extern "C" int __real_puts(const char *text);
extern "C" int __real_putchar(int letter);
extern "C" int __wrap_printf(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int size = warpbus::current ? 0 : vprintf(format, arguments);
    if (warpbus::current) {
        char *text = nullptr;
        size = vasprintf(&text, format, arguments);
        if (size >= 0) warpbus::printed.push_back({warpbus::phase, warpbus::current->number, text});
        free(text);
    }
    va_end(arguments);
    return size;
}
extern "C" int __wrap_puts(const char *text) { return warpbus::current ? __wrap_printf("%s\n", text) : __real_puts(text); }
extern "C" int __wrap_putchar(int letter) { return warpbus::current ? __wrap_printf("%c", letter) : __real_putchar(letter); }

void __threadfence() { warpbus::check_fence(false); }
void __threadfence_block() { warpbus::check_fence(true); }

long long clock64() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

const char *cudaGetErrorName(cudaError_t status) {
    switch (status) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
        case cudaErrorInvalidPitchValue: return "cudaErrorInvalidPitchValue";
        case cudaErrorInvalidMemcpyDirection: return "cudaErrorInvalidMemcpyDirection";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorSymbolNotFound: return "cudaErrorSymbolNotFound";
        case cudaErrorNotReady: return "cudaErrorNotReady";
        case cudaErrorCooperativeLaunchTooLarge: return "cudaErrorCooperativeLaunchTooLarge";
        case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
        case cudaErrorStreamCaptureUnjoined: return "cudaErrorStreamCaptureUnjoined";
        case cudaErrorStreamCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
        case cudaErrorInvalidClusterSize: return "cudaErrorInvalidClusterSize";
    }
    return "cudaErrorUnknown";
}
const char *cudaGetErrorString(cudaError_t status) {
    switch (status) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorInvalidPitchValue: return "invalid pitch argument";
        case cudaErrorInvalidMemcpyDirection: return "invalid copy direction for memcpy";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorSymbolNotFound: return "named symbol not found";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorCooperativeLaunchTooLarge: return "too many blocks in cooperative launch";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
        case cudaErrorStreamCaptureImplicit: return "operation would make the legacy stream depend on a capturing blocking stream";
        case cudaErrorInvalidClusterSize: return "cluster misconfiguration";
    }
    return "unknown error";
}
cudaError_t cudaPeekAtLastError() { return warpbus::last; }
cudaError_t cudaGetLastError() { const cudaError_t found = warpbus::last; warpbus::last = cudaSuccess; return found; }

cudaError_t cudaFreeHost(void *pointer) {
    warpbus::run_streams(true);
    warpbus::pinned.erase(static_cast<char *>(pointer));
    free(pointer);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned) {
    if (!pointer || !size || warpbus::owner(pointer)) return warpbus::remember(cudaErrorInvalidValue);
    warpbus::pinned[static_cast<char *>(pointer)] = size;
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *pointer) {
    return warpbus::pinned.erase(static_cast<char *>(pointer)) ? cudaSuccess : warpbus::remember(cudaErrorInvalidValue);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *pointer) {
    const warpbus::Allocation *of = warpbus::owner(pointer);
    const bool pinned = warpbus::is_pinned(pointer, 1), reachable = !of || of->managed;
    void *at = const_cast<void *>(pointer);
    found->type = of ? (of->managed ? cudaMemoryTypeManaged : cudaMemoryTypeDevice)
                     : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    found->device = of || pinned ? 0 : cudaInvalidDeviceId;
    found->devicePointer = of || pinned ? at : nullptr;
    found->hostPointer = reachable ? at : nullptr;
    return cudaSuccess;
}
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    if (!pointer) return cudaSuccess;
    const warpbus::Allocation *found = warpbus::owner(pointer);
    if (!found || found->begin != pointer) return warpbus::remember(cudaErrorInvalidValue);
    warpbus::enqueue(stream, [=] { warpbus::release(pointer); });
    return cudaSuccess;
}
cudaError_t cudaFree(void *pointer) {
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

// A symbol is memory of the host here.
cudaError_t copy_symbol(char *symbol, size_t has, size_t offset, void *other, size_t size, cudaMemcpyKind kind) {
    if (offset > has || size > has - offset) return remember(cudaErrorInvalidValue);
    const bool to_symbol = kind == cudaMemcpyHostToDevice;
    if (!to_symbol && kind != cudaMemcpyDeviceToHost) return remember(cudaErrorInvalidMemcpyDirection);
    char *from = to_symbol ? static_cast<char *>(other) : symbol + offset;
    return cudaMemcpy(to_symbol ? symbol + offset : other, from, size, cudaMemcpyHostToHost);
}

}  // namespace warpbus

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
    if (!warpbus::copies(to, from, size, kind)) return warpbus::remember(cudaErrorInvalidValue);
    if (warpbus::breaks_capture()) return warpbus::remember(cudaErrorStreamCaptureImplicit);
    warpbus::run_streams(false);
    warpbus::copy(to, from, size);
    return cudaSuccess;
}
// From pageable memory the driver takes the bytes before it returns, to pageable memory it waits for the copy.
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
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
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind) {
    if (width > to_pitch || width > from_pitch) return warpbus::remember(cudaErrorInvalidPitchValue);
    for (size_t row = 0; row < height; ++row) {
        const cudaError_t status = cudaMemcpy(static_cast<char *>(to) + row * to_pitch,
                                              static_cast<const char *>(from) + row * from_pitch, width, kind);
        if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
}
cudaError_t cudaMemset2D(void *at, size_t pitch, int value, size_t width, size_t height) {
    if (width > pitch) return warpbus::remember(cudaErrorInvalidPitchValue);
    for (size_t row = 0; row < height; ++row) {
        const cudaError_t status = cudaMemset(static_cast<char *>(at) + row * pitch, value, width);
        if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *available = static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * warpbus::page();
    *total = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * warpbus::page();
    return cudaSuccess;
}
cudaError_t cudaMemPrefetchAsync(const void *at, size_t, int, cudaStream_t) {
    const warpbus::Allocation *found = warpbus::owner(at);
    return found && found->managed ? cudaSuccess : warpbus::remember(cudaErrorInvalidValue);
}
cudaError_t cudaMemAdvise(const void *at, size_t size, cudaMemoryAdvise, int device) {
    return cudaMemPrefetchAsync(at, size, device, nullptr);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemcpyPeer(void *to, int, const void *from, int, size_t size) {
    return cudaMemcpy(to, from, size, cudaMemcpyDeviceToDevice);
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream) {
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
cudaError_t cudaMemset(void *at, int value, size_t size) { return cudaMemsetAsync(at, value, size); }
cudaError_t cudaDeviceSynchronize() {
    if (warpbus::breaks_capture()) return warpbus::remember(cudaErrorStreamCaptureUnsupported);
    warpbus::run_streams(true);
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }
cudaError_t cudaDeviceReset() { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return warpbus::remember(cudaErrorInvalidDevice); }
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device ? warpbus::remember(cudaErrorInvalidDevice) : cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp found;
    const cudaError_t status = cudaGetDeviceProperties(&found, device);
    if (status != cudaSuccess) return status;
    const std::map<cudaDeviceAttr, size_t> values = {
        {cudaDevAttrMaxThreadsPerBlock, found.maxThreadsPerBlock},
        {cudaDevAttrMaxBlockDimX, found.maxThreadsDim[0]},
        {cudaDevAttrMaxBlockDimY, found.maxThreadsDim[1]},
        {cudaDevAttrMaxBlockDimZ, found.maxThreadsDim[2]},
        {cudaDevAttrMaxGridDimX, found.maxGridSize[0]},
        {cudaDevAttrMaxGridDimY, found.maxGridSize[1]},
        {cudaDevAttrMaxGridDimZ, found.maxGridSize[2]},
        {cudaDevAttrMaxSharedMemoryPerBlock, found.sharedMemPerBlock},
        {cudaDevAttrTotalConstantMemory, found.totalConstMem},
        {cudaDevAttrWarpSize, found.warpSize},
        {cudaDevAttrMaxRegistersPerBlock, found.regsPerBlock},
        {cudaDevAttrMultiProcessorCount, found.multiProcessorCount},
        {cudaDevAttrMaxThreadsPerMultiProcessor, found.maxThreadsPerMultiProcessor},
        {cudaDevAttrComputeCapabilityMajor, found.major},
        {cudaDevAttrComputeCapabilityMinor, found.minor},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, found.sharedMemPerMultiprocessor},
        {cudaDevAttrManagedMemory, found.managedMemory},
        {cudaDevAttrConcurrentManagedAccess, found.concurrentManagedAccess},
        {cudaDevAttrCooperativeLaunch, found.cooperativeLaunch},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, found.sharedMemPerBlockOptin},
    };
    if (const auto its = values.find(attribute); its != values.end()) {
        *value = static_cast<int>(its->second);
        return cudaSuccess;
    }
    return warpbus::remember(cudaErrorInvalidValue);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int device) {
    if (device) return warpbus::remember(cudaErrorInvalidDevice);
    *found = {};
    snprintf(found->name, sizeof found->name, "CPU, in the place of a GPU (warpbus cuda run)");
    found->totalGlobalMem = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * warpbus::page();
    found->sharedMemPerBlock = warpbus::kMostShared;
    found->sharedMemPerBlockOptin = found->sharedMemPerMultiprocessor = warpbus::kMostOptIn;
    found->totalConstMem = 64 << 10;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->maxBlocksPerMultiProcessor = warpbus::kMostBlocks;
    found->unifiedAddressing = found->managedMemory = found->concurrentManagedAccess = found->canMapHostMemory = 1;
    found->memPitch = 2147483647;
    found->textureAlignment = 512;
    found->warpSize = 32;
    found->maxThreadsPerBlock = found->maxThreadsPerMultiProcessor = warpbus::kMostThreads;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->major = 9;
    found->cooperativeLaunch = 1;
    found->multiProcessorCount = 1;
    return cudaSuccess;
}

namespace warpbus {

cudaError_t count_resident(int *blocks, int block, size_t dynamic) {
    if (block < 1) return remember(cudaErrorInvalidValue);
    *blocks = resident_blocks(block, dynamic);
    return cudaSuccess;
}

cudaError_t best_block(int *grid, int *block, size_t dynamic, int limit) {
    if (dynamic > kMostOptIn || limit < 0) return remember(cudaErrorInvalidValue);
    *block = limit ? std::min(limit, static_cast<int>(kMostThreads)) : static_cast<int>(kMostThreads);
    *grid = resident_blocks(*block, dynamic);
    return cudaSuccess;
}

}  // namespace warpbus

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    *stream = new warpbus_stream;
    (*stream)->blocking = !(flags & cudaStreamNonBlocking);
    warpbus::streams.push_back(*stream);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    const bool active = stream && stream->graph;
    *status = !active ? cudaStreamCaptureStatusNone
              : stream->graph->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (stream ? stream->graph != nullptr : warpbus::capturing != nullptr) {
        warpbus::breaks_capture();
        return warpbus::remember(cudaErrorStreamCaptureUnsupported);
    }
    if (!stream) warpbus::run_streams(false);
    if (stream) warpbus::run_until(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return stream && warpbus::step(stream) ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    const cudaError_t status = cudaStreamSynchronize(stream);  // an event may still name it, so it is kept
    std::erase(warpbus::streams, stream);
    return status;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    warpbus::enqueue(stream, [=] { function(data); });
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned) {
    warpbus::enqueue(stream, [=] { function(stream, cudaSuccess, data); });
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { *event = new warpbus_event; return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }  // an operation may still set it, so it is kept
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    warpbus::record(event, stream);
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    warpbus::wait_for_event(stream, event);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event->graph && warpbus::breaks_capture()) return warpbus::remember(cudaErrorStreamCaptureUnsupported);
    if (event->stream) warpbus::run_until(event->stream, event, event->recorded);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (event->done == event->recorded) return cudaSuccess;
    warpbus::step(event->stream);
    return cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    if (!from->recorded || !to->recorded) return warpbus::remember(cudaErrorInvalidValue);
    if (from->done < from->recorded || to->done < to->recorded) return warpbus::remember(cudaErrorNotReady);
    *milliseconds = std::chrono::duration<float, std::milli>(to->at - from->at).count();
    return cudaSuccess;
}

// A graph's operations run in the order in which they were captured, which the dependencies of the graph allow.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (!stream || warpbus::capturing) return warpbus::remember(cudaErrorStreamCaptureUnsupported);
    stream->graph = warpbus::capturing = new warpbus_graph;
    stream->graph->origin = stream;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
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
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *count) {
    *count = graph->nodes.size();
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
    *exec = nullptr;
    if (!graph) return warpbus::remember(cudaErrorInvalidValue);
    *exec = new warpbus_graph_exec{graph->nodes};
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    if (!exec) return warpbus::remember(cudaErrorInvalidValue);
    for (const auto &node : exec->nodes) warpbus::enqueue(stream, node);
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { delete exec; return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }  // an event may still name it, so it is kept

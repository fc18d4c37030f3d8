// What the tests of the exercises share: arrays of a test case on host and device, the comparison, and the clock.
// The tests are compiled behind the reader's file, on the CPU or by nvcc.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace exercise {

#ifdef __CUDACC__
inline void write_finding(const std::string &kind, const std::string &fields) {
    if (FILE *file = fopen(getenv("WARPBUS_FINDINGS"), "a")) {
        fprintf(file, "{\"kind\": \"%s\"%s}\n", kind.c_str(), fields.c_str());
        fclose(file);
    }
}
inline void forget_traffic() {}
template <class T> void allocate(const char *, T **pointer, size_t size) { cudaMalloc(pointer, size); }
#else
inline void write_finding(const std::string &kind, const std::string &fields) {
    warpbus::write_finding(kind.c_str(), fields.c_str());
}
using warpbus::forget_traffic;
template <class T> void allocate(const char *name, T **pointer, size_t size) {
    warpbus::allocate_named(name, pointer, size, false);
}
#endif

inline std::string field(const char *name, const std::string &json) { return std::string(", \"") + name + "\": " + json; }
inline std::string text(const char *name, const std::string &value) { return field(name, "\"" + value + "\""); }
inline std::string number(double value) {
    char room[40];
    snprintf(room, sizeof room, "\"%.6g\"", value);
    return room;
}

// An array that a kernel reads, or reads and changes.
template <class T> struct Array {
    std::vector<T> host;
    T *device = nullptr;
    Array(const char *name, std::vector<T> values) : host(std::move(values)) {
        allocate(name, &device, host.size() * sizeof(T));
        cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
    }
    Array(const Array &) = delete;
    ~Array() { cudaFree(device); }
    operator T *() const { return device; }
    double operator[](size_t index) const { return static_cast<double>(host[index]); }
};

// An array that a kernel writes: at first each byte is 0xA5.
template <class T> struct Output {
    const char *name;
    size_t rows, columns;
    T *device = nullptr;
    explicit Output(const char *name, size_t rows, size_t columns = 0) : name(name), rows(rows), columns(columns) {
        allocate(name, &device, size() * sizeof(T));
#ifdef __CUDACC__
        cudaMemset(device, 0xA5, size() * sizeof(T));
#endif
    }
    Output(const Output &) = delete;
    ~Output() { cudaFree(device); }
    operator T *() const { return device; }
    size_t size() const { return rows * (columns ? columns : 1); }
};

// Pinned host memory that a program writes: at first each byte is 0xA5.
template <class T> struct Pinned {
    size_t count;
    T *host = nullptr;
    explicit Pinned(size_t count) : count(count) {
        cudaMallocHost(&host, count * sizeof(T));
        memset(host, 0xA5, count * sizeof(T));
    }
    Pinned(const Pinned &) = delete;
    ~Pinned() { cudaFreeHost(host); }
    operator T *() const { return host; }
    std::vector<T> now() const { return std::vector<T>(host, host + count); }
};

// Whether the elements are what `expected(index)` returns; if not, the first that is not is written down.
template <class T, class F>
bool same(const std::string &size, const char *name, const std::vector<T> &found, size_t columns, double tolerance, F expected) {
    const size_t count = found.size();
    size_t wrong = 0, first = 0;
    for (size_t i = 0; i < count; ++i)
        if (!(std::fabs(static_cast<double>(found[i]) - expected(i)) <= tolerance * (1 + std::fabs(expected(i))))) {
            if (!wrong) first = i;
            ++wrong;
        }
    if (!wrong) return true;
    T untouched;
    memset(&untouched, 0xA5, sizeof untouched);
    const std::string index = columns ? "[" + std::to_string(first / columns) + ", " + std::to_string(first % columns) + "]"
                                      : std::to_string(first);
    write_finding("wrong", text("size", size) + text("array", name) + field("index", index) +
                  field("found", number(static_cast<double>(found[first]))) + field("expected", number(expected(first))) +
                  field("wrong", std::to_string(wrong)) + field("count", std::to_string(count)) +
                  field("unwritten", memcmp(&untouched, &found[first], sizeof untouched) ? "false" : "true"));
    return false;
}
template <class T, class F>
bool same(const std::string &size, const char *name, T *device, size_t count, size_t columns, double tolerance, F expected) {
    std::vector<T> found(count);
    cudaMemcpy(found.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost);
    return same(size, name, found, columns, tolerance, expected);
}
template <class T, class F> bool same(const std::string &size, const Output<T> &found, double tolerance, F expected) {
    return same(size, found.name, found.device, found.size(), found.columns, tolerance, expected);
}

inline bool launched(const std::string &size) {
    cudaError_t status = cudaGetLastError();
    if (status == cudaSuccess) status = cudaDeviceSynchronize();
    if (status == cudaSuccess) return true;
    write_finding("status", text("size", size) + text("status", cudaGetErrorString(status)));
    return false;
}

// Test a case for each list of sizes. A case has a constructor that takes them, `size()` in words, `launch()`, `right()`,
// and `bytes()`: what a launch has to read and write at least.
template <class Case, class... Sizes> bool passes(Sizes... sizes) {
    forget_traffic();
    Case tested(sizes...);
    tested.launch();
    return launched(tested.size()) && tested.right();
}

// On a GPU, time a large case.
template <class Case, class... Sizes> void time(Sizes... sizes) {
#ifdef __CUDACC__
    Case timed(sizes...);
    cudaEvent_t begin, end;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    for (int i = 0; i < 5; ++i) timed.launch();
    cudaEventRecord(begin);
    for (int i = 0; i < 20; ++i) timed.launch();
    cudaEventRecord(end);
    if (!launched(timed.size())) return;
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, begin, end);
    cudaDeviceProp device;
    cudaGetDeviceProperties(&device, 0);
    write_finding("timing", text("size", timed.size()) + text("device", device.name) +
                  field("bytes", std::to_string(timed.bytes())) + field("seconds", std::to_string(milliseconds / 2e4)));
#else
    (void)sizeof(Case);
    ((void)sizes, ...);
#endif
}

inline std::string named(const char *name, long value) { return std::string(name) + " = " + std::to_string(value); }

// Small integers and their quarters: sums of them are exact in float32.
template <class T = float> std::vector<T> values(size_t count, unsigned seed = 1) {
    std::vector<T> found(count);
    for (size_t i = 0; i < count; ++i) {
        seed = seed * 1664525u + 1013904223u;
        found[i] = static_cast<T>(static_cast<float>(static_cast<int>(seed >> 24) % 33 - 16) / 4);
    }
    return found;
}

}  // namespace exercise

using exercise::Array;
using exercise::named;
using exercise::Output;
using exercise::same;
using exercise::values;

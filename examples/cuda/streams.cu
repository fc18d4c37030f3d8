// Streams: pieces of an array are copied in, changed and copied out. Events: one stream waits for another. A CUDA graph:
// many small kernels by one launch.
//
//     warpbus cuda run examples/cuda/streams.cu            # with `64 time`: pieces of 64 MB, and milliseconds, on a GPU
#include "check.h"

#include <cmath>
#include <cstring>

constexpr int kPieces = 8, kStreams = 3, kSmall = 20;

__global__ void work(float *x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = sqrtf(x[i]) + 1;
}

__global__ void scale(const float *x, float *y, float factor, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * factor;
}

int blocks(int n) { return (n + 255) / 256; }

// All pieces through `count` streams; `host` has to be pinned.
void process(const float *in, float *out, float *device, int n, cudaStream_t *streams, int count) {
    for (int piece = 0; piece < kPieces; ++piece) {
        cudaStream_t stream = streams[piece % count];
        float *own = device + size_t{1} * (piece % count) * n;  // a buffer per stream: a later piece waits for the earlier
        CHECK(cudaMemcpyAsync(own, in + size_t{1} * piece * n, n * sizeof(float), cudaMemcpyHostToDevice, stream));
        work<<<blocks(n), 256, 0, stream>>>(own, n);
        CHECK(cudaMemcpyAsync(out + size_t{1} * piece * n, own, n * sizeof(float), cudaMemcpyDeviceToHost, stream));
    }
    for (int i = 0; i < count; ++i) CHECK(cudaStreamSynchronize(streams[i]));  // out may be read from here on
}

// y = 3 (2 x): the second stream waits for an event of the first.
void in_turn(const float *x, float *between, float *y, int n, cudaStream_t first, cudaStream_t second) {
    cudaEvent_t doubled;
    CHECK(cudaEventCreateWithFlags(&doubled, cudaEventDisableTiming));
    scale<<<blocks(n), 256, 0, first>>>(x, between, 2, n);
    CHECK(cudaEventRecord(doubled, first));
    CHECK(cudaStreamWaitEvent(second, doubled, 0));  // the host goes on at once; only the stream waits
    scale<<<blocks(n), 256, 0, second>>>(between, y, 3, n);
    CHECK(cudaEventDestroy(doubled));
}

void small_kernels(float *x, int n, cudaStream_t stream) {
    for (int i = 0; i < kSmall; ++i) work<<<blocks(n), 256, 0, stream>>>(x, n);
}

cudaGraphExec_t capture(float *x, int n, cudaStream_t stream) {
    cudaGraph_t graph;
    cudaGraphExec_t found;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    small_kernels(x, n, stream);  // recorded, not run
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&found, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    return found;
}

template <class F> float milliseconds(cudaStream_t stream, F run) {
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    run();  // compiled, loaded, warm
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventRecord(begin, stream));
    for (int i = 0; i < 10; ++i) run();
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float found = 0;
    CHECK(cudaEventElapsedTime(&found, begin, end));
    return found / 10;
}

int count_wrong(const float *found, const float *start, int n, int times) {
    int wrong = 0;
    for (int i = 0; i < n; ++i) {
        double expected = start[i];
        for (int k = 0; k < times; ++k) expected = std::sqrt(expected) + 1;
        wrong += !(std::fabs(found[i] - expected) <= 1e-5 * expected);
    }
    return wrong;
}

int report(const char *name, int wrong) {
    printf(wrong ? "%s: %d elements are wrong\n" : "%s: all match the CPU\n", name, wrong);
    return wrong;
}

int main(int count, char **words) {
    const int n = count > 1 ? atoi(words[1]) << 18 : 1000, all = kPieces * n;
    const bool timed = count > 2 && !strcmp(words[2], "time");
    float *in, *out, *device;
    CHECK(cudaMallocHost(&in, size_t{1} * all * sizeof(float)));
    CHECK(cudaMallocHost(&out, size_t{1} * all * sizeof(float)));
    CHECK(cudaMalloc(&device, size_t{1} * kStreams * n * sizeof(float)));
    for (int i = 0; i < all; ++i) in[i] = i % 1000;
    cudaStream_t streams[kStreams];
    for (cudaStream_t &stream : streams) CHECK(cudaStreamCreate(&stream));

    int wrong = 0;
    for (int each : {1, kStreams}) {
        memset(out, 0, size_t{1} * all * sizeof(float));
        process(in, out, device, n, streams, each);
        wrong += report(each == 1 ? "one stream" : "three streams", count_wrong(out, in, all, 1));
        if (timed) printf("  %.2f ms\n", milliseconds(streams[0], [&] { process(in, out, device, n, streams, each); }));
    }

    CHECK(cudaMemcpy(device, in, n * sizeof(float), cudaMemcpyHostToDevice));
    in_turn(device, device + n, device + 2 * n, n, streams[0], streams[1]);
    CHECK(cudaStreamSynchronize(streams[1]));
    CHECK(cudaMemcpy(out, device + 2 * n, n * sizeof(float), cudaMemcpyDeviceToHost));
    int unequal = 0;
    for (int i = 0; i < n; ++i) unequal += out[i] != 6 * in[i];
    wrong += report("an event between two streams", unequal);

    const int small = 256;
    cudaGraphExec_t graph = capture(device, small, streams[0]);
    CHECK(cudaMemcpy(device, in, small * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaGraphLaunch(graph, streams[0]));
    CHECK(cudaStreamSynchronize(streams[0]));
    CHECK(cudaMemcpy(out, device, small * sizeof(float), cudaMemcpyDeviceToHost));
    wrong += report("a graph of 20 kernels", count_wrong(out, in, small, kSmall));
    if (timed) {
        printf("  20 launches %.4f ms", milliseconds(streams[0], [&] { small_kernels(device, small, streams[0]); }));
        printf(", one graph %.4f ms\n", milliseconds(streams[0], [&] { cudaGraphLaunch(graph, streams[0]); }));
    }
    CHECK(cudaGraphExecDestroy(graph));
    for (cudaStream_t stream : streams) CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device));
    CHECK(cudaFreeHost(in));
    CHECK(cudaFreeHost(out));
    return wrong != 0;
}

// The sum of a tensor of each of several GPUs, and a residual, on all of them: a one-shot all-reduce.
//
//   out = round(sum over ranks r of x_r + residual)       summed in float32 in the order of ranks: the same bits on all
//
// Each GPU writes its x into a place of its own in every other GPU's buffer, raises a flag there, waits for the others'
// flags in its own buffer and adds up what lies there. Reads stay on the GPU; what crosses the link is written once.
//
// Shapes and layout: x, residual, out [16 chunks of bytes], aligned to 16; ELEMENT = float, __half or __nv_bfloat16;
// residual may be null. buffers[r]: the buffer of rank r as this GPU addresses it, of
//
//   flags  unsigned int [world][most_blocks]               by the rank that raises it and its block
//   data   [2][world][most_blocks * kThreads][16 bytes]    by parity of the round, and the rank that wrote it
//
// all zero before the first call. epochs[block], in memory of this GPU alone: how many rounds the block has done.
// Launch: ceil(chunks / kThreads) blocks, at most most_blocks; on every rank the same, in the same order of launches.
//
// A block depends on its namesakes alone and keeps to its own part of the buffers. Why two halves are enough: the others
// write a round's half again two rounds later, and go there only after this block has raised its flag for the round in
// between, which it does in a later launch than the one that read the half.
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "peers/flags.cuh"

constexpr int kThreads = 256;
constexpr int kMostRanks = 8;

using Vector = Vector16<ELEMENT>;

__device__ __forceinline__ void add(float (&sum)[Vector::kSize], const Vector& value) {
#pragma unroll
    for (int i = 0; i < Vector::kSize; ++i) sum[i] += to_float(value.element[i]);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    peer_sum(const ELEMENT* x, const ELEMENT* residual, ELEMENT* out, const unsigned long long* buffers,
             unsigned int* epochs, int chunks, int rank, int world, int most_blocks) {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const int thread = threadIdx.x;
    const long long chunk = static_cast<long long>(blockIdx.x) * kThreads + thread;
    const bool holds = chunk < chunks;
    const unsigned int epoch = epochs[blockIdx.x] + 1;
    const long long flags = static_cast<long long>(world) * most_blocks * sizeof(unsigned int);
    const long long place = static_cast<long long>(most_blocks) * kThreads;  // chunks that a rank may write
    // Where rank 0 writes this thread's chunk in this round, from the beginning of a buffer on.
    const long long mine = flags + ((epoch & 1) * world * place + chunk) * 16;

    Vector own = {};
    if (holds) {
        own = reinterpret_cast<const Vector*>(x)[chunk];
        for (int step = 1; step < world; ++step) {  // not all to the same GPU at a time
            const int peer = rank + step < world ? rank + step : rank + step - world;
            *reinterpret_cast<Vector*>(buffers[peer] + mine + rank * place * 16) = own;
        }
    }
    __syncthreads();
    if (thread < world && thread != rank) {
        auto* theirs = reinterpret_cast<unsigned int*>(buffers[thread]);
        auto* ours = reinterpret_cast<const unsigned int*>(buffers[rank]);
        peers::raise(theirs + rank * most_blocks + blockIdx.x, epoch);
        peers::wait(ours + thread * most_blocks + blockIdx.x, epoch);
    }
    __syncthreads();

    if (holds) {
        const unsigned long long here = buffers[rank] + mine;
        Vector values[kMostRanks];
#pragma unroll
        for (int from = 0; from < kMostRanks; ++from) {
            values[from] = own;
            if (from < world && from != rank) {
                peers::load_16(&values[from], here + from * place * 16);
            }
        }
        float sum[Vector::kSize] = {};
#pragma unroll
        for (int from = 0; from < kMostRanks; ++from) {
            if (from < world) add(sum, values[from]);
        }
        if (residual != nullptr) add(sum, reinterpret_cast<const Vector*>(residual)[chunk]);
        Vector total;
#pragma unroll
        for (int i = 0; i < Vector::kSize; ++i) total.element[i] = from_float<ELEMENT>(sum[i]);
        reinterpret_cast<Vector*>(out)[chunk] = total;
    }
    if (thread == 0) epochs[blockIdx.x] = epoch;
}

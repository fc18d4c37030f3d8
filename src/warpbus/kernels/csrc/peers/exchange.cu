// A tensor of each of several GPUs, on all of them: added up, with a residual (a one-shot all-reduce), or as they are.
//
//   peer_sum:     out = round(sum over ranks r of x_r + residual)    in float32 in the order of ranks: the same on all
//   peer_gather:  out[r] = x_r
//
// Each GPU writes its x into a place of its own in every other GPU's buffer, raises a flag there, waits for the others'
// flags in its own buffer and takes what lies there. Reads stay on the GPU; what crosses the link is written once.
//
// Shapes and layout: x, residual, out (of peer_sum) [chunks of 16 bytes], aligned to 16; ELEMENT = float, __half or
// __nv_bfloat16; residual may be null. buffers[r]: the buffer of rank r as this GPU addresses it, of
//
//   flags  unsigned int [world][most_blocks]               by the rank that raises it and its block
//   data   [2][world][most_blocks * kThreads][16 bytes]    by parity of the round, and the rank that wrote it
//
// all zero before the first call. epochs[block], in memory of this GPU alone: how many rounds the block has done.
// A block that waits `limit` nanoseconds for another rank's flag leaves that rank + 1 in `missing`, an int in memory of the
// host that may be null, and traps: its GPU computes nothing further, so that its result is not mistaken for the sum.
// Launch: ceil(chunks / kThreads) blocks, at most most_blocks; on every rank the same, in the same order of launches.
//
// A block depends on its namesakes alone and keeps to its own part of the buffers. Two halves are enough: the others write
// to a half again two rounds later, after this block has raised its flag for the round in between, which it does in a
// later launch than the one that read the half.
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

// One thread's chunk of this round.
struct Round {
    Vector own;
    unsigned long long here;  // where rank 0's chunk lies in this GPU's buffer; that of rank r is r * stride on
    long long stride;         // bytes
    long long chunk;
    bool holds;
};

// Hand this thread's chunk to all others and wait for theirs. All threads of the block call it.
__device__ __forceinline__ Round exchange(const ELEMENT* x, const unsigned long long* buffers, unsigned int* epochs,
                                          int* missing, int chunks, int rank, int world, int most_blocks,
                                          unsigned long long limit) {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_wait();
#endif
    const int thread = threadIdx.x;
    Round round = {};
    round.chunk = static_cast<long long>(blockIdx.x) * kThreads + thread;
    round.holds = round.chunk < chunks;
    round.stride = static_cast<long long>(most_blocks) * kThreads * 16;  // what a rank may write
    const unsigned int epoch = epochs[blockIdx.x] + 1;
    const long long flags = static_cast<long long>(world) * most_blocks * sizeof(unsigned int);
    const long long place = flags + (epoch & 1) * world * round.stride + round.chunk * 16;
    round.here = buffers[rank] + place;

    if (round.holds) {
        round.own = reinterpret_cast<const Vector*>(x)[round.chunk];
        for (int step = 1; step < world; ++step) {  // not all to the same GPU at a time
            const int peer = rank + step < world ? rank + step : rank + step - world;
            *reinterpret_cast<Vector*>(buffers[peer] + place + rank * round.stride) = round.own;
        }
    }
    __syncthreads();
    if (thread < world && thread != rank) {
        auto* theirs = reinterpret_cast<unsigned int*>(buffers[thread]);
        auto* ours = reinterpret_cast<const unsigned int*>(buffers[rank]);
        peers::raise(theirs + rank * most_blocks + blockIdx.x, epoch);
        if (!peers::wait(ours + thread * most_blocks + blockIdx.x, epoch, limit)) peers::give_up(missing, thread + 1);
    }
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    // Not before: the next kernel's blocks would take multiprocessors while this one waits, from other streams' work too,
    // which the other ranks may wait for.
    ptx::griddepcontrol_launch_dependents();
#endif
    if (thread == 0) epochs[blockIdx.x] = epoch;
    return round;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    peer_sum(const ELEMENT* x, const ELEMENT* residual, ELEMENT* out, const unsigned long long* buffers,
             unsigned int* epochs, int* missing, int chunks, int rank, int world, int most_blocks, long long limit) {
    const Round round = exchange(x, buffers, epochs, missing, chunks, rank, world, most_blocks, limit);
    if (!round.holds) return;
    Vector values[kMostRanks];
#pragma unroll
    for (int from = 0; from < kMostRanks; ++from) {
        values[from] = round.own;
        if (from < world && from != rank) peers::load_16(&values[from], round.here + from * round.stride);
    }
    float sum[Vector::kSize] = {};
#pragma unroll
    for (int from = 0; from < kMostRanks; ++from) {
        if (from < world) add(sum, values[from]);
    }
    if (residual != nullptr) add(sum, reinterpret_cast<const Vector*>(residual)[round.chunk]);
    Vector total;
#pragma unroll
    for (int i = 0; i < Vector::kSize; ++i) total.element[i] = from_float<ELEMENT>(sum[i]);
    reinterpret_cast<Vector*>(out)[round.chunk] = total;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    peer_gather(const ELEMENT* x, ELEMENT* out, const unsigned long long* buffers, unsigned int* epochs, int* missing,
                int chunks, int rank, int world, int most_blocks, long long limit) {
    const Round round = exchange(x, buffers, epochs, missing, chunks, rank, world, most_blocks, limit);
    if (!round.holds) return;
    for (int from = 0; from < world; ++from) {
        Vector value = round.own;
        if (from != rank) peers::load_16(&value, round.here + from * round.stride);
        reinterpret_cast<Vector*>(out)[static_cast<long long>(from) * chunks + round.chunk] = value;
    }
}

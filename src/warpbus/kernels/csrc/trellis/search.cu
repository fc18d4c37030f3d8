// The paths through a bit-shift trellis that are nearest to tiles of weights (Viterbi; warpbus/qtensor/trellis.py).
//
//   trellis_search   symbols[tile, t] for the path of least squared error among those whose ends meet in the bits that are
//                    best for the steps around them
//
// Shapes: x float32 [tiles, 128, 2], finite; symbols uint8 [tiles, 128]. Macro BITS: of a weight, 2 or 3; a symbol has
// twice as many. Launch: a block of 256 threads per tile, kSteps * kStepBytes of dynamic shared memory.
//
// State t of a path is the 14 bits of a cyclic stream that begin at symbol t, so state t = (state t + 1) << kWidth | symbol t,
// modulo 2^14. Steps are taken from the last one to the first: then the predecessors of a state are those with its upper bits
// at their lower end, and least[g] is the least cost of all paths whose last state is g modulo kGroups.
//
// A thread has kOwn neighbouring groups, and keeps the numbers of their 64 states in registers. The cost of a state is
// |n|^2 - 2 x n, which is the squared error without |x|^2, so that a state takes two fused multiply-adds, an addition and a
// comparison. Neighbouring groups have the same predecessors, whose costs lie side by side in shared memory.
#include <cuda_fp16.h>

constexpr int kWindow = 14;
constexpr int kSteps = 128;
constexpr int kSeam = 24;  // steps on either side of the stream's ends that decide about the bits that pass over them
constexpr int kWidth = 2 * BITS;
constexpr int kChoices = 1 << kWidth;
constexpr int kGroups = (1 << kWindow) / kChoices;
constexpr int kThreads = 256;
constexpr int kOwn = kGroups / kThreads;   // groups of a thread
constexpr int kSources = kGroups / kChoices;  // groups of states that differ in their upper bits alone
constexpr float kUnreachable = 1e30f;
constexpr unsigned kMultiplier = 0xAA44731Bu;
constexpr float kUnit = 1.0f / 128;
static_assert(kOwn * kThreads == kGroups && kOwn * kChoices == 64, "the states of a thread fill its registers");

// The choices of a step, by group: 4 bits each where there are 16, else bytes.
constexpr int kChoiceBits = kWidth <= 4 ? 4 : 8;
constexpr int kStepBytes = kGroups * kChoiceBits / 8;

__device__ __forceinline__ void store_choices(unsigned char* step, const int (&choice)[kOwn]) {
    if constexpr (kChoiceBits == 8) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) step[kOwn * threadIdx.x + j] = static_cast<unsigned char>(choice[j]);
    } else {
#pragma unroll
        for (int j = 0; j < kOwn; j += 2) {
            step[(kOwn * threadIdx.x + j) / 2] = static_cast<unsigned char>(choice[j] | choice[j + 1] << 4);
        }
    }
}

__device__ __forceinline__ int choice_of(const unsigned char* step, int group) {
    return kChoiceBits == 8 ? step[group] : step[group / 2] >> group % 2 * 4 & 15;
}

// The two numbers of a state (qtensor/trellis.py): sums of two signed bytes each.
__device__ __forceinline__ float2 numbers_of(unsigned state) {
    const int product = static_cast<int>(state * kMultiplier);
    return make_float2(kUnit * __dp4a(product, 0x00000101, 0), kUnit * __dp4a(product, 0x01010000, 0));
}

// Where the cost of a group lies: those of a source's successors side by side.
__device__ __forceinline__ int place(int group) { return group % kSources * kChoices + group / kSources; }

struct Tables {
    float least[2][kGroups];
    float pairs[kSteps * 2];
    float costs[kThreads / 32];
    int groups[kThreads / 32];
    int states[kSteps];
};

// The states of `count` steps, of which step `from` of the tile is the first and those before it follow. With passing >= 0
// these are the upper bits before the first state, and the lower bits of the last one.
__device__ void search(Tables& tables, unsigned char* chosen, const float (&first)[64], const float (&second)[64],
                       const float (&square)[64], int from, int count, int passing) {
    const int own = kOwn * threadIdx.x;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
        tables.least[0][place(own + j)] = passing < 0 || own + j == passing ? 0.0f : kUnreachable;
    }
    __syncthreads();
    float best[kOwn];
    for (int step = 0; step < count; ++step) {
        const int pair = (from - step + kSteps) % kSteps;
        const float x0 = -2.0f * tables.pairs[2 * pair], x1 = -2.0f * tables.pairs[2 * pair + 1];
        const float4* const least = reinterpret_cast<const float4*>(tables.least[step & 1] + (own >> kWidth) * kChoices);
        int choice[kOwn];
#pragma unroll
        for (int c = 0; c < kChoices; c += 4) {
            const float4 before = least[c / 4];
            const float costs[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < kOwn; ++j) {
                    const int s = (c + i) * kOwn + j;
                    const float cost = fmaf(x1, second[s], fmaf(x0, first[s], square[s])) + costs[i];
                    if (c + i == 0 || cost < best[j]) {
                        best[j] = cost;
                        choice[j] = c + i;
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
            tables.least[1 - (step & 1)][place(own + j)] = best[j];
        }
        store_choices(chosen + step * kStepBytes, choice);
        __syncthreads();
    }
    if (passing < 0) {  // any end will do: the group of the least cost, the first of equal ones
        float cost = best[0];
        int group = own;
#pragma unroll
        for (int j = 1; j < kOwn; ++j) {
            if (best[j] < cost) cost = best[j], group = own + j;
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            const float other = __shfl_down_sync(0xffffffff, cost, offset);
            const int its = __shfl_down_sync(0xffffffff, group, offset);
            if (other < cost || (other == cost && its < group)) cost = other, group = its;
        }
        if (threadIdx.x % 32 == 0) tables.costs[threadIdx.x / 32] = cost, tables.groups[threadIdx.x / 32] = group;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        int group = passing;
        if (passing < 0) {
            int warp = 0;
            for (int w = 1; w < kThreads / 32; ++w) warp = tables.costs[w] < tables.costs[warp] ? w : warp;
            group = tables.groups[warp];
        }
        for (int step = count - 1; step >= 0; --step) {
            const int state = choice_of(chosen + step * kStepBytes, group) * kGroups + group;
            tables.states[step] = state;
            group = state >> kWidth;
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) trellis_search(const float* x, unsigned char* symbols) {
    extern __shared__ unsigned char chosen[];  // of each step, by group: the upper bits of the best state
    __shared__ __align__(16) Tables tables;
    float first[64], second[64], square[64];
#pragma unroll
    for (int s = 0; s < 64; ++s) {
        const float2 n = numbers_of(s / kOwn * kGroups + kOwn * threadIdx.x + s % kOwn);
        first[s] = n.x;
        second[s] = n.y;
        square[s] = n.x * n.x + n.y * n.y;
    }
    tables.pairs[threadIdx.x] = x[blockIdx.x * 2ll * kSteps + threadIdx.x];
    __syncthreads();
    search(tables, chosen, first, second, square, kSeam - 1, 2 * kSeam, -1);
    const int passing = tables.states[kSeam] >> kWidth;
    __syncthreads();
    search(tables, chosen, first, second, square, kSteps - 1, kSteps, passing);
    if (threadIdx.x < kSteps) {
        const int state = tables.states[kSteps - 1 - threadIdx.x];
        symbols[blockIdx.x * static_cast<long long>(kSteps) + threadIdx.x] = static_cast<unsigned char>(state & (kChoices - 1));
    }
}

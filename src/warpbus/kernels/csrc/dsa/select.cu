// The slots of the tokens with the best scores of each row, in the order of the tokens.
//
// Selects, of the scores 0 to position, the `top_k` best ones, of equal ones the first, and writes where these tokens are in
// the cache: entry i of slots[row] is the slot of the i-th selected token. A row with no more than `top_k` scores has all;
// its other entries are 0. The two zeros are equal, NaN is above all.
//
// Shapes and layout
//   scores       float [rows, width]; `vectorised`: width is a multiple of 4 and scores begin at a multiple of 16 bytes
//   positions    int [rows], each less than width
//   block_table  int [rows, n], the last stride 1: token p of a row is in block block_table[row, p >> shift] of the cache
//   slots        int [rows, top_k]: block << shift | token in the block
//
// Launch: `blocks` blocks of 1024 threads share a row: a cluster of at most 8 since sm_90, one block before.
//
// Algorithm. Scores become integers of the same order (keys). The cut is found eight bits at a time, from a histogram of the
// keys that agree with the bits found so far; counts are integers, so the result does not depend on the order of the
// additions. Then the keys above the cut, and the first of those at it, are numbered by prefix sums and written.
#include "step/radix.cuh"

using step::inclusive_sum;
using step::kBins;
using step::kBlock;
using step::kCopies;
using step::kWarps;
using step::of_block;
using step::row_sync;

constexpr unsigned int kAll = 0xffffffff;
constexpr int kEqual = 16;  // counts of keys above the cut are in the lower 16 bits, those of keys at it in the upper ones

struct Shared {
    unsigned int copies[kBins * kCopies];
    unsigned int of_block[2][kBins];  // the block's histogram, best bin first, for the others, who may still read the last one
    unsigned int of_warp[2][kWarps];
    unsigned int bin, above, count;   // the bin of the cut, keys in better bins, keys in the bin
    unsigned int better, equal;       // of the block, for the others
};

// The cut: keys above `key` in the bits from `shift` on are selected, and the first `equals` of those that agree there.
struct Cut {
    unsigned int key;
    int shift;
    unsigned int equals;

    __device__ __forceinline__ bool better(unsigned int other) const { return other >> shift > key >> shift; }
    __device__ __forceinline__ bool equal(unsigned int other) const { return other >> shift == key >> shift; }
};

// The cut of the `top_k` best scores, the same for all threads that share the row.
__device__ __forceinline__ Cut find_cut(const step::Scores<float>& scores, int blocks, int top_k, Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Cut cut = {0, 32, static_cast<unsigned int>(top_k)};
    for (int turn = 0; cut.shift > 0; turn ^= 1) {
        const int shift = cut.shift - 8;
        for (int i = threadIdx.x; i < kBins * kCopies; i += kBlock) shared.copies[i] = 0;
        __syncthreads();
        scores.visit<4>([&](float score, int) {
            const unsigned int key = step::key_of(score);
            if (step::agrees(key, cut.key, shift)) atomicAdd(&shared.copies[step::copy_of_bin(key, shift)], 1u);
        });
        __syncthreads();
        const int bin = kBins - 1 - static_cast<int>(threadIdx.x);
        if (bin >= 0) {
            unsigned int sum = 0;
#pragma unroll
            for (int i = 0; i < kCopies; ++i) sum += shared.copies[step::copy_at(bin, i)];
            shared.of_block[turn][threadIdx.x] = sum;
        }
        row_sync();
        unsigned int count = 0, upto = 0;
        if (bin >= 0) {  // whole warps
            for (int rank = 0; rank < blocks; ++rank) count += *of_block(&shared.of_block[turn][threadIdx.x], rank);
            upto = inclusive_sum(count);
            if (lane == 31) shared.of_warp[turn][warp] = upto;
        }
        __syncthreads();
        if (bin >= 0) {
            for (int before = 0; before < warp; ++before) upto += shared.of_warp[turn][before];
            if (upto >= cut.equals && upto - count < cut.equals) {  // one thread: there are enough keys
                shared.bin = bin;
                shared.above = upto - count;
                shared.count = count;
            }
        }
        __syncthreads();
        cut.key |= shared.bin << shift;
        cut.shift = shift;
        cut.equals -= shared.above;
        if (shared.count == cut.equals) break;  // all of the bin are selected
    }
    return cut;
}

// Keys above the cut and at it in the blocks ahead of this one, as `better` and `equal`.
__device__ __forceinline__ uint2 count_ahead(const step::Scores<float>& scores, const Cut& cut, int rank, Shared& shared) {
    if (threadIdx.x == 0) shared.better = shared.equal = 0;
    __syncthreads();
    unsigned int better = 0, equal = 0;
    scores.visit<4>([&](float score, int) {
        const unsigned int key = step::key_of(score);
        better += cut.better(key);
        equal += cut.equal(key);
    });
    better = __reduce_add_sync(kAll, better);
    equal = __reduce_add_sync(kAll, equal);
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&shared.better, better);
        atomicAdd(&shared.equal, equal);
    }
    row_sync();
    uint2 ahead = {0, 0};
    for (int other = 0; other < rank; ++other) {
        ahead.x += *of_block(&shared.better, other);
        ahead.y += *of_block(&shared.equal, other);
    }
    row_sync();  // no block ends before the others have read its counts
    return ahead;
}

extern "C" __global__ void __launch_bounds__(kBlock)
    index_select(const float* __restrict__ scores, const int* __restrict__ positions, const int* __restrict__ block_table,
                 int* __restrict__ slots, long long block_table_stride, int width, int top_k, int shift, int blocks,
                 int vectorised) {
    __shared__ Shared shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long row = blockIdx.x / blocks;
    const int rank = blockIdx.x % blocks;
    const int* row_table = block_table + row * block_table_stride;
    int* out = slots + row * top_k;
    const int mask = (1 << shift) - 1;
    const auto slot_of = [&](int token) { return row_table[token >> shift] << shift | (token & mask); };
    const int count = min(positions[row] + 1, width);
    if (count <= top_k) {
        for (int i = rank * kBlock + threadIdx.x; i < top_k; i += blocks * kBlock) out[i] = i < count ? slot_of(i) : 0;
        return;
    }
    const step::Scores<float> own(scores + row * width, count, rank, blocks, vectorised != 0);
    const Cut cut = find_cut(own, blocks, top_k, shared);
    uint2 ahead = {0, 0};
    if (blocks > 1) ahead = count_ahead(own, cut, rank, shared);
    constexpr int kChunk = step::Scores<float>::kChunk;
    int turn = 0;
    for (int base = own.begin; base < own.end; base += kBlock, turn ^= 1) {
        const int chunk = base + static_cast<int>(threadIdx.x);
        unsigned int keys[kChunk] = {};  // 0 is below all keys, and the cut is one of them
        if (chunk < own.end) {
            const Vector16<float> value = own.load(chunk);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                if (kChunk * chunk + i < count) keys[i] = step::key_of(value.element[i]);
            }
        }
        unsigned int counted = 0;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            counted += (cut.better(keys[i]) ? 1u : 0u) + (keys[i] != 0 && cut.equal(keys[i]) ? 1u << kEqual : 0u);
        }
        const unsigned int upto = inclusive_sum(counted);
        if (lane == 31) shared.of_warp[turn][warp] = upto;
        __syncthreads();
        const unsigned int warps = inclusive_sum(shared.of_warp[turn][lane]);
        const unsigned int before_warp = warp == 0 ? 0 : __shfl_sync(kAll, warps, (warp + 31) % 32);
        const unsigned int total = __shfl_sync(kAll, warps, 31);
        const unsigned int before = before_warp + upto - counted;
        unsigned int better = ahead.x + (before & 0xFFFF), equal = ahead.y + (before >> kEqual);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            const bool is_better = cut.better(keys[i]), is_equal = keys[i] != 0 && cut.equal(keys[i]);
            if (is_better || (is_equal && equal < cut.equals)) {
                out[better + min(equal, cut.equals)] = slot_of(kChunk * chunk + i);
            }
            better += is_better;
            equal += is_equal;
        }
        ahead.x += total & 0xFFFF;
        ahead.y += total >> kEqual;
    }
}

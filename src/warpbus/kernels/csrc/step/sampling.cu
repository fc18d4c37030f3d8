// Tokens from scores: the best of each row, and a random one by the inverse of the cumulated probabilities.
//
// Shapes and layout
//   logits  [rows, width], contiguous; ELEMENT = float, __half or __nv_bfloat16
//   tokens  long long [rows]; best float [rows]: the best score, NaN where the row holds NaN
//   temperature, top_p, min_p, uniform   float [rows]; top_k int [rows], all tokens where it is not from 1 to width - 1
// Launch: `blocks` blocks of 1024 threads share a row: a cluster of at most 8 since sm_90, one block before. width is
// at most 2^19. `vectorised`: rows are multiples of 16 bytes and logits is aligned to 16.
//
// argmax: the first of the best scores.
// sample: tokens stand in the order of their scores, likeliest first and the first first among equals. The `top_k`
// first stay, of these the ones whose probabilities (softmax of score / temperature) are at least `min_p` times the
// best token's, of these the fewest first that together reach `top_p` of what is left, and the token is the first whose
// cumulated probability exceeds `uniform` times that of all that stay. If the best score is NaN or infinite the token is
// its index. An infinite temperature, or NaN, makes all scores but -infinity equally likely; a min_p above 1 counts as 1.
//
// Nothing is sorted. Scores become integers of the same order (keys), and the key at which a sum over the better ones
// passes a target is found eight bits at a time: a histogram of the keys that agree with the bits found so far, in
// which each token weighs its probability (or one, for top_k). Weights are integers, multiples of 2^-31 of the best
// token's, so that their sums are exact whatever the order of the additions: atomics in shared memory give the same
// bits at every run and for any number of blocks. A weight below min_p's counts as none. Equal scores have equal weights, so that the place among them is a
// quotient. What a weight leaves out by rounding is at most 2^-32 a token; the exponential's own error, a few units of
// float32, is larger. A row is read from memory once and then from L1.
#include "step/radix.cuh"

using ptx::uint64;
using step::agrees;
using step::inclusive_sum;
using step::kBins;
using step::kBlock;
using step::kCopies;
using step::kMostBlocks;
using step::kWarps;
using step::of_block;
using step::row_sync;

constexpr int kTopShift = step::Format<ELEMENT>::kBits - 8;

// A bin, and the sum over those that are better.
struct Place {
    unsigned int bin;
    uint64 above;
};

struct Shared {
    step::BestShared best;
    unsigned int low[kBins * kCopies], high[kBins * kCopies];  // sums of the weights' lower 16 bits and of the others
    uint64 of_block[2][kBins];  // this block's histogram for the others, who may still read the last one
    uint64 top[kBins];  // the histogram of the highest eight bits, best bin first: two searches begin with it
    uint64 of_warp[kBins / 32];
    Place place;
    unsigned int equals_of_warp[kWarps];
    unsigned int equals;
};

// The tokens that can be drawn: those with keys above `cut`, and the first `equals` of those at it.
struct Cut {
    unsigned int key;
    unsigned int equals;
};

struct Row {
    step::Scores<ELEMENT> scores;
    int rank, blocks;
    float best;
    float factor;        // log2(e) / temperature, above 0: -infinity then keeps weight 0 at an infinite temperature
    unsigned int least;  // of the weights that count

    __device__ __forceinline__ unsigned int weight(float score) const {
        // fminf gives the 0 also where a tiny temperature makes 0 * infinity of the best score.
        const unsigned int found = __float2uint_rn(exp2f(fminf((score - best) * factor, 0.0f)) * 0x1p31f);
        return found >= least ? found : 0;
    }
};

// The histogram of the eight bits at `shift` of the keys that agree with `prefix`, over the whole row. A token weighs
// its weight or, `counting`, one. Threads 0 to 255 get the sum of bin 255 - thread, so that better tokens come first.
__device__ __forceinline__ uint64 histogram(const Row& row, const Cut& cut, bool counting, unsigned int prefix,
                                            int shift, int turn, Shared& shared) {
    for (int i = threadIdx.x; i < kBins * kCopies; i += kBlock) shared.low[i] = shared.high[i] = 0;
    __syncthreads();
    row.scores.visit<1>([&](ELEMENT score, int) {
        const unsigned int key = step::key_of(score);
        if (key > cut.key && agrees(key, prefix, shift)) {
            const unsigned int amount = counting ? 1 : row.weight(to_float(score));
            const int at = step::copy_of_bin(key, shift);
            if (amount & 0xFFFF) atomicAdd(&shared.low[at], amount & 0xFFFF);
            if (amount >> 16) atomicAdd(&shared.high[at], amount >> 16);
        }
    });
    __syncthreads();
    const int bin = kBins - 1 - static_cast<int>(threadIdx.x);
    if (bin >= 0) {
        uint64 sum = 0;
#pragma unroll 2
        for (int i = 0; i < kCopies; ++i) {
            const int at = step::copy_at(bin, i);
            sum += shared.low[at] + (static_cast<uint64>(shared.high[at]) << 16);
        }
        if (row.rank == 0 && cut.equals != 0 && agrees(cut.key, prefix, shift) &&
            (cut.key >> shift & (kBins - 1)) == bin) {
            sum += static_cast<uint64>(cut.equals) * row.weight(step::score_of<ELEMENT>(cut.key));
        }
        shared.of_block[turn][bin] = sum;
    }
    row_sync();
    uint64 sum = 0;
    if (bin >= 0) {
#pragma unroll kMostBlocks
        for (int rank = 0; rank < row.blocks; ++rank) sum += *of_block(&shared.of_block[turn][bin], rank);
    }
    return sum;
}

// The sums of the bins from the best one to each thread's own, inclusive, for threads 0 to 255.
__device__ __forceinline__ uint64 cumulated(uint64 value, Shared& shared) {
    const int warp = threadIdx.x / 32;
    uint64 inclusive = value;
    if (threadIdx.x < kBins) {
        inclusive = inclusive_sum(value);
        if (threadIdx.x % 32 == 31) shared.of_warp[warp] = inclusive;
    }
    __syncthreads();
    if (threadIdx.x < kBins) {
#pragma unroll
        for (int i = 0; i < kBins / 32; ++i) inclusive += i < warp ? shared.of_warp[i] : 0;
    }
    return inclusive;
}

// The sum of all bins, after `cumulated`.
__device__ __forceinline__ uint64 total(const Shared& shared) {
    uint64 sum = 0;
#pragma unroll 2
    for (int i = 0; i < kBins / 32; ++i) sum += shared.of_warp[i];
    return sum;
}

// The bin in which the sum passes `target`.
__device__ __forceinline__ Place locate(uint64 value, uint64 inclusive, uint64 target, Shared& shared) {
    const uint64 above = inclusive - value;
    if (threadIdx.x < kBins && above <= target && target < inclusive) shared.place = {kBins - 1 - threadIdx.x, above};
    __syncthreads();
    return shared.place;
}

// Targets of the search: the last token that stays, twice, and then the drawn token.
enum Search { kTopK = 0, kTopP = 1, kDraw = 2 };

// Of the tokens with a key, writes the index of the one that `before` others precede. In each block every warp has a
// part of the row, in the order of the row.
__device__ __forceinline__ void pick(const Row& row, unsigned int key, unsigned int before, long long* token,
                                     Shared& shared) {
    constexpr int kChunk = step::Scores<ELEMENT>::kChunk;
    const step::Scores<ELEMENT>& scores = row.scores;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int share = (scores.end - scores.begin + kWarps - 1) / kWarps;
    const int begin = min(scores.begin + warp * share, scores.end);
    const int end = min(begin + share, scores.end);

    // Which of the eight scores of a chunk have the key: a bit each.
    const auto matches = [&](int chunk) {
        unsigned int found = 0;
        if (chunk < end) {
            const Vector16<ELEMENT> value = scores.load(chunk);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                const bool equal = kChunk * chunk + i < scores.width && step::key_of(value.element[i]) == key;
                found |= static_cast<unsigned int>(equal) << i;
            }
        }
        return found;
    };

    unsigned int count = 0;
    for (int first = begin; first < end; first += 32) count += __popc(matches(first + lane));
    count = __reduce_add_sync(0xffffffff, count);
    if (lane == 0) shared.equals_of_warp[warp] = count;
    __syncthreads();
    const unsigned int of_lane = shared.equals_of_warp[lane];
    const unsigned int of_all = __reduce_add_sync(0xffffffff, of_lane);
    if (threadIdx.x == 0) shared.equals = of_all;
    row_sync();
    const unsigned int of_rank = lane < row.rank ? *of_block(&shared.equals, lane) : 0;
    unsigned int passed = __reduce_add_sync(0xffffffff, of_rank + (lane < warp ? of_lane : 0));
    if (before < passed || before >= passed + count) return;
    for (int first = begin; first < end; first += 32) {
        const unsigned int found = matches(first + lane);
        const unsigned int inclusive = inclusive_sum<unsigned int>(__popc(found));
        unsigned int at = passed + inclusive - __popc(found);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            if (found >> i & 1 && at++ == before) *token = kChunk * (first + lane) + i;
        }
        passed += __shfl_sync(0xffffffff, inclusive, 31);
    }
}

// The sum that the last token that stays passes, and none before it: the first sum that reaches top_p of all does.
__device__ __forceinline__ uint64 last_of_nucleus(float top_p, uint64 all) {
    const double wanted = ceil(static_cast<double>(top_p) * static_cast<double>(all));
    return wanted >= 1.0 ? min(static_cast<uint64>(wanted), all) - 1 : 0;
}

// A random place in the weight of all tokens that stay.
__device__ __forceinline__ uint64 share_of(float uniform, uint64 kept) {
    return min(static_cast<uint64>(static_cast<double>(uniform) * static_cast<double>(kept)), kept - 1);
}

__device__ __forceinline__ void wait_for_scores() {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
}

// The previous kernels may write scores and controls: no __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(kBlock)
    argmax(const ELEMENT* logits, long long* __restrict__ tokens, float* __restrict__ best, int width,
           int blocks, int vectorised) {
    __shared__ step::BestShared shared;
    wait_for_scores();
    const int index = blockIdx.x / blocks;
    const int rank = blockIdx.x % blocks;
    const ELEMENT* begin = logits + static_cast<long long>(index) * width;
    const step::Scores<ELEMENT> scores(begin, width, rank, blocks, vectorised);
    const step::Ranked found = step::best_of_row(scores, blocks, shared);
    if (rank == 0 && threadIdx.x == 0) {
        tokens[index] = step::index_of_ranked(found);
        best[index] = step::score_of<ELEMENT>(step::key_of_ranked(found));
    }
    row_sync();  // shared memory is read by others until here
}

// One block a multiprocessor is enough: without the 1 the assembler spills registers to make room for two.
extern "C" __global__ void __launch_bounds__(kBlock, 1)
    sample(const ELEMENT* logits, const float* temperature, const int* top_k, const float* top_p, const float* min_p,
           const float* uniform,
           long long* __restrict__ tokens, float* __restrict__ best, int width, int blocks, int vectorised) {
    __shared__ Shared shared;
    wait_for_scores();
    const int index = blockIdx.x / blocks;
    const int rank = blockIdx.x % blocks;
    const ELEMENT* begin = logits + static_cast<long long>(index) * width;
    const step::Scores<ELEMENT> scores(begin, width, rank, blocks, vectorised);
    const step::Ranked found = step::best_of_row(scores, blocks, shared.best);
    const float score = step::score_of<ELEMENT>(step::key_of_ranked(found));
    const int most = top_k[index];
    const bool draws = most != 1 && fabsf(score) < __uint_as_float(0x7F800000u);  // the same for the whole row
    if (rank == 0 && threadIdx.x == 0) {
        best[index] = score;
        if (!draws) tokens[index] = step::index_of_ranked(found);
    }
    if (draws) {
        // The best token's weight, 2^31, always counts. NaN gives 0.
        const unsigned int least = min(__float2uint_ru(min_p[index] * 0x1p31f), 1u << 31);
        const float factor = fmaxf(1.4426950409f / temperature[index], __uint_as_float(1));  // of NaN the smallest, too
        const Row row = {scores, rank, blocks, score, factor, least};
        const bool cuts = most > 0 && most < width;
        Cut cut = {0, 0};
        uint64 kept = 0;       // the weight of all tokens that stay
        unsigned int key = 0;  // at which the sum passes the target
        uint64 rest = 0;       // what the better keys leave of the target, and then how many tokens of the key
        int turn = 0;
#pragma unroll 1
        for (int search = cuts ? kTopK : kTopP; search <= kDraw; ++search) {
            key = 0;
#pragma unroll 1
            for (int shift = kTopShift; shift >= 0; shift -= 8) {
                const bool known = search == kDraw && shift == kTopShift;
                const uint64 value = known ? (threadIdx.x < kBins ? shared.top[threadIdx.x] : 0)
                                           : histogram(row, cut, search == kTopK, key, shift, turn ^= 1, shared);
                const uint64 inclusive = cumulated(value, shared);
                if (shift == kTopShift) {
                    if (threadIdx.x < kBins) shared.top[threadIdx.x] = value;
                    if (search == kTopP) kept = total(shared);
                    rest = search == kTopK   ? most - 1
                           : search == kTopP ? last_of_nucleus(top_p[index], kept)
                                             : share_of(uniform[index], kept);
                }
                const Place place = locate(value, inclusive, rest, shared);
                key |= place.bin << shift;
                rest -= place.above;
                if (search == kTopP && top_p[index] >= 1.0f) break;  // all stay
            }
            if (search == kTopK) {
                cut = {key, static_cast<unsigned int>(rest) + 1};
            } else if (search == kDraw || top_p[index] < 1.0f) {
                const unsigned int weight = row.weight(step::score_of<ELEMENT>(key));
                const unsigned int equals = rest / weight;
                if (search == kTopP) kept = last_of_nucleus(top_p[index], kept) - rest + (equals + 1ull) * weight;
                rest = equals;
            }
        }
        pick(row, key, static_cast<unsigned int>(rest), tokens + index, shared);
    }
    row_sync();  // shared memory is read by others until here
}

// out [m, n] = x [m, k] weight [n, k]^T + bias [n] on Hopper: quantized weights, 16-bit x, fp32 accumulation (sm_90a).
// Or, with GATED, out [m, n] = silu(gate) * up, where the weight has 2 n rows: the first n give the gate, the others up.
//
// Macros
//   ELEMENT   __half or __nv_bfloat16: the type of x, of scales, zero points, the bias and out
//   BITS      2, 3, 4 or 8: bits of a packed code; kernels/ops/packed.py describes the layout
//   TOKENS    rows of x per tile: 16, 32, 64, 128 or 256
//   CONSUMERS consumer warpgroups, 64 rows of the weight each: 2, or 3 if TOKENS leaves enough registers
//   GROUPS    1: a scale covers 64 columns or more; 2: it covers 32
//   STAGES    blocks of 64 columns in flight
//   PARTS     1, 2 or 4: equal parts of a tile's rows, of which a tile of experts copies and multiplies no more than it has
//   EXPERTS   0: one product; 1: the products of a mixture of experts. Rows of x are sorted by expert and multiplied by the
//             expert's weights, which are contiguous, from number `resident` on in pinned host memory. tiles[i] = {expert,
//             first row, rows, 0} has up to TOKENS rows; there are tiles[-1].x tiles, which blocks process whole, in turn.
//             x has at least TOKENS rows, and there is no bias.
//   GATED     1: a tile has as many rows of the gate as of up. n is a multiple of 16.
//
// The kernel computes the transpose: D [64 CONSUMERS rows of the weight, TOKENS] = W x^T. A dequantized register is then part
// of operand A of wgmma, so that weights go from shared memory to the tensor cores through registers, and x is operand B in
// shared memory. Codes minus zero points are exact; the product with the scale is the only rounding.
//
// Warp specialization: two threads feed a ring of STAGES buffers by TMA, one with weights, which starts before the previous
// kernel has ended, and one with x. The consumer warpgroups dequantize a block of columns while the products of the previous
// block run.
//
// With GATED, two warps of a warpgroup multiply 32 rows of the gate and the others the same rows of up. They exchange sums at
// the end of a tile, so the loop over k is the same as without.
//
// Scheduling (stream-K): each block of the grid gets up to `waves` whole tiles; the remaining tiles times blocks of k are
// divided into equal runs. If a run ends inside a tile, the block that has the beginning of the tile adds the sums that the
// other blocks have left in `partials`, in their order, and writes the tile. It waits for them by a flag, which it resets. A
// grid has no more blocks than the GPU, or the green context, has multiprocessors. Beside other streams or processes not all
// of them need be resident, but a block waits only for blocks of higher numbers, and these do not wait before they have left
// their sums. So the kernel ends if blocks start in the order of their numbers, which GPUs do although CUDA does not
// guarantee it. If there are at most half as many tiles as multiprocessors, a cluster of `splits` blocks may share a tile:
// each block multiplies its part of k, then adds up the sums of all blocks, in their order, for every splits-th unit of 16
// tokens, through distributed shared memory.
#include "common/numeric.cuh"
#include "common/schedule.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_epilogue.cuh"
#include "wna16/dequantize.cuh"

using Packed = Codes<ELEMENT, BITS>;
using Weights = SymmetricWeights<ELEMENT, BITS>;
constexpr int kConsumers = CONSUMERS;
constexpr int kRows = 64 * kConsumers;  // rows of the weight per tile
constexpr int kColumnsOfGroup = GATED ? 32 : 64;  // of out, that a warpgroup has
constexpr int kColumns = kConsumers * kColumnsOfGroup;
constexpr int kCopies = GATED ? 2 : 1;  // of the gate, and of up
constexpr int kUnit = TOKENS / PARTS;  // rows of x that are copied at a time
constexpr int kTileK = 64;              // one row of the 128-byte swizzle
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kXBytes = TOKENS * kTileK * 2;
constexpr int kCodeBytes = kRows * kTileK * BITS / 8;
constexpr int kScaleWords = 8 * GROUPS;           // of a tile of 16 rows, per block of k
constexpr int kScaleBytes = kRows / 16 * 2 * 32;  // room for two groups
// Blocks of k that share a stage and its barriers: with few tokens, waiting takes much of the time of a block.
constexpr int kBlocksOfStage = TOKENS <= 64 ? 2 : 1;
constexpr int kStages = STAGES / kBlocksOfStage;
constexpr int kEmptyAfterFull = 8 * kStages;  // from the barrier of a full stage to that of the empty one
constexpr int kStoreTokens = TOKENS < 64 ? TOKENS : 64;
constexpr int kStagingBytes = kStoreTokens * 64 * 2;
constexpr int kProducerRegisters = 40;
// With the producer's registers no more than a block gets at its start.
constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 152;

struct Problem {
    int m, n, k;      // n: columns of out
    int gate_tiles;   // packed tiles of the gate, which those of up follow; 0 without a gate
    int chunks;       // chunks of 64 columns per row of the weight
    int shift;        // a group has 2^shift chunks
    int group;        // tiles along m that are processed together, so that a wave of blocks shares L2
    int waves;        // whole tiles per block
    int direct;       // write with ordinary stores: out has no tensor map
    int splits;       // blocks of a cluster, which share a tile along k; 1: no clusters
    const int4* tiles;  // of experts; otherwise null
    int resident;       // number of experts whose weights are in GPU memory
};

struct Maps {
    ptx::TileMaps map_x;
    ptx::TensorMap map_codes, map_scales, map_zeros, map_out;
    ptx::TensorMap host_codes, host_scales, host_zeros;  // of the experts in host memory
};

// A part of a tile: blocks [begin, end) of k.
struct Segment {
    int tile, begin, end;
};

// The segments of one block of the grid.
struct Schedule {
    int wave = 0;
    int unit, last;  // of the run after the waves, in blocks of k

    __device__ __forceinline__ static int tiles(const Problem& p) {
        if (EXPERTS) return p.tiles[-1].x * ((p.n + kColumns - 1) / kColumns);
        return ((p.m + TOKENS - 1) / TOKENS) * ((p.n + kColumns - 1) / kColumns);
    }
    // The beginning of a block's run.
    __device__ __forceinline__ static int begin_of(int block, const Problem& p) {
        if (p.splits > 1) return block / p.splits * p.chunks + block % p.splits * p.chunks / p.splits;
        const int left = max(tiles(p) - p.waves * static_cast<int>(gridDim.x), 0);
        // Less than two tiles for each of a few hundred blocks: 32 bits suffice for a k of millions.
        return static_cast<unsigned>(left * p.chunks) * block / gridDim.x;
    }
    __device__ __forceinline__ explicit Schedule(const Problem& p)
        : unit(EXPERTS ? 0 : begin_of(blockIdx.x, p)), last(EXPERTS ? 0 : begin_of(blockIdx.x + 1, p)) {}

    __device__ __forceinline__ bool next(Segment& segment, const Problem& p) {
        if (EXPERTS || wave < p.waves) {
            segment = {static_cast<int>(wave * gridDim.x + blockIdx.x), 0, p.chunks};
            ++wave;
            return segment.tile < tiles(p);  // the last wave may be partial; then nothing remains
        }
        if (unit >= last) return false;
        segment.tile = static_cast<int>(p.waves * gridDim.x) + unit / p.chunks;
        segment.begin = unit % p.chunks;
        segment.end = min(p.chunks, segment.begin + last - unit);
        unit += segment.end - segment.begin;
        return true;
    }
};

struct Place {
    int token, column;  // of the tile's first element of out
    int end;          // of the rows of x that are multiplied
    int weight_tile;  // the packed tile of the weight, or of the gate, where the tile begins
    bool offloaded;   // the weight is in host memory
};

__device__ __forceinline__ Place place_of(int tile, const Problem& p) {
    if (EXPERTS) {
        const int columns = (p.n + kColumns - 1) / kColumns;
        const int4 rows = p.tiles[tile / columns];
        const int column = tile % columns * kColumns;
        const bool offloaded = rows.x >= p.resident;
        const int expert = rows.x - (offloaded ? p.resident : 0);
        const int tiles_of_expert = GATED ? 2 * p.gate_tiles : (p.n + 15) / 16;
        return {rows.y, column, rows.y + rows.z, expert * tiles_of_expert + column / 16, offloaded};
    }
    const auto place = tile_place(tile, (p.m + TOKENS - 1) / TOKENS, (p.n + kColumns - 1) / kColumns, p.group);
    return {place.row * TOKENS, place.column * kColumns, p.m, place.column * kColumns / 16, false};
}

extern __shared__ unsigned char memory[];

static_assert(1024 + STAGES * (kXBytes + kCodeBytes + 2 * kScaleBytes + 16) + kConsumers * kStagingBytes == SHARED_BYTES,
              "the host asks for other shared memory");

// Shared-memory addresses.
struct Buffers {
    ptx::uint32 x, codes, scales, zeros, staging, full, empty;

    __device__ __forceinline__ Buffers() {
        x = (ptx::shared_address(memory) + 1023) & ~1023u;  // the swizzle repeats every 1024 bytes
        staging = x + STAGES * kXBytes;
        codes = staging + kConsumers * kStagingBytes;
        scales = codes + STAGES * kCodeBytes;
        zeros = scales + STAGES * kScaleBytes;
        full = zeros + STAGES * kScaleBytes;
        empty = full + kEmptyAfterFull;
    }
};

// The producer's position: the stages of all segments, in order. A tile's position takes integer divisions, which are
// too slow for each block of k, so it is computed once per segment.
struct Blocks {
    Schedule schedule;
    Segment segment;
    Place place;
    int rows;  // number of rows of x in the tile
    bool there;

    __device__ __forceinline__ explicit Blocks(const Problem& p) : schedule(p) { begin_segment(p); }
    // Of the next stage.
    __device__ __forceinline__ int count() const { return min(kBlocksOfStage, segment.end - segment.begin); }
    __device__ __forceinline__ void advance(const Problem& p) {
        segment.begin += kBlocksOfStage;
        if (segment.begin >= segment.end) begin_segment(p);
    }

private:
    __device__ __forceinline__ void begin_segment(const Problem& p) {
        there = schedule.next(segment, p);
        if (!there) return;
        place = place_of(segment.tile, p);
        rows = EXPERTS ? (place.end - place.token + kUnit - 1) / kUnit * kUnit : rows_of<TOKENS>(place.token, p.m);
    }
};

__device__ __forceinline__ void load_weights(const Buffers& buffers, int stage, const Maps& maps, const Blocks& blocks,
                                             bool symmetric, const Problem& p) {
    const ptx::uint32 full = buffers.full + 8 * stage;
    const int scale_bytes = kRows / 16 * kScaleWords * 4 * (symmetric ? 1 : 2);
    ptx::mbarrier_expect(full, blocks.count() * (blocks.rows * kTileK * 2 + kCodeBytes + scale_bytes));
    const ptx::TensorMap *codes = &maps.map_codes, *scales = &maps.map_scales, *zeros = &maps.map_zeros;
    if (EXPERTS && blocks.place.offloaded) {
        codes = &maps.host_codes, scales = &maps.host_scales, zeros = &maps.host_zeros;
    }
#pragma unroll
    for (int b = 0; b < kBlocksOfStage; ++b) {
        const int block = blocks.segment.begin + b, slot = stage * kBlocksOfStage + b;
        if (block >= blocks.segment.end) break;
        const int group = GROUPS == 2 ? 2 * block : block >> p.shift;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const int from = blocks.place.weight_tile + i * p.gate_tiles;
            const int offset = slot * kScaleBytes + i * (kScaleBytes / kCopies);
            ptx::tma_load(buffers.codes + slot * kCodeBytes + i * (kCodeBytes / kCopies), codes, full, block * 32 * BITS, from);
            ptx::tma_load(buffers.scales + offset, scales, full, group * 8, from);
            if (!symmetric) ptx::tma_load(buffers.zeros + offset, zeros, full, group * 8, from);
        }
    }
}

// Rows beyond m: the stage's old contents give columns of the result that are not stored.
__device__ __forceinline__ void load_x(const Buffers& buffers, int stage, const Maps& maps, const Blocks& blocks) {
#pragma unroll
    for (int b = 0; b < kBlocksOfStage; ++b) {
        const int block = blocks.segment.begin + b;
        if (block >= blocks.segment.end) break;
        const ptx::uint32 target = buffers.x + (stage * kBlocksOfStage + b) * kXBytes;
        for (int first = 0; first < (EXPERTS ? blocks.rows : 1); first += kUnit) {
            ptx::tma_load(target + first * kTileK * 2, maps.map_x.of<kUnit>(EXPERTS ? kUnit : blocks.rows), buffers.full + 8 * stage,
                          block * kTileK, blocks.place.token + first);
        }
    }
}

// Calls load(stage, blocks) for each stage when it is free.
template <typename Load>
__device__ __forceinline__ void produce(const Buffers& buffers, const Problem& p, Load load) {
    Ring<kStages> ring;
    for (Blocks blocks(p); blocks.there; blocks.advance(p), ring.advance()) {
        ptx::mbarrier_wait(buffers.empty + 8 * ring.stage, ring.parity ^ 1);
        load(ring.stage, blocks);
    }
}

// Where the scales of a packed tile begin in a stage. Copies have to begin at multiples of 128 bytes, so those of up begin in
// the middle.
__device__ __forceinline__ int tile_offset(int tile) {
    constexpr int kTilesOfCopy = kRows / 16 / kCopies;
    return tile / kTilesOfCopy * (kScaleBytes / kCopies) + tile % kTilesOfCopy * kScaleWords * 4;
}

// Where a warp finds its operands in the first block of the ring.
struct Operands {
    ptx::uint32 codes, scales;  // of its 16 rows
    ptx::uint32 x;              // the low word of the descriptor
    ptx::uint32 full;           // the barrier

    __device__ __forceinline__ explicit Operands(const Buffers& buffers) {
        const int lane = threadIdx.x % 32, tile = packed_tile_of_warp<GATED, kConsumers>();
        codes = buffers.codes + tile * 128 * BITS;
        scales = buffers.scales + tile_offset(tile) + lane / 4 * 4;
        x = static_cast<ptx::uint32>(ptx::wgmma_descriptor(buffers.x, 0, 1024));
        full = buffers.full;
        // Else the compiler computes them again for each block.
        asm volatile("" : "+r"(codes), "+r"(scales), "+r"(x), "+r"(full));
    }
};

// The operands A of a block of k, number `slot` of the ring, for the 16 rows of this warp.
template <bool Symmetric>
__device__ __forceinline__ void dequantize(ptx::uint32 (&a)[4][4], const Operands& own, int slot) {
    ptx::uint32 words[Packed::kLoads][Packed::kLoadWords];
    const ptx::uint32 codes = own.codes + slot * kCodeBytes;
#pragma unroll
    for (int i = 0; i < Packed::kLoads; ++i) read_codes(words[i], codes + i * 128 * Packed::kLoadWords, threadIdx.x % 32);
    const ptx::uint32 from = own.scales + slot * kScaleBytes;
    if constexpr (Symmetric) {
        Weights weights(ptx::load_shared(from));
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            if (GROUPS == 2 && s == 2) weights = Weights(ptx::load_shared(from + 32));
            weights.fragment(a[s], words[s / Packed::kLoadSteps], s % Packed::kLoadSteps);
        }
    } else {
        const ptx::uint32 zeros_from = from + STAGES * kScaleBytes;
        RowPairs scales = Packed::scales(ptx::load_shared(from));
        auto zeros = Packed::zeros(ptx::load_shared(zeros_from));
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            if (GROUPS == 2 && s == 2) {
                scales = Packed::scales(ptx::load_shared(from + 32));
                zeros = Packed::zeros(ptx::load_shared(zeros_from + 32));
            }
            Packed::integers(a[s], words[s / Packed::kLoadSteps], s % Packed::kLoadSteps, zeros);
            scale_fragment<ELEMENT>(a[s], scales);
        }
    }
}

// Starts the products of a block of k with Tokens rows of x. `x` is the low word of the descriptor: arithmetic on 64 bits
// takes longer.
template <int Tokens>
__device__ __forceinline__ void multiply(float (&d)[Tokens / 2], const ptx::uint32 (&a)[4][4], ptx::uint32 x) {
    constexpr ptx::uint64 kUpperWord = ptx::wgmma_descriptor(0, 0, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        ptx::wgmma_from_registers<ELEMENT, Tokens>(d, a[s], kUpperWord | (x + s * (32 / ptx::kDescriptorUnit)), 1);
    }
    ptx::wgmma_commit();
}

// Placed after a wait: tells the compiler that the products read `a` until here.
__device__ __forceinline__ void read_by_products(ptx::uint32 (&a)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// The products of `count` blocks of k with Tokens rows of x. The codes of a block are dequantized while the products of the
// one before run.
template <bool Symmetric, int Tokens>
__device__ __forceinline__ void multiply_blocks(float (&sums)[TOKENS / 2], Ring<kStages>& ring, const Operands& own, int count) {
    float d[Tokens / 2];
    ptx::uint32 even[4][4], odd[4][4];
    ptx::uint32 running = 0;  // the barrier of the stage whose last products run
    auto wait = [&] { ptx::mbarrier_wait(own.full + 8 * ring.stage, ring.parity); };
    auto release = [&] {
        if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive(running + kEmptyAfterFull);
    };
    auto next_stage = [&] {
        running = own.full + 8 * ring.stage;
        ring.advance();
    };
    // Starts the products of block number `slot` of the ring, and waits for those of the one before, which read `other`.
    auto step = [&](ptx::uint32 (&a)[4][4], ptx::uint32 (&other)[4][4], int slot, bool first) {
        dequantize<Symmetric>(a, own, slot);
        multiply<Tokens>(d, a, own.x + slot * (kXBytes / ptx::kDescriptorUnit));
        if (first) return;
        ptx::wgmma_wait<1>();
        read_by_products(other);
    };
#pragma unroll
    for (int i = 0; i < Tokens / 2; ++i) d[i] = 0.0f;
    for (int block = 0; block < count; block += 2) {
        wait();
        step(even, odd, ring.stage * kBlocksOfStage, block == 0);
        if (block > 0) release();
        if (kBlocksOfStage == 1) next_stage();
        if (block + 1 < count) {
            if (kBlocksOfStage == 1) wait();
            step(odd, even, ring.stage * kBlocksOfStage + kBlocksOfStage - 1, false);
            if (kBlocksOfStage == 1) release();
        }
        if (kBlocksOfStage == 2 || block + 1 < count) next_stage();
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_arrived(d);
    release();
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sums[i] = i < Tokens / 2 ? d[i] : 0.0f;
}

// As `multiply_blocks`, with no more parts of the rows of x than a tile has.
template <bool Symmetric>
__device__ __forceinline__ void multiply_tile(float (&d)[TOKENS / 2], Ring<kStages>& ring, const Operands& own, int count,
                                              Place place) {
    if constexpr (PARTS > 1) {
        const int rows = place.end - place.token;
        if (rows <= kUnit) return multiply_blocks<Symmetric, kUnit>(d, ring, own, count);
        if constexpr (PARTS == 4) {
            if (rows <= 2 * kUnit) return multiply_blocks<Symmetric, 2 * kUnit>(d, ring, own, count);
            if (rows <= 3 * kUnit) return multiply_blocks<Symmetric, 3 * kUnit>(d, ring, own, count);
        }
    }
    multiply_blocks<Symmetric, TOKENS>(d, ring, own, count);
}

// Writes what a warpgroup has of a tile, as columns of out, through staging buffers and TMA.
__device__ __forceinline__ void store(const float (&d)[TOKENS / 2], ptx::uint32 staging, const Maps& maps, ELEMENT* out,
                                      Place place, int consumer, const Problem& p) {
    const int column = place.column + kColumnsOfGroup * consumer;
    if (p.direct) {
        store_directly<ELEMENT, kColumnsOfGroup>(d, out, place.token, column, place.end, p.n);
        return;
    }
#pragma unroll
    for (int first = 0; first < TOKENS; first += kStoreTokens) {
        const int left = place.end - place.token - first;
        if (EXPERTS && left < kStoreTokens) {  // a box would write to the rows of the next expert
            if (left <= 0) break;
            begin_box(consumer);
#pragma unroll
            for (int token = 0; token < kStoreTokens; token += 16) {
                if (token < left) transpose<ELEMENT, kColumnsOfGroup>(&d[(first + token) * kColumnsOfGroup / 128], staging, token);
            }
            ptx::named_barrier(1 + consumer, 128);
            store_rows<ELEMENT, kColumnsOfGroup>(staging, out, place.token + first, left, column, p.n);
            continue;
        }
        begin_box(consumer);
#pragma unroll
        for (int token = 0; token < kStoreTokens; token += 16) {
            transpose<ELEMENT, kColumnsOfGroup>(&d[(first + token) * kColumnsOfGroup / 128], staging, token);
        }
        end_box(maps.map_out, staging, column, place.token + first, consumer);
    }
}

// Turns sums of products into results: brings them to the unit 1, adds the bias to four values of a thread per 8 tokens, and
// joins gate and up. `column` is the warpgroup's first one of out. Tokens from `tokens` on are not needed.
template <bool Symmetric, int Count>
__device__ __forceinline__ void finish(float (&d)[Count], const ELEMENT* bias, int column, ptx::uint32 staging, int consumer,
                                       const Problem& p, int tokens = 2 * Count) {
    constexpr float kOne = Symmetric ? Weights::kUnit : 1.0f;
    if (bias != nullptr) {
        const int row = column + row_of_warp<GATED>() + threadIdx.x % 32 / 4;
        if (GATED && has_last_tokens()) bias += p.n;
        const float upper = row < p.n ? to_float(bias[row]) / kOne : 0.0f;
        const float lower = row + 8 < p.n ? to_float(bias[row + 8]) / kOne : 0.0f;
#pragma unroll
        for (int i = 0; i < Count; ++i) d[i] += i & 2 ? lower : upper;
    }
    if constexpr (GATED) {
        join_gate(d, staging, consumer, tokens, kOne);
    } else {
#pragma unroll
        for (int i = 0; i < Count; ++i) d[i] *= kOne;
    }
}

// Adds up and writes the sums that the blocks of a cluster have of a tile, every splits-th unit of 16 tokens by each block.
// The sums replace x in shared memory: [kConsumers][TOKENS / 8][128], four values per thread.
template <bool Symmetric>
__device__ __forceinline__ void share(const float (&d)[TOKENS / 2], const Buffers& buffers, const Maps& maps,
                                      const ELEMENT* bias, ELEMENT* out, Place place, int consumer, const Problem& p) {
    static_assert(STAGES * kXBytes >= kConsumers * TOKENS / 2 * 128 * 4, "the sums fit where x was");
    const int column = place.column + kColumnsOfGroup * consumer;
    float4* const sums = reinterpret_cast<float4*>(memory + (buffers.x - ptx::shared_address(memory)));
    const ptx::uint32 staging = buffers.staging + consumer * kStagingBytes;
    float4* const own = sums + consumer * (TOKENS / 8) * 128 + threadIdx.x % 128;
    ptx::named_barrier(1 + kConsumers, 128 * kConsumers);  // all consumers have read the last of x
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) own[i * 128] = make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
    ptx::cluster_sync();
    const int units = min(TOKENS, p.m - place.token + 15) / 16;
    for (int unit = ptx::cluster_rank(); unit < units; unit += p.splits) {
        float total[8] = {};
#pragma unroll 4
        for (int block = 0; block < p.splits; ++block) {
            const float4* const theirs = ptx::of_cluster_block(own, block) + 2 * unit * 128;
            const float4 low = theirs[0], high = theirs[128];
            total[0] += low.x;
            total[1] += low.y;
            total[2] += low.z;
            total[3] += low.w;
            total[4] += high.x;
            total[5] += high.y;
            total[6] += high.z;
            total[7] += high.w;
        }
        finish<Symmetric>(total, bias, column, staging, consumer, p);
        const int token = place.token + 16 * unit;
        if (p.direct) {
            store_directly<ELEMENT, kColumnsOfGroup>(total, out, token, column, place.end, p.n);
            continue;
        }
        begin_box(consumer);
        transpose<ELEMENT, kColumnsOfGroup>(total, staging, 0);
        end_box(maps.map_out, staging, column, token, consumer);
    }
    ptx::cluster_sync();  // shared memory must stay valid until all blocks have read it
}

// Leaves the sums of a segment that does not begin its tile to the block that has the beginning.
__device__ __forceinline__ void leave(const float (&d)[TOKENS / 2], float* partials, int* flags, int consumer) {
    const int thread = threadIdx.x % 128;
    const int mine = blockIdx.x * kConsumers + consumer;
    float* target = partials + static_cast<long long>(mine) * (TOKENS / 2) * 128 + thread;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) __stcg(target + i * 128, d[i]);
    __threadfence();
    ptx::named_barrier(1 + consumer, 128);
    if (thread == 0) ptx::store_release(flags + mine, 1);
}

// Adds the sums that the following blocks have left for a tile whose beginning this block has.
__device__ __forceinline__ void gather(float (&d)[TOKENS / 2], int tile, const float* partials, int* flags, int consumer,
                                       const Problem& p) {
    const int thread = threadIdx.x % 128;
    const int end = (tile - p.waves * static_cast<int>(gridDim.x) + 1) * p.chunks;
    int count = 0;
    while (blockIdx.x + count + 1 < gridDim.x && Schedule::begin_of(blockIdx.x + count + 1, p) < end) ++count;
    int* const theirs = flags + (blockIdx.x + 1) * kConsumers + consumer;
    for (int i = thread; i < count; i += 128) {
        while (ptx::load_acquire(theirs + i * kConsumers) == 0) {
        }
    }
    __threadfence();
    ptx::named_barrier(1 + consumer, 128);
    for (int i = thread; i < count; i += 128) theirs[i * kConsumers] = 0;
    constexpr int kSums = TOKENS / 2 * 128;
    const float* source = partials + ((blockIdx.x + 1ll) * kConsumers + consumer) * kSums + thread;
    for (int block = 0; block < count; ++block, source += kConsumers * kSums) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) d[i] += __ldcg(source + i * 128);
    }
}

template <bool Symmetric>
__device__ __forceinline__ void consume(const Buffers& buffers, const Maps& maps, const ELEMENT* bias, ELEMENT* out,
                                        float* partials, int* flags, const Problem& p) {
    const int consumer = threadIdx.x / 128 - 1;
    const Operands own(buffers);
    Schedule schedule(p);
    Segment segment;
    Ring<kStages> ring;
    float d[TOKENS / 2];
    while (schedule.next(segment, p)) {
        const Place place = place_of(segment.tile, p);
        const int count = segment.end - segment.begin;
        multiply_tile<Symmetric>(d, ring, own, count, place);

        if (p.splits > 1) {
            share<Symmetric>(d, buffers, maps, bias, out, place, consumer, p);
            continue;
        }
        if (segment.begin > 0) {
            leave(d, partials, flags, consumer);
            continue;
        }
        if (segment.end < p.chunks) gather(d, segment.tile, partials, flags, consumer, p);
        const ptx::uint32 staging = buffers.staging + consumer * kStagingBytes;
        finish<Symmetric>(d, bias, place.column + kColumnsOfGroup * consumer, staging, consumer, p,
                          EXPERTS ? place.end - place.token : TOKENS);
        store(d, staging, maps, out, place, consumer, p);
    }
    // The staging buffers must outlive the stores that read them.
    if (threadIdx.x % 128 == 0) ptx::tma_store_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_wna16(const __grid_constant__ Maps maps, const ELEMENT* bias, ELEMENT* out, float* partials, int* flags,
               int symmetric, const Problem p) {
    const Buffers buffers;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            ptx::mbarrier_init(buffers.full + 8 * i, 1);
            ptx::mbarrier_init(buffers.empty + 8 * i, kConsumers);
        }
        ptx::mbarrier_fence_init();
        ptx::prefetch_tensor_map(&maps.map_codes);
        ptx::prefetch_tensor_map(&maps.map_scales);
        ptx::prefetch_tensor_map(&maps.map_x.rest);
        ptx::prefetch_tensor_map(&maps.map_x.whole);
        if (!symmetric) ptx::prefetch_tensor_map(&maps.map_zeros);
        if (!p.direct) ptx::prefetch_tensor_map(&maps.map_out);
    }
    __syncthreads();
    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_decrease<kProducerRegisters>();
        // Two warps, because issuing the copies takes as long as multiplying a block of k for few tokens: one for weights,
        // which need not wait for the previous kernel, and one for x.
        if (threadIdx.x == 0) {
            if (EXPERTS) ptx::griddepcontrol_wait();
            produce(buffers, p, [&](int stage, const Blocks& blocks) {
                load_weights(buffers, stage, maps, blocks, symmetric, p);
            });
        } else if (threadIdx.x == 32) {
            ptx::griddepcontrol_wait();
            produce(buffers, p, [&](int stage, const Blocks& blocks) { load_x(buffers, stage, maps, blocks); });
        }
    } else {
        ptx::setmaxnreg_increase<kConsumerRegisters>();
        ptx::griddepcontrol_wait();
        // One function for both, with a branch around the loop over k, is up to 15 % slower with three warpgroups.
        if (symmetric) consume<true>(buffers, maps, bias, out, partials, flags, p);
        else consume<false>(buffers, maps, bias, out, partials, flags, p);
    }
}

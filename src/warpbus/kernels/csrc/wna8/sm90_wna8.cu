// out [m, n] = x_scale [m] * (x [m, k] weight [n, k]^T) + bias [n] on Hopper: e4m3 x, weights of 2 to 4 bits in groups (sm_90a).
// Or, with GATED, out [m, n] = silu(gate) * up, where the weight has 2 n rows: the first n give the gate, the others up.
//
// Macros
//   ELEMENT  __half or __nv_bfloat16: the type of scales, zero points, the bias and out
//   BITS     2, 3 or 4: bits of a packed code
//   GROUPS   groups of the weight's scales per block of 128 columns: 1, or 2 for groups of 64
//   SYMMETRIC  1: the zero point, the same for all, is in the sums of x
//   STAGES   blocks of 128 columns in flight
//   GATED    1: a tile has as many rows of the gate as of up, in the order of wna16/sm90_wna16.cu. n is a multiple of 16
//   EXPERTS  0: one product; 1: the products of a mixture of experts. Rows of x are sorted by expert and multiplied by the
//            expert's weights, which are contiguous. tiles[i] = {expert, first row, rows, 0} has up to 128 rows; there are
//            tiles[-1].x tiles. Of a tile with up to 64 rows, only half is multiplied. x has at least 128 rows, and there
//            is no bias.
//
// The weight is packed as for wna16 (kernels/ops/packed.py), so that the same codes serve both. x and its sums are those of
// wna8/quantize.cu: per group, or per 128 columns where groups are larger, times -2^-9, and times the code of zero in a
// symmetric scheme. k is a multiple of 16; any m and n.
//
// The kernel computes the transpose, D [128 rows of the weight, 128 tokens] = W x^T, with W in registers. No code is
// converted: a byte 0000cccc read as e4m3 is the number c * 2^-9, exactly, because it is subnormal, or of the smallest exponent
// for codes from 8 on. So two masks turn the codes of 16 columns into two registers of operand A. A result is the sum over
// groups of
//   scale * (sum of code * x - zero * sum of x).
// A tile begins with the second terms: a product in tf32 of scales times zeros with the sums of x. Then each group's sums are
// multiplied by its scale and added to float32 registers, one fma per result. The tensor cores add e4m3 products with about
// 14 bits, and here only those of one group at a time.
//
// Warp specialization: a thread fills a ring of STAGES buffers by TMA. The two consumer warpgroups have 64 rows of the weight
// each, and multiply the tokens in two halves: while one half's sums are scaled, the products of the other half run. Blocks are
// persistent.
#include "common/numeric.cuh"
#include "common/schedule.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_epilogue.cuh"
#include "wna16/dequantize.cuh"

constexpr int kTokens = 128;
constexpr int kConsumers = 2;
constexpr int kRows = 64 * kConsumers;  // rows of the weight per tile
constexpr int kColumnsOfGroup = GATED ? 32 : 64;  // of out, that a warpgroup has
constexpr int kColumns = kConsumers * kColumnsOfGroup;
constexpr int kCopies = GATED ? 2 : 1;  // of the gate, and of up
constexpr int kTileK = 128;             // one row of the 128-byte swizzle
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kXBytes = kTokens * kTileK;
constexpr int kUnit = EXPERTS ? kTokens / 2 : kTokens;  // rows of x that are copied at a time
constexpr int kChunkBytes = 128 * BITS;  // codes of 16 rows by 64 columns
constexpr int kCodeBytes = kRows * kTileK * BITS / 8;
constexpr int kScaleBytes = kRows / 16 * GROUPS * 32;
constexpr int kSumsAtOnce = 32;  // sums of a token, which fill a row of x
constexpr int kStagingBytes = 64 * 64 * 2;
constexpr int kSteps = 4 / GROUPS;   // products of 32 columns per group in a block
constexpr int kHalf = kTokens / 4;   // sums of a thread for half the tokens
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

struct Problem {
    int m, n, k;     // n: columns of out
    int gate_tiles;  // packed tiles of the gate, which those of up follow; 0 without a gate
    int sums;    // of a row of x
    int groups;  // of a row of the packed weight
    int shift;   // a group has 2^shift blocks of 128 columns
    int group;   // tiles along m that are processed together, so that a wave of blocks shares L2
    int direct;  // write with ordinary stores: out has no tensor map
    const int4* tiles;  // of experts; otherwise null
};

struct Maps {
    ptx::TileMaps map_x, map_sums;
    ptx::TensorMap map_codes, map_scales, map_out;
};

extern __shared__ unsigned char memory[];

static_assert(1024 + STAGES * (kXBytes + kCodeBytes + kScaleBytes + 16) + kConsumers * kStagingBytes ==
                  SHARED_BYTES,
              "the host asks for other shared memory");

// Shared-memory addresses.
struct Buffers {
    ptx::uint32 x, staging, codes, scales, full, empty;

    __device__ __forceinline__ Buffers() {
        x = (ptx::shared_address(memory) + 1023) & ~1023u;  // the swizzle repeats every 1024 bytes
        staging = x + STAGES * kXBytes;
        codes = staging + kConsumers * kStagingBytes;
        scales = codes + STAGES * kCodeBytes;
        full = scales + STAGES * kScaleBytes;
        empty = full + 8 * STAGES;
    }
};

struct Place {
    int token, column;  // of the tile's first element of out
    int end;            // of the rows of x that are multiplied
    int matrix;         // the first packed tile of the weight

    __device__ __forceinline__ Place(int tile, const Problem& p) : end(p.m), matrix(0) {
        const int columns = (p.n + kColumns - 1) / kColumns;
        if (EXPERTS) {
            const int4 rows = p.tiles[tile / columns];
            token = rows.y;
            end = rows.y + rows.z;
            column = tile % columns * kColumns;
            matrix = rows.x * (GATED ? 2 * p.gate_tiles : (p.n + 15) / 16);
            return;
        }
        const auto place = tile_place(tile, (p.m + kTokens - 1) / kTokens, columns, p.group);
        token = place.row * kTokens;
        column = place.column * kColumns;
    }
    __device__ __forceinline__ bool more_than_half() const { return end - token > kTokens / 2; }
};

__device__ __forceinline__ int tiles(const Problem& p) {
    return (EXPERTS ? p.tiles[-1].x : (p.m + kTokens - 1) / kTokens) * ((p.n + kColumns - 1) / kColumns);
}

__device__ __forceinline__ void produce(const Buffers& buffers, const Maps& maps, const Problem& p) {
    Ring<STAGES> ring;
    const int blocks = (p.k + kTileK - 1) / kTileK, count = tiles(p);
    for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
        const Place place(tile, p);
        const int rows = EXPERTS ? (place.more_than_half() ? kTokens : kUnit) : rows_of<kTokens>(place.token, p.m);
        // Loads columns of the tile's rows from a matrix to the ring's stage.
        const auto load_rows = [&](const ptx::TileMaps& map, int column) {
            const ptx::uint32 target = buffers.x + ring.stage * kXBytes, full = buffers.full + 8 * ring.stage;
            for (int first = 0; first < (EXPERTS ? rows : 1); first += kUnit) {
                ptx::tma_load(target + first * kTileK, map.of<kUnit>(EXPERTS ? kUnit : rows), full, column, place.token + first);
            }
        };
        for (int first = 0; first < p.sums; first += kSumsAtOnce, ring.advance()) {
            ptx::mbarrier_wait(buffers.empty + 8 * ring.stage, ring.parity ^ 1);
            const ptx::uint32 full = buffers.full + 8 * ring.stage;
            ptx::mbarrier_expect(full, rows * kSumsAtOnce * 4);
            load_rows(maps.map_sums, first);
        }
        for (int block = 0; block < blocks; ++block, ring.advance()) {
            ptx::mbarrier_wait(buffers.empty + 8 * ring.stage, ring.parity ^ 1);
            const ptx::uint32 full = buffers.full + 8 * ring.stage;
            ptx::mbarrier_expect(full, rows * kTileK + kCodeBytes + kScaleBytes);
            const int group = GROUPS == 2 ? 2 * block : block >> p.shift;
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                const int tile_of_weight = place.matrix + place.column / 16 + i * p.gate_tiles;
                ptx::tma_load(buffers.codes + ring.stage * kCodeBytes + i * (kCodeBytes / kCopies), &maps.map_codes, full,
                              block * 64 * BITS, tile_of_weight);
                ptx::tma_load(buffers.scales + ring.stage * kScaleBytes + i * (kScaleBytes / kCopies), &maps.map_scales, full,
                              group * 8, tile_of_weight);
            }
            load_rows(maps.map_x, block * kTileK);
        }
    }
}

// The operands A of the columns of a group within a block, for the 16 rows of this warp: kSteps times 32 columns.
__device__ __forceinline__ void spread(ptx::uint32 (&a)[kSteps][4], ptx::uint32 codes) {
    constexpr ptx::uint32 kMask = ((1 << BITS) - 1) * 0x01010101u;
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
        ptx::uint32 words[BITS];
        read_codes(words, codes + i * kChunkBytes, threadIdx.x % 32);
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            const ptx::uint32 word = word_of_step(words, s);
            a[2 * i + s / 2][2 * (s % 2)] = word & kMask;
            a[2 * i + s / 2][2 * (s % 2) + 1] = word >> BITS & kMask;
        }
    }
}

// Starts the products of a group with half the tokens of the tile.
__device__ __forceinline__ void multiply(float (&d)[kHalf], const ptx::uint32 (&a)[kSteps][4], ptx::uint64 x) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        ptx::wgmma_k32_from_registers(d, a[step], x + step * (32 / ptx::kDescriptorUnit), step > 0);
    }
    ptx::wgmma_commit();
}

// Placed after a wait: tells the compiler that the products read `a` until here.
__device__ __forceinline__ void read_by_products(ptx::uint32 (&a)[kSteps][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

__device__ __forceinline__ void add(float (&total)[kHalf], const float (&d)[kHalf], float2 scale) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) total[i] = fmaf(d[i], i & 2 ? scale.y : scale.x, total[i]);
}

// The part of a tile that a consumer computes.
struct Consumer {
    const Buffers& buffers;
    const int lane, strip;  // of 16 rows, among those of a stage
    Ring<STAGES> ring;
    int group = 0;  // of the block in the ring's stage
    float low[kHalf], high[kHalf];

    __device__ __forceinline__ explicit Consumer(const Buffers& buffers)
        : buffers(buffers), lane(threadIdx.x % 32), strip(packed_tile_of_warp<GATED, kConsumers>()) {}

    // Begins with what the zero points of groups add: their scales times zero points times the sums of x. `scales` and
    // `zeros` are those of the warp's 16 rows, which may not be there.
    template <bool Both>
    __device__ __forceinline__ void begin(const ptx::uint32* scales, const ptx::uint32* zeros, const Problem& p, bool there) {
        for (int first = 0; first < p.sums; first += kSumsAtOnce) {
            ptx::uint32 a[kSumsAtOnce / 8][4];
#pragma unroll
            for (int i = 0; i < kSumsAtOnce / 4; ++i) {
                const int sum = first + 4 * i + lane % 4;
                const int of = GROUPS == 2 ? sum : sum >> p.shift;
                float2 value = make_float2(0.0f, 0.0f);
                if (there && sum < p.sums) {
                    value = unpack_pair<ELEMENT>(scales[of * 8 + lane / 4]);
                    if (!SYMMETRIC) {
                        const float2 zero = unpack_pair<ELEMENT>(zeros[of * 8 + lane / 4]);
                        value.x *= zero.x, value.y *= zero.y;
                    }
                }
                a[i / 2][i % 2 * 2] = ptx::round_tf32(value.x);
                a[i / 2][i % 2 * 2 + 1] = ptx::round_tf32(value.y);
            }
            ptx::mbarrier_wait(buffers.full + 8 * ring.stage, ring.parity);
            const ptx::uint64 sums = ptx::wgmma_descriptor(buffers.x + ring.stage * kXBytes, 0, 1024);
            ptx::wgmma_fence();
#pragma unroll
            for (int step = 0; step < kSumsAtOnce / 8; ++step) {
                const ptx::uint64 from = sums + step * (32 / ptx::kDescriptorUnit);
                ptx::wgmma_k8_from_registers(low, a[step], from, step + first > 0);
                if (Both) ptx::wgmma_k8_from_registers(high, a[step], from + kNextHalf, step + first > 0);
            }
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::wgmma_arrived(low);
            if (Both) ptx::wgmma_arrived(high);
            release(ring.stage);
            ring.advance();
        }
    }

    // Adds `Count` groups. Half by half, their sums are scaled while the products of the other half and of the next group
    // run. All products end within the call: the compiler does not follow them around a loop.
    template <bool Both, int Count>
    __device__ __forceinline__ void add_groups() {
        float d_low[kHalf], d_high[kHalf];
        ptx::uint32 a[2][kSteps][4];
        Group now = open(a[0]);
        multiply(d_low, a[0], now.x);
        if (Both) multiply(d_high, a[0], now.x + kNextHalf);
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const bool last = i == Count - 1;
            const int stage = ring.stage;
            const bool ends_block = group == GROUPS - 1;
            if (++group == GROUPS) {
                group = 0;
                ring.advance();
            }
            Group next = now;
            if (!last) next = open(a[(i + 1) % 2]);
            ptx::wgmma_wait<Both ? 1 : 0>();
            ptx::wgmma_arrived(d_low);
            if (!Both) read_by_products(a[i % 2]);
            add(low, d_low, now.scale);
            if (!last) multiply(d_low, a[(i + 1) % 2], next.x);
            if constexpr (Both) {
                if (last) ptx::wgmma_wait<0>();
                else ptx::wgmma_wait<1>();
                ptx::wgmma_arrived(d_high);
                read_by_products(a[i % 2]);
                add(high, d_high, now.scale);
                if (!last) multiply(d_high, a[(i + 1) % 2], next.x + kNextHalf);
            }
            if (ends_block) release(stage);
            now = next;
        }
    }

    // All products of a tile, with all its rows or the first half; arguments as of `begin`, and how many groups k has.
    template <bool Both>
    __device__ __forceinline__ void add_tile(const ptx::uint32* scales, const ptx::uint32* zeros, const Problem& p, bool there,
                                             int groups) {
        constexpr int kAtOnce = 8;
        begin<Both>(scales, zeros, p, there);
        for (; groups >= kAtOnce; groups -= kAtOnce) add_groups<Both, kAtOnce>();
        for (; groups > 0; --groups) add_groups<Both, 1>();
    }

private:
    struct Group {
        ptx::uint64 x;  // the descriptor of the first half
        float2 scale;   // of the thread's rows
    };
    static constexpr ptx::uint64 kNextHalf = 64 * kTileK / ptx::kDescriptorUnit;

    // Waits for the group at the consumer's position, and reads its codes and scales.
    __device__ __forceinline__ Group open(ptx::uint32 (&a)[kSteps][4]) {
        const int stage = ring.stage;
        if (group == 0) ptx::mbarrier_wait(buffers.full + 8 * stage, ring.parity);
        spread(a, buffers.codes + stage * kCodeBytes + (2 * strip + group) * kChunkBytes);
        const ptx::uint32 scale = buffers.scales + stage * kScaleBytes + (strip * GROUPS + group) * 32 + lane / 4 * 4;
        return {ptx::wgmma_descriptor(buffers.x + stage * kXBytes, 0, 1024) +
                    group * (kSteps * 32 / ptx::kDescriptorUnit),
                unpack_pair<ELEMENT>(ptx::load_shared(scale))};
    }

    __device__ __forceinline__ void release(int stage) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(buffers.empty + 8 * stage);
    }
};

// Scales and adds the bias to half a tile from `token` on, joins gate and up, and writes it up to the row `end`.
__device__ __forceinline__ void store(float (&d)[kHalf], ptx::uint32 staging, const Maps& maps, const float* x_scale,
                                      const ELEMENT* bias, ELEMENT* out, int token, int end, int column, int consumer,
                                      const Problem& p) {
    const int lane = threadIdx.x % 32;
    const int mine = column + row_of_warp<GATED>() + lane / 4;
    if (GATED && bias != nullptr && has_last_tokens()) bias += p.n;
    const float upper = bias != nullptr && mine < p.n ? to_float(bias[mine]) : 0.0f;
    const float lower = bias != nullptr && mine + 8 < p.n ? to_float(bias[mine + 8]) : 0.0f;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const int at = token + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        d[i] = fmaf(d[i], at < end ? 0x1p9f * x_scale[at] : 0.0f, i & 2 ? lower : upper);
    }
    if constexpr (GATED) join_gate(d, staging, consumer);
    if (p.direct || (EXPERTS && end - token < kTokens / 2)) {
        store_directly<ELEMENT, kColumnsOfGroup>(d, out, token, column, end, p.n);
        return;
    }
    begin_box(consumer);
#pragma unroll
    for (int first = 0; first < 64; first += 16) {
        transpose<ELEMENT, kColumnsOfGroup>(d + first * kColumnsOfGroup / 128, staging, first);
    }
    end_box(maps.map_out, staging, column, token, consumer);
}

__device__ __forceinline__ void consume(const Buffers& buffers, const Maps& maps, const float* x_scale,
                                        const ptx::uint32* scales, const ptx::uint32* zeros, const ELEMENT* bias,
                                        ELEMENT* out, const Problem& p) {
    const int number = threadIdx.x / 128 - 1;
    const int parts = (p.k + kTileK - 1) / kTileK * GROUPS, count = tiles(p);
    Consumer consumer(buffers);
    for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
        const Place place(tile, p);
        const int column = place.column + kColumnsOfGroup * number;
        const int strip = (column + row_of_warp<GATED>()) / 16;
        const bool there = strip * 16 < p.n;
        const long long of_strip = (place.matrix + strip + (GATED && has_last_tokens() ? p.gate_tiles : 0ll)) * p.groups * 8;
        const bool both = !EXPERTS || place.more_than_half();
        if (both) consumer.add_tile<true>(scales + of_strip, zeros + of_strip, p, there, parts);
        else consumer.add_tile<false>(scales + of_strip, zeros + of_strip, p, there, parts);
        const ptx::uint32 staging = buffers.staging + number * kStagingBytes;
        store(consumer.low, staging, maps, x_scale, bias, out, place.token, place.end, column, number, p);
        if (both) store(consumer.high, staging, maps, x_scale, bias, out, place.token + 64, place.end, column, number, p);
    }
    // The staging buffers must outlive the stores that read them.
    if (threadIdx.x % 128 == 0) ptx::tma_store_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_wna8(const __grid_constant__ Maps maps, const float* x_scale, const ptx::uint32* scales, const ptx::uint32* zeros,
              const ELEMENT* bias, ELEMENT* out, const Problem p) {
    const Buffers buffers;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            ptx::mbarrier_init(buffers.full + 8 * i, 1);
            ptx::mbarrier_init(buffers.empty + 8 * i, 4 * kConsumers);  // warps
        }
        ptx::mbarrier_fence_init();
    }
    __syncthreads();
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_decrease<kProducerRegisters>();
        if (threadIdx.x == 0) produce(buffers, maps, p);
    } else {
        ptx::setmaxnreg_increase<kConsumerRegisters>();
        consume(buffers, maps, x_scale, scales, zeros, bias, out, p);
    }
}

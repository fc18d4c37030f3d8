// out [m, n] = a_scale [m] * (a [m, k] b [n, k]^T) * b_scale [n] + bias [n] for Hopper: 8-bit operands (sm_90a).
//
// Macros
//   ELEMENT  of bias and out: __half or __nv_bfloat16
//   SUM      float: a and b are e4m3; int: they are int8
//   TILE_N   columns of `out` that a block computes at a time, for 128 rows: a multiple of 64
//   STAGES   tiles of a and b in flight
//   BUFFERS  64 by 64 staging buffers of a consumer, through which its part of the tile is written: 1 to TILE_N / 64
//   EXPERTS  0; or the products of a mixture of experts: 1, or 2 with a gate. Then splits = 1 and bias is null
// a, b and out are accessed through tensor maps, so rows start at multiples of 16 bytes; `direct`: those of out do not. The
// scales are float32, bias is null or as long as the rows of out. Any m, n, k >= 1.
//
// If there are fewer tiles than multiprocessors, `splits` blocks share a tile: each multiplies `part` of k (a multiple of
// 128; the last one has the remainder) and writes scaled float32 sums into partial [splits, m, n rounded up to 8], which
// gemm/split_k_reduce.cu adds up in the order of the splits. int32 holds sums of up to 131071 of k.
//
// Experts: as in gemm/sm90_hgemm.cu. b and b_scale hold the weights and scales of all experts, [experts * n, k] and [experts * n],
// with a gate [experts * 2 n]; `list` says which rows of a and out a row of tiles has, and map_a.rest has boxes of kFewRows rows.
//
// Warp specialization as in gemm/sm90_hgemm.cu: a thread of warpgroup 0 fills a ring of STAGES buffers by TMA, the other two
// warpgroups multiply 64 rows each; blocks are persistent. The difference: the tensor cores add e4m3 products with about 14
// bits and truncate the rest. After 13696 of k the error is 0.3% of a sum whose terms have random signs and a fifth of one
// whose terms are all positive (simulated). So the consumers add their sums to float32 registers every 256 of k, which leaves
// 0.02% and 0.2%. Except for experts, the two consumers do this half an interval apart, so that the products of one keep the
// tensor cores busy while the other adds.
#include "common/numeric.cuh"
#include "common/schedule.cuh"
#include "common/wgmma.cuh"

constexpr int kTileM = 128;
constexpr int kTileK = 128;  // one row of the 128-byte swizzle
constexpr int kConsumers = 2;
constexpr int kRows = kTileM / kConsumers;  // rows of the tile per consumer: those of one wgmma
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kBytesA = kTileM * kTileK;
constexpr int kBytesB = TILE_N * kTileK;
constexpr bool kGated = EXPERTS == 2;
constexpr int kColumns = kGated ? TILE_N / 2 : TILE_N;  // of out in a tile
constexpr int kFewRows = 16;
constexpr int kBox = 64 * 64 * 2;               // bytes of the output per TMA store
constexpr int kRegisters = TILE_N / 2;          // accumulator registers per thread
constexpr int kFetched = (TILE_N + 127) / 128;  // columns whose scale and bias a thread loads
constexpr bool kRounds = static_cast<SUM>(0.5f) != 0;  // float: sums are added to float32 registers
constexpr int kCarry = 2;                       // stages that are summed in the tensor cores' precision
constexpr int kProducerRegisters = 40;          // the other registers go to the consumers
constexpr int kConsumerRegisters = 232;

struct Problem {
    int m, n, k;
    int part, splits;
    int group;   // rows of tiles that are processed together, so that a wave of blocks shares L2
    int direct;  // write with ordinary stores: the output has no tensor map
};

// A block's work item: a part of k of one tile.
struct Work {
    int row, column;  // of the tile's first element
    int split;
    int depth, blocks;  // the first of k, and the number of blocks of kTileK
    int end;            // the row behind the last one
    int of_b;           // of experts: the row of all weights that the columns begin with; those of up follow p.n behind

    __device__ __forceinline__ Work(int index, const Problem& p, const int4* list) {
        if constexpr (EXPERTS > 0) {
            const int columns = (p.n + kColumns - 1) / kColumns;
            const int4 entry = list[index / columns];
            row = entry.y;
            end = entry.y + entry.z;
            column = index % columns * kColumns;
            of_b = entry.x * EXPERTS * p.n + column;
            split = depth = 0;
            blocks = (p.k + kTileK - 1) / kTileK;
            return;
        }
        end = p.m;
        of_b = 0;
        const int tile = index / p.splits;
        split = index % p.splits;
        const auto place = tile_place(tile, (p.m + kTileM - 1) / kTileM, (p.n + TILE_N - 1) / TILE_N, p.group);
        row = place.row * kTileM;
        column = place.column * TILE_N;
        depth = split * p.part;
        blocks = (min(p.part, p.k - depth) + kTileK - 1) / kTileK;
    }
};

__device__ __forceinline__ int works(const Problem& p, int entries) {
    if constexpr (EXPERTS > 0) return entries * ((p.n + kColumns - 1) / kColumns);
    return (p.m + kTileM - 1) / kTileM * ((p.n + TILE_N - 1) / TILE_N) * p.splits;
}

// The products of one stage: kTileK deep, for the rows of one consumer.
__device__ __forceinline__ void multiply_stage(SUM (&d)[kRegisters], ptx::uint32 a, ptx::uint32 b, int keep) {
    const ptx::uint64 from_a = ptx::wgmma_descriptor(a, 0, 1024);
    const ptx::uint64 from_b = ptx::wgmma_descriptor(b, 0, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileK / 32; ++step) {
        constexpr int kStep = 32 / ptx::kDescriptorUnit;  // 32 of k are 32 bytes within a row
        ptx::wgmma_k32<TILE_N>(d, from_a + step * kStep, from_b + step * kStep, step > 0 ? 1 : keep);
    }
    ptx::wgmma_commit();
}

// Scales and bias of two adjacent columns of a tile.
struct alignas(16) Columns {
    float scale0, bias0, scale1, bias1;
};

// Eight elements of a thread's result: columns 16 `group` + {0, 1, 8, 9} of two rows, row by row within 8 columns.
template <typename Sum>
__device__ __forceinline__ void finish(float (&value)[8], const Sum* sums, int group, float2 scale,
                                       const Columns* columns) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Columns of = columns[8 * group + 4 * half];
        const Sum* sum = sums + 8 * group + 4 * half;
        float* target = value + 4 * half;
        target[0] = fmaf(static_cast<float>(sum[0]) * scale.x, of.scale0, of.bias0);
        target[1] = fmaf(static_cast<float>(sum[1]) * scale.x, of.scale1, of.bias1);
        target[2] = fmaf(static_cast<float>(sum[2]) * scale.y, of.scale0, of.bias0);
        target[3] = fmaf(static_cast<float>(sum[3]) * scale.y, of.scale1, of.bias1);
    }
}

// Writes eight elements, as `finish` gives them, with ordinary stores: in pairs if rows are aligned to them.
template <typename T>
__device__ __forceinline__ void store_direct(const float (&value)[8], T* out, long long stride, int row, int column,
                                             int end, const Problem& p) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const int y = row + (i & 2 ? 8 : 0);
        const int x = column + (i & 4 ? 8 : 0);
        if (y >= end || x >= p.n) continue;
        T* target = out + y * stride + x;
        if constexpr (sizeof(T) == 4) {
            *reinterpret_cast<float2*>(target) = make_float2(value[i], value[i + 1]);
        } else if (p.n % 2 == 0) {
            *reinterpret_cast<ptx::uint32*>(target) = pack_pair<T>(value[i], value[i + 1]);
        } else {
            target[0] = from_float<T>(value[i]);
            if (x + 1 < p.n) target[1] = from_float<T>(value[i + 1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_w8a8(const __grid_constant__ ptx::TileMaps map_a, const __grid_constant__ ptx::TensorMap map_b,
              const __grid_constant__ ptx::TensorMap map_out, const float* a_scale, const float* b_scale,
              const ELEMENT* bias, ELEMENT* out, float* partial, const Problem p, const int4* list) {
    extern __shared__ unsigned char memory[];
    // The swizzle pattern repeats every 1024 bytes of address.
    const ptx::uint32 base = (ptx::shared_address(memory) + 1023) & ~1023u;
    const ptx::uint32 ring_a = base;
    const ptx::uint32 ring_b = ring_a + STAGES * kBytesA;
    const ptx::uint32 staging = ring_b + STAGES * kBytesB;
    const ptx::uint32 scales = staging + kConsumers * BUFFERS * kBox;  // and bias of the tile, once per consumer
    const ptx::uint32 full = scales + kConsumers * TILE_N * 8;
    const ptx::uint32 empty = full + 8 * STAGES;
    static_assert(1024 + STAGES * (kBytesA + kBytesB + 16) + kConsumers * (BUFFERS * kBox + TILE_N * 8) == SHARED_BYTES,
                  "the host asks for other shared memory");

    // By one lane, so that the compiler knows that the value is uniform in a warp.
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            ptx::mbarrier_init(full + 8 * i, 1);
            ptx::mbarrier_init(empty + 8 * i, kConsumers);
        }
        ptx::mbarrier_fence_init();
        // Weights are loaded while the previous kernel still computes the activations.
        if constexpr (EXPERTS == 0) {
            const Work work(blockIdx.x, p, list);
            for (int block = 0; block < min(work.blocks, STAGES); ++block) {
                ptx::tma_prefetch(&map_b, work.depth + block * kTileK, work.column);
            }
        }
    }
    __syncthreads();
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();

    const int entries = EXPERTS > 0 ? list[-1].x : 0;
    Ring<STAGES> ring;
    if (warpgroup == 0) {
        ptx::setmaxnreg_decrease<kProducerRegisters>();
        if (threadIdx.x == 0) {
            for (int index = blockIdx.x; index < works(p, entries); index += gridDim.x) {
                const Work work(index, p, list);
                const int rows = rows_of<kTileM>(work.row, work.end);
                for (int block = 0; block < work.blocks; ++block, ring.advance()) {
                    ptx::mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
                    const ptx::uint32 arrived = full + 8 * ring.stage;
                    const int depth = work.depth + block * kTileK;
                    if constexpr (EXPERTS > 0) {
                        // Rows that are not loaded hold whatever was there: a row of the product depends only on its own.
                        const bool few = rows <= kFewRows;
                        const ptx::uint32 target = ring_b + ring.stage * kBytesB;
                        ptx::mbarrier_expect(arrived, (few ? kFewRows * kTileK : kBytesA) + kBytesB);
                        ptx::tma_load(ring_a + ring.stage * kBytesA, few ? &map_a.rest : &map_a.whole, arrived, depth, work.row);
                        ptx::tma_load(target, &map_b, arrived, depth, work.of_b);
                        if constexpr (kGated) {
                            ptx::tma_load(target + kBytesB / 2, &map_b, arrived, depth, work.of_b + p.n);
                        }
                        continue;
                    }
                    ptx::mbarrier_expect(arrived, rows * kTileK + kBytesB);
                    ptx::tma_load(ring_a + ring.stage * kBytesA, map_a.of<kTileM>(rows), arrived, depth, work.row);
                    ptx::tma_load(ring_b + ring.stage * kBytesB, &map_b, arrived, depth, work.column);
                }
            }
        }
    } else {
        ptx::setmaxnreg_increase<kConsumerRegisters>();
        const int consumer = warpgroup - 1;
        const int thread = threadIdx.x % 128;
        const int lane = thread % 32;
        const int warp = thread / 32;
        const ptx::uint32 mine = staging + consumer * BUFFERS * kBox;
        // The address of this lane's row of stmatrix in a 64 by 64 buffer: 16-byte column c of row r is at c ^ (r % 8).
        const int staged_row = 16 * warp + lane % 16;
        float2* of_columns = reinterpret_cast<float2*>(memory + (scales - ptx::shared_address(memory))) + consumer * TILE_N;
        const Columns* of_mine = reinterpret_cast<const Columns*>(of_columns) + lane % 4;
        int buffer = 0;
        auto release = [&](int stage) {
            if (thread == 0) ptx::mbarrier_arrive(empty + 8 * stage);
        };
        SUM d[kRegisters];
        float carried[kRounds ? kRegisters : 1];
        for (int index = blockIdx.x; index < works(p, entries); index += gridDim.x) {
            const Work work(index, p, list);
            const int row = work.row + consumer * kRows + 16 * warp + lane / 4;
            const int column = work.column + 2 * (lane % 4);
            // Loaded here, the scales arrive while the products run.
            float2 of_column[kFetched];
#pragma unroll
            for (int i = 0; i < kFetched; ++i) {
                if constexpr (EXPERTS > 0) {
                    const int at = thread + 128 * i;
                    const bool up = at >= kColumns;
                    const int within = up ? at - kColumns : at;
                    const bool there = at < TILE_N && work.column + within < p.n;
                    of_column[i] = make_float2(there ? b_scale[work.of_b + within + (up ? p.n : 0)] : 0.0f, 0.0f);
                    continue;
                }
                const int at = work.column + thread + 128 * i;
                const bool adds = at < p.n && bias != nullptr && partial == nullptr;
                of_column[i] = make_float2(at < p.n ? b_scale[at] : 0.0f, adds ? to_float(bias[at]) : 0.0f);
            }
            const float2 scale =
                make_float2(row < work.end ? a_scale[row] : 0.0f, row + 8 < work.end ? a_scale[row + 8] : 0.0f);

            if constexpr (kRounds) {
#pragma unroll
                for (int i = 0; i < kRegisters; ++i) carried[i] = 0.0f;
            }
            // The order of an expert's rows differs from run to run: their sums must not depend on the consumer.
            const int shorter = EXPERTS > 0 ? 0 : consumer * (kCarry / 2);
            int interval = kRounds ? kCarry - shorter : work.blocks;
            for (int block = 0; block < work.blocks;) {
                const int end = min(block + interval, work.blocks);
                int before = 0;  // the stage whose products may still be in flight
                for (int i = block; i < end; ++i, ring.advance()) {
                    ptx::mbarrier_wait(full + 8 * ring.stage, ring.parity);
                    multiply_stage(d, ring_a + ring.stage * kBytesA + consumer * kRows * kTileK,
                                   ring_b + ring.stage * kBytesB, i > block);
                    if (i > block) {
                        ptx::wgmma_wait<1>();
                        release(before);
                    }
                    before = ring.stage;
                }
                ptx::wgmma_wait<0>();
                ptx::wgmma_arrived(d);
                release(before);
                if constexpr (kRounds) {
#pragma unroll
                    for (int i = 0; i < kRegisters; ++i) carried[i] += d[i];
                }
                block = end;
                interval = kCarry;
            }

            ptx::named_barrier(1 + consumer, 128);  // all threads are done with the last tile's scales
#pragma unroll
            for (int i = 0; i < kFetched; ++i) {
                if (thread + 128 * i < TILE_N) of_columns[thread + 128 * i] = of_column[i];
            }
            ptx::named_barrier(1 + consumer, 128);
            const auto finished = [&](float(&value)[8], int group) {
                if constexpr (kRounds) {
                    finish(value, carried, group, scale, of_mine);
                } else {
                    finish(value, d, group, scale, of_mine);
                }
                if constexpr (kGated) {
                    float up[8];
                    if constexpr (kRounds) {
                        finish(up, carried, group + kColumns / 16, scale, of_mine);
                    } else {
                        finish(up, d, group + kColumns / 16, scale, of_mine);
                    }
#pragma unroll
                    for (int i = 0; i < 8; ++i) value[i] = activate(kSilu, value[i]) * up[i];
                }
            };
            float value[8];
            // The copy engine would overwrite the rows of the next expert.
            if (partial != nullptr || p.direct || (EXPERTS > 0 && work.row + (consumer + 1) * kRows > work.end)) {
                const long long stride = (p.n + 7) / 8 * 8;
                float* slice = partial + work.split * (p.m * stride);
#pragma unroll
                for (int group = 0; group < kColumns / 16; ++group) {
                    finished(value, group);
                    if (partial != nullptr) store_direct(value, slice, stride, row, column + 16 * group, work.end, p);
                    else store_direct(value, out, p.n, row, column + 16 * group, work.end, p);
                }
                continue;
            }
#pragma unroll
            for (int chunk = 0; chunk < kColumns / 64; ++chunk) {
                if (thread == 0) ptx::tma_store_wait_read<BUFFERS - 1>();
                ptx::named_barrier(1 + consumer, 128);
                const ptx::uint32 target = mine + buffer * kBox;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    finished(value, 4 * chunk + j);
                    ptx::stmatrix_x4(target + staged_row * 128 + (((2 * j + lane / 16) ^ (staged_row & 7)) << 4),
                                     pack_pair<ELEMENT>(value[0], value[1]), pack_pair<ELEMENT>(value[2], value[3]),
                                     pack_pair<ELEMENT>(value[4], value[5]), pack_pair<ELEMENT>(value[6], value[7]));
                }
                ptx::fence_proxy_async();
                ptx::named_barrier(1 + consumer, 128);
                if (thread == 0) {
                    ptx::tma_store(&map_out, target, work.column + 64 * chunk, work.row + consumer * kRows);
                    ptx::tma_store_commit();
                }
                buffer = buffer + 1 == BUFFERS ? 0 : buffer + 1;
            }
        }
        // The staging buffers must outlive the stores that read them.
        if (thread == 0) ptx::tma_store_wait_read<0>();
    }
}

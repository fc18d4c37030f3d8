// HGEMM for Hopper: out [m, n] = activation(a [m, k] b [k, n] + bias [n]), 16-bit elements, fp32 accumulation (sm_90a).
//
// Macros
//   ELEMENT           __half or __nv_bfloat16
//   TILE_M, TILE_N    the tile of `out` that a block computes: 64, 128 or 256 by a multiple of 16 from 64 to 256
//   STAGES            tiles of a and b in flight
//   BUFFERS           64 by 64 staging buffers of a consumer, through which its part of the tile is written: 1 or 2
//   CLUSTER           1, or 2: two blocks on neighbouring tiles along m share each tile of b (multicast)
//   A_MAJOR, B_MAJOR  0 where k is the contiguous axis of the operand, 1 where m or n is; an N-major b needs TILE_N / CLUSTER
//                     to be a multiple of 64
//   ACTIVATION        a number of numeric.cuh
//   EXPERTS           0; or the products of a mixture of experts: 1, or 2 with a gate. Then CLUSTER = 1, A_MAJOR = B_MAJOR = 0,
//                     ACTIVATION = 0, no bias
// Operands are loaded through tensor maps, so every leading dimension is a multiple of 8 elements and every pointer of 16
// bytes. Any m, n, k >= 1: TMA fills with zeros beyond the edges of k and n and does not write beyond those of out.
//
// Experts: b holds the weights of all experts, one below the other: [experts * n, k], with a gate [experts * 2 n, k], of each
// expert the gate's rows first. a and out have rows that are sorted by expert, and `list` says which rows a tile has: list[i] =
// {expert, first row, rows, 0}, list[-1].x is the number of entries (moe/sort.cu). Each entry is a row of tiles. map_a.rest has
// boxes of kFewRows rows, for entries with no more. With a gate half of a tile's columns are of the gate and half of up, and out
// [m, n] = silu(gate) * up. p.m is not used.
//
// Warp specialization: warpgroup 0 is the producer; it releases registers, and one of its threads fills a ring of STAGES
// buffers by TMA. The other warpgroups are consumers, which multiply by wgmma, each its rows of the tile. A full barrier
// counts the bytes that arrive in a stage, an empty barrier the consumers that have read it, including those of the other
// block of the cluster. Blocks are persistent: one per multiprocessor, each takes every gridDim-th tile, so that the ring is
// filled for the next tile while this one is written. Results go through staging buffers (stmatrix, then TMA) to the output.
#include "common/numeric.cuh"
#include "common/schedule.cuh"
#include "common/wgmma.cuh"

constexpr int kTileK = 64;  // one row of the 128-byte swizzle
constexpr int kConsumers = TILE_M == 64 ? 1 : 2;
constexpr int kRows = TILE_M / kConsumers;  // rows of the tile per consumer
constexpr int kProducts = kRows / 64;       // wgmma multiplies 64 rows
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kBytesA = TILE_M * kTileK * 2;
constexpr int kBytesB = TILE_N * kTileK * 2;
constexpr int kBlock64 = 64 * kTileK * 2;  // 64 by 64 elements: one box of an MN-major operand or of the output
constexpr bool kGated = EXPERTS == 2;
constexpr int kColumns = kGated ? TILE_N / 2 : TILE_N;  // of out in a tile
constexpr int kStaged = kColumns / 64 * 64;  // columns that are stored by TMA; the others by ordinary stores
constexpr int kFewRows = 16;
static_assert(EXPERTS == 0 || (CLUSTER == 1 && A_MAJOR == 0 && B_MAJOR == 0), "experts have one layout, and no clusters");

// The register file has 64 K registers: those that the producer does not need go to the consumers.
constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 56;
constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 200;

struct Problem {
    int m, n, k;
    int group;       // cluster rows of tiles that are processed together, so that a wave of blocks shares L2
    int direct;      // write with ordinary stores: the output has no tensor map
};

struct Tile {
    int row, column;  // of the first element
    int end;          // the row behind the last one
    int of_b;         // of experts: the row of all weights that the columns begin with; those of up follow p.n behind
};

// The `index`-th tile of a cluster, for its block `rank`.
__device__ __forceinline__ Tile tile_at(int index, int rank, const Problem& p, const int4* list) {
    if constexpr (EXPERTS > 0) {
        const int columns = (p.n + kColumns - 1) / kColumns;
        const int4 entry = list[index / columns];
        const int column = index % columns * kColumns;
        return {entry.y, column, entry.y + entry.z, entry.x * EXPERTS * p.n + column};
    }
    const int rows = (p.m + TILE_M * CLUSTER - 1) / (TILE_M * CLUSTER);
    const int columns = (p.n + TILE_N - 1) / TILE_N;
    const auto place = tile_place(index, rows, columns, p.group);
    return {(place.row * CLUSTER + rank) * TILE_M, place.column * TILE_N, p.m, 0};
}

__device__ __forceinline__ int tiles(const Problem& p, int entries) {
    if constexpr (EXPERTS > 0) return entries * ((p.n + kColumns - 1) / kColumns);
    return ((p.m + TILE_M * CLUSTER - 1) / (TILE_M * CLUSTER)) * ((p.n + TILE_N - 1) / TILE_N);
}

__device__ __forceinline__ void load_stage(ptx::uint32 a, ptx::uint32 b, ptx::uint32 full, const ptx::TileMaps* map_a,
                                           const ptx::TensorMap* map_b, Tile tile, int rows, int depth, int rank, int up) {
    if constexpr (EXPERTS > 0) {
        // Rows that are not loaded hold whatever was there: a row of the product depends only on its own row of a.
        const bool few = rows <= kFewRows;
        ptx::mbarrier_expect(full, (few ? kFewRows * kTileK * 2 : kBytesA) + kBytesB);
        ptx::tma_load(a, few ? &map_a->rest : &map_a->whole, full, depth, tile.row);
        ptx::tma_load(b, map_b, full, depth, tile.of_b);
        if constexpr (kGated) ptx::tma_load(b + kBytesB / 2, map_b, full, depth, tile.of_b + up);
        return;
    }
    ptx::mbarrier_expect(full, (A_MAJOR == 0 ? rows * kTileK * 2 : kBytesA) + kBytesB);
    if constexpr (A_MAJOR == 0) {
        if (rows > 0) ptx::tma_load(a, map_a->of<TILE_M>(rows), full, depth, tile.row);
    } else {
        for (int i = 0; i < TILE_M / 64; ++i) {
            ptx::tma_load(a + i * kBlock64, &map_a->whole, full, tile.row + 64 * i, depth);
        }
    }
    // Each block of the cluster loads its share of b into all of them.
    constexpr int kShare = TILE_N / CLUSTER;
    static_assert(B_MAJOR == 0 || kShare % 64 == 0, "an N-major b comes in boxes of 64 columns");
    const int first = rank * kShare;
    constexpr int kBoxes = B_MAJOR == 0 ? 1 : kShare / 64;
    for (int i = 0; i < kBoxes; ++i) {
        const ptx::uint32 target = b + first * kTileK * 2 + i * kBlock64;
        const int x = B_MAJOR == 0 ? depth : tile.column + first + 64 * i;
        const int y = B_MAJOR == 0 ? tile.column + first : depth;
        if constexpr (CLUSTER == 1) {
            ptx::tma_load(target, map_b, full, x, y);
        } else {
            ptx::tma_load_multicast(target, map_b, full, x, y, (1 << CLUSTER) - 1);
        }
    }
}

// The products of one stage: TILE_K deep, for the rows of one consumer.
__device__ __forceinline__ void multiply_stage(float (&d)[kProducts][TILE_N / 2], ptx::uint32 a, ptx::uint32 b, int keep) {
    // One step of 16 along k: 32 bytes within a row, or 16 rows of 128 bytes.
    constexpr int kStepA = (A_MAJOR == 0 ? 32 : 2048) / ptx::kDescriptorUnit;
    constexpr int kStepB = (B_MAJOR == 0 ? 32 : 2048) / ptx::kDescriptorUnit;
    const ptx::uint64 from_a = ptx::wgmma_descriptor(a, kBlock64, 1024);
    const ptx::uint64 from_b = ptx::wgmma_descriptor(b, kBlock64, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
            // 64 rows are 64 * 128 bytes in both layouts.
            ptx::wgmma<ELEMENT, TILE_N, A_MAJOR, B_MAJOR>(
                d[i], from_a + i * (kBlock64 / ptx::kDescriptorUnit) + step * kStepA, from_b + step * kStepB,
                step > 0 ? 1 : keep);
        }
    }
    ptx::wgmma_commit();
}

// Bias and activation on the accumulators of 64 rows, in place. `shift` is the tile's bias in shared memory.
__device__ __forceinline__ void finish(float (&d)[TILE_N / 2], const ELEMENT* shift, bool has_bias) {
    const int column = 2 * (threadIdx.x % 4);
    if (!has_bias && ACTIVATION == kNone) return;
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) {
        float2 pair = make_float2(0.0f, 0.0f);
        if (has_bias) pair = unpack_pair<ELEMENT>(*reinterpret_cast<const ptx::uint32*>(shift + column + 8 * j));
        d[4 * j] = activate(ACTIVATION, d[4 * j] + pair.x);
        d[4 * j + 1] = activate(ACTIVATION, d[4 * j + 1] + pair.y);
        d[4 * j + 2] = activate(ACTIVATION, d[4 * j + 2] + pair.x);
        d[4 * j + 3] = activate(ACTIVATION, d[4 * j + 3] + pair.y);
    }
}

// With a gate, silu(gate) * up takes the place of the first half of the accumulators of 64 rows.
__device__ __forceinline__ void join_gate(float (&d)[TILE_N / 2]) {
#pragma unroll
    for (int j = 0; j < TILE_N / 4; ++j) d[j] = activate(kSilu, d[j]) * d[j + TILE_N / 4];
}

// Writes columns of 64 rows, from the tile's column `From` on, with ordinary stores: in pairs if rows are aligned to them.
template <int From>
__device__ __forceinline__ void store_direct(const float (&d)[TILE_N / 2], ELEMENT* out, int row, int column,
                                             int end, const Problem& p) {
#pragma unroll
    for (int j = From / 2; j < kColumns / 2; j += 2) {
        const int y = row + (j & 2 ? 8 : 0);
        const int x = column + 8 * (j / 4);
        if (y >= end || x >= p.n) continue;
        ELEMENT* target = out + static_cast<long long>(y) * p.n + x;
        if (p.n % 2 == 0) {
            *reinterpret_cast<ptx::uint32*>(target) = pack_pair<ELEMENT>(d[j], d[j + 1]);
        } else {
            target[0] = from_float<ELEMENT>(d[j]);
            if (x + 1 < p.n) target[1] = from_float<ELEMENT>(d[j + 1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_hgemm(const __grid_constant__ ptx::TileMaps map_a, const __grid_constant__ ptx::TensorMap map_b,
               const __grid_constant__ ptx::TensorMap map_out, const ELEMENT* bias, ELEMENT* out, const Problem p,
               const int4* list) {
    extern __shared__ unsigned char memory[];
    // The swizzle pattern repeats every 1024 bytes of address.
    const ptx::uint32 base = (ptx::shared_address(memory) + 1023) & ~1023u;
    const ptx::uint32 ring_a = base;
    const ptx::uint32 ring_b = ring_a + STAGES * kBytesA;
    const ptx::uint32 staging = ring_b + STAGES * kBytesB;
    const ptx::uint32 full = staging + kConsumers * BUFFERS * kBlock64;
    const ptx::uint32 empty = full + 8 * STAGES;
    const ptx::uint32 shifts = empty + 8 * STAGES;  // the bias of the tile, once per consumer
    static_assert(1024 + STAGES * (kBytesA + kBytesB + 16) + kConsumers * (BUFFERS * kBlock64 + TILE_N * 2) ==
                      SHARED_BYTES,
                  "the host asks for other shared memory");

    const int rank = CLUSTER == 1 ? 0 : ptx::cluster_rank();
    const int warpgroup = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            ptx::mbarrier_init(full + 8 * i, 1);
            ptx::mbarrier_init(empty + 8 * i, kConsumers * CLUSTER);
        }
        ptx::mbarrier_fence_init();
    }
    if constexpr (CLUSTER == 1) {
        __syncthreads();
    } else {
        ptx::cluster_sync();
    }

    // The next kernel may start on multiprocessors that this one has left. This kernel must wait for what the previous one
    // writes.
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();

    const int clusters = gridDim.x / CLUSTER;
    const int entries = EXPERTS > 0 ? list[-1].x : 0;
    const int blocks_k = (p.k + kTileK - 1) / kTileK;
    Ring<STAGES> ring;
    if (warpgroup == 0) {
        ptx::setmaxnreg_decrease<kProducerRegisters>();
        if (threadIdx.x == 0) {
            for (int index = blockIdx.x / CLUSTER; index < tiles(p, entries); index += clusters) {
                const Tile tile = tile_at(index, rank, p, list);
                const int rows = rows_of<TILE_M>(tile.row, tile.end);  // the other block of a cluster may have none
                for (int block = 0; block < blocks_k; ++block, ring.advance()) {
                    ptx::mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
                    load_stage(ring_a + ring.stage * kBytesA, ring_b + ring.stage * kBytesB, full + 8 * ring.stage, &map_a,
                               &map_b, tile, rows, block * kTileK, rank, p.n);
                }
            }
        }
    } else {
        ptx::setmaxnreg_increase<kConsumerRegisters>();
        const int consumer = warpgroup - 1;
        const int thread = threadIdx.x % 128;
        const int lane = thread % 32;
        const int warp = thread / 32;
        const ptx::uint32 mine = staging + consumer * BUFFERS * kBlock64;
        // The address of this lane's row of stmatrix in a 64 by 64 buffer: 16-byte column c of row r is at c ^ (r % 8).
        const int staged_row = 16 * warp + lane % 16;
        ELEMENT* shift = reinterpret_cast<ELEMENT*>(memory + (shifts - ptx::shared_address(memory))) + consumer * TILE_N;
        int buffer = 0;
        auto release = [&](int stage) {
            if constexpr (CLUSTER == 1) {
                if (thread == 0) ptx::mbarrier_arrive(empty + 8 * stage);
            } else {
                if (thread < CLUSTER) ptx::mbarrier_arrive_at(empty + 8 * stage, thread);
            }
        };
        float d[kProducts][TILE_N / 2];
        for (int index = blockIdx.x / CLUSTER; index < tiles(p, entries); index += clusters) {
            const Tile tile = tile_at(index, rank, p, list);
            if (bias != nullptr) {
                // Loaded here, the bias arrives while the products run. The barrier: all threads are done with the last
                // tile's bias.
                ptx::named_barrier(1 + consumer, 128);
                for (int i = thread; i < TILE_N; i += 128) {
                    const int at = tile.column + i;
                    shift[i] = at < p.n ? bias[at] : from_float<ELEMENT>(0.0f);
                }
                ptx::named_barrier(1 + consumer, 128);
            }
            int before = 0;  // the stage whose products may still be in flight
            for (int block = 0; block < blocks_k; ++block, ring.advance()) {
                ptx::mbarrier_wait(full + 8 * ring.stage, ring.parity);
                multiply_stage(d, ring_a + ring.stage * kBytesA + consumer * kRows * kTileK * 2,
                               ring_b + ring.stage * kBytesB, block > 0);
                if (block > 0) {
                    ptx::wgmma_wait<1>();
                    release(before);
                }
                before = ring.stage;
            }
            ptx::wgmma_wait<0>();
            release(before);

#pragma unroll
            for (int i = 0; i < kProducts; ++i) {
                const int row = tile.row + consumer * kRows + 64 * i;
                const int mine_row = row + 16 * warp + lane / 4;
                const int mine_column = tile.column + 2 * (lane % 4);
                if constexpr (kGated) {
                    join_gate(d[i]);
                } else {
                    finish(d[i], shift, bias != nullptr);
                }
                // The copy engine would overwrite the rows of the next expert.
                if (p.direct || (EXPERTS > 0 && row + 64 > tile.end)) {
                    store_direct<0>(d[i], out, mine_row, mine_column, tile.end, p);
                    continue;
                }
#pragma unroll
                for (int chunk = 0; chunk < kStaged / 64; ++chunk) {
                    if (thread == 0) ptx::tma_store_wait_read<BUFFERS - 1>();
                    ptx::named_barrier(1 + consumer, 128);
                    const ptx::uint32 target = mine + buffer * kBlock64;
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float* pairs = &d[i][32 * chunk + 8 * j];
                        ptx::stmatrix_x4(target + staged_row * 128 + (((2 * j + lane / 16) ^ (staged_row & 7)) << 4),
                                         pack_pair<ELEMENT>(pairs[0], pairs[1]), pack_pair<ELEMENT>(pairs[2], pairs[3]),
                                         pack_pair<ELEMENT>(pairs[4], pairs[5]), pack_pair<ELEMENT>(pairs[6], pairs[7]));
                    }
                    ptx::fence_proxy_async();
                    ptx::named_barrier(1 + consumer, 128);
                    if (thread == 0) {
                        ptx::tma_store(&map_out, target, tile.column + 64 * chunk, row);
                        ptx::tma_store_commit();
                    }
                    if (BUFFERS == 2) buffer ^= 1;
                }
                store_direct<kStaged>(d[i], out, mine_row, mine_column, tile.end, p);
            }
        }
        // The staging buffers must outlive the stores that read them.
        if (thread == 0) ptx::tma_store_wait_read<0>();
    }
    // The other block may still arrive at this one's barriers.
    if constexpr (CLUSTER > 1) ptx::cluster_sync();
}

// Multi-head latent attention (MLA) in its absorbed form on Hopper: as mla/sm80_attention.cu, with wgmma.
//
// Shapes, layout and macros are those of mla/sm80_attention.cu; KEYS is 64, there are two stages, and SHARED_BYTES, all of
// a block's, takes the place of OTHER_BYTES.
//
// Grid: (blocks of a row, tiles of heads, rows), 256 threads. Dynamic shared memory: Memory.
//
// Algorithm. A chunk lies in shared memory as nine boxes of 64 features, each with the 128-byte swizzle, which wgmma
// reads in place: as rows of features for the products with queries, and transposed for those with weights. Two
// warpgroups share the former by features, the latter by features too. While one chunk is worked on, the next one is
// copied; a chunk's place is filled again as soon as its products with weights are done. Chunks of an FP8 cache come by way
// of registers: half of the next chunk is written as elements while the products with queries run, the other half while
// those with weights do, and the registers of each half are loaded again for the chunk after the next.
#include "common/tile.cuh"
#include "common/wgmma.cuh"
#include "mla/sums.cuh"

static_assert(KEYS == 64 && kThreads == 256, "a chunk has the rows of one wgmma, and two warpgroups share its features");
constexpr int kBox = 64;  // features
constexpr int kBoxes = kKeyDim / kBox;
constexpr int kSteps = kKeyDim / 16 / 2;  // of a warpgroup's products with queries
constexpr int kScoreRow = KEYS + 4;       // so long that fragments are written without bank conflicts
constexpr int kStages = 2;

struct alignas(1024) Memory {
    ELEMENT keys[kStages][kBoxes][KEYS * kBox];
    ELEMENT queries[kBoxes][HEADS * kBox];
    ELEMENT weights[HEADS * KEYS];
    float scores[2][HEADS * kScoreRow];  // of each warpgroup's features
    Factors factors[HEADS];
};
static_assert(sizeof(Memory) == SHARED_BYTES, "the host asks for another size of shared memory");

// Begin the products of a warpgroup's features: D (keys x heads) of a chunk's keys with the queries.
__device__ __forceinline__ void multiply_keys(float (&d)[HEADS / 2], const Memory& memory, int stage, int group) {
    const ptx::uint64 keys = ptx::wgmma_descriptor(ptx::shared_address(memory.keys[stage]), 0, 1024);
    const ptx::uint64 queries = ptx::wgmma_descriptor(ptx::shared_address(memory.queries), 0, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const int step = group * kSteps + i;
        const int box = step / 4, inside = step % 4 * 32;
        ptx::wgmma<ELEMENT, HEADS, 0, 0>(d, keys + (box * KEYS * kBox * 2 + inside) / ptx::kDescriptorUnit,
                                         queries + (box * HEADS * kBox * 2 + inside) / ptx::kDescriptorUnit, i > 0);
    }
    ptx::wgmma_commit();
}

// Begin to add the products of a chunk's values, features x keys, with its weights.
__device__ __forceinline__ void multiply_values(Sums& sums, const Memory& memory, int stage, int group) {
    const ptx::uint64 values = ptx::wgmma_descriptor(ptx::shared_address(memory.keys[stage][group * kDimTiles]), 0, 1024);
    const ptx::uint64 weights = ptx::wgmma_descriptor(ptx::shared_address(memory.weights), 0, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
            ptx::wgmma<ELEMENT, HEADS, 1, 0>(sums[d], values + (d * KEYS * kBox * 2 + step * 2048) / ptx::kDescriptorUnit,
                                             weights + step * 32 / ptx::kDescriptorUnit, 1);
        }
    }
    ptx::wgmma_commit();
}

// Weigh the keys of a chunk; a lane has two neighbouring ones, which count where they are `seen`.
__device__ __forceinline__ void weigh(Running& running, Memory& memory, const bool (&seen)[2], float scale,
                                      bool ends_unit) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float scores[kOwnHeads][kLaneKeys];
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i) {
        const int at = (warp + kWarps * i) * kScoreRow + 2 * lane;
        const float2 x = *reinterpret_cast<const float2*>(memory.scores[0] + at);
        const float2 y = *reinterpret_cast<const float2*>(memory.scores[1] + at);
        scores[i][0] = seen[0] ? (x.x + y.x) * scale : attention::minus_infinity();
        scores[i][1] = seen[1] ? (x.y + y.y) * scale : attention::minus_infinity();
    }
    running.weigh(scores, memory.factors, ends_unit);
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i) {
        const int head = warp + kWarps * i;
        ELEMENT* to = memory.weights + chunk_offset<KEYS>(head, lane / 4) + 2 * (lane % 4);
        *reinterpret_cast<unsigned int*>(to) = pack_pair<ELEMENT>(scores[i][0], scores[i][1]);
    }
}

// The previous kernel may write q, positions, block_table and latents: no __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_attention(const ELEMENT* q, const int* positions, const int* block_table, const Cache* latents,
                  float* part_values, float2* part_weights, long long block_table_stride, long long block_stride,
                  long long token_stride, int heads, int tile_heads, int shift, int stages, int chunks_per_unit,
                  int units_per_part, int parts_per_block, int parts, int inputs_ready, float scale) {
    extern __shared__ __align__(1024) unsigned char shared[];
    Memory& memory = *reinterpret_cast<Memory*>(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
    const long long row = blockIdx.z;
    const int first_head = blockIdx.y * tile_heads;
    const int head_count = min(tile_heads, heads - first_head);
    const int most = parts_per_block * units_per_part * chunks_per_unit;
    const int first_key = blockIdx.x * most * KEYS;
    ptx::griddepcontrol_launch_dependents();
    if (!inputs_ready) ptx::griddepcontrol_wait();
    const int position = positions[row];
    if (first_key > position) {
        if (inputs_ready) ptx::griddepcontrol_wait();  // so that dependents have waited for its predecessors too
        return;
    }
    const int chunks = min(most, (position - first_key) / KEYS + 1);
    const int* row_table = block_table + row * block_table_stride;

    // A warp copies kRows keys, all of one block of the cache: two times 32 pieces of each, then the last 8 of all.
    constexpr int kRows = KEYS / kWarps;
    const int mask = (1 << shift) - 1;
    long long ahead = 0;  // the block of the next chunk's keys; LISTED: the slot of the lane's key, of kRows
    const auto look_ahead = [&](int chunk) {
        const int key = first_key + chunk * KEYS + warp * kRows + (LISTED ? lane % kRows : 0);
        if (key <= position) ahead = row_table[LISTED ? key : key >> shift];
    };
    // Where the cache has those keys, which look_ahead was called for: of the first one; LISTED: of the lane's key.
    const auto offset_ahead = [&](int first) {
        return LISTED ? (ahead >> shift) * block_stride + (ahead & mask) * token_stride
                      : ahead * block_stride + (first & mask) * token_stride;
    };
    // From that, the warp's key `i`, which may be the lane's own number. All lanes call it.
    const auto key_at = [&](long long offset, int i) {
        return latents + (LISTED ? __shfl_sync(kAll, offset, i) : offset + i * token_stride);
    };
    // Where piece `piece` of the warp's key `i` goes.
    const auto place = [&](int stage, int i, int piece) {
        return ptx::shared_address(memory.keys[stage][piece / 8]) +
               2 * chunk_offset<kBox>(warp * kRows + i, piece % 8);
    };
    // Keys from `end` on are zeros, whatever the memory holds; but that at the position is left out then.
    const auto begin_chunk = [&](int chunk, int stage, int end) {
        if (chunk < chunks) {
            const int first = first_key + chunk * KEYS + warp * kRows;
            const long long offset = offset_ahead(first);
            look_ahead(chunk + 1);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const int valid = first + i < end ? 16 : 0;
                const Cache* key = key_at(offset, i);
                if (valid == 0 && first + i == position) continue;
                const Cache* piece = valid == 0 ? latents : key;
                ptx::cp_async_16(place(stage, i, lane), piece + lane * kChunk, valid);
                ptx::cp_async_16(place(stage, i, lane + 32), piece + (lane + 32) * kChunk, valid);
            }
#pragma unroll
            for (int j = 0; j < kRows / 4; ++j) {
                const int i = 4 * j + lane / 8;
                const int valid = first + i < end ? 16 : 0;
                const Cache* key = key_at(offset, i);
                if (valid == 0 && first + i == position) continue;
                const Cache* piece = valid == 0 ? latents : key;
                ptx::cp_async_16(place(stage, i, 64 + lane % 8), piece + (64 + lane % 8) * kChunk, valid);
            }
        }
        ptx::cp_async_commit();
    };
    // Of an FP8 cache: half `half` of the warp's keys of a chunk, on its way.
    CodedTokens<kRows / 2> coming[2];
    const auto load = [&](int chunk, int half) {
        if (chunk < chunks) {
            const int first = first_key + chunk * KEYS + warp * kRows + half * (kRows / 2);
            const long long offset = offset_ahead(first - half * (kRows / 2));
            const auto begin_of = [&](int i) {
                return reinterpret_cast<const unsigned char*>(key_at(offset, half * (kRows / 2) + i));
            };
            coming[half].load(begin_of, position + 1 - first);
            if (half == 1) look_ahead(chunk + 1);
        }
    };
    const auto store = [&](int chunk, int half) {
        if (chunk < chunks) {
            coming[half].store(kRows / 2, [&](int token, int piece) {
                const int inside = warp * kRows + half * (kRows / 2) + token;
                ELEMENT* box = memory.keys[chunk % kStages][piece / 8];
                return reinterpret_cast<uint4*>(box + chunk_offset<kBox>(inside, piece % 8));
            });
        }
    };
    look_ahead(0);
    if constexpr (kCoded) {
        load(0, 0);
        load(0, 1);
        if (inputs_ready) {
            ptx::griddepcontrol_wait();
            const int own_first = first_key + warp * kRows;
            if (own_first <= position && position < own_first + kRows) {  // the previous kernel's output: load it again
                look_ahead(0);
                load(0, 0);
                load(0, 1);
            }
        }
        store(0, 0);
        load(1, 0);
        store(0, 1);
        load(1, 1);
    } else {
        // The key at the position is an output of the previous kernel. If its chunk is one of the first, it comes by itself.
        const int late = inputs_ready && first_key + kStages * KEYS > position ? position : -1;
#pragma unroll
        for (int chunk = 0; chunk < kStages; ++chunk) begin_chunk(chunk, chunk, late < 0 ? position + 1 : position);
        if (inputs_ready) ptx::griddepcontrol_wait();
        if (late >= 0 && threadIdx.x < kKeyDim / kChunk) {
            const Cache* from = latents + row_table[late >> shift] * block_stride + (late & mask) * token_stride;
            const int inside = (late - first_key) % KEYS, piece = threadIdx.x;
            ELEMENT* to = memory.keys[(late - first_key) / KEYS][piece / 8] + chunk_offset<kBox>(inside, piece % 8);
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + piece * kChunk);
        }
    }
    const ELEMENT* own = q + (row * heads + first_head) * kKeyDim;
    for (int at = threadIdx.x; at < HEADS * kKeyDim / kChunk; at += kThreads) {
        const int head = at / (kKeyDim / kChunk), piece = at % (kKeyDim / kChunk);
        uint4 x = {};
        if (head < head_count) x = *reinterpret_cast<const uint4*>(own + head * kKeyDim + piece * kChunk);
        *reinterpret_cast<uint4*>(memory.queries[piece / 8] + chunk_offset<kBox>(head, piece % 8)) = x;
    }
    Running running;
    running.clear();
    Sums unit = {}, group_sums = {};
    Progress progress(chunks_per_unit, units_per_part);
    long long part = (row * heads + first_head) * parts + blockIdx.x * parts_per_block;  // of the first head
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int stage = chunk % kStages;
        const bool last = chunk + 1 == chunks;
        if constexpr (!kCoded) ptx::cp_async_wait<kStages - 1>();
        ptx::fence_proxy_async();
        __syncthreads();
        float products[HEADS / 2] = {};
        multiply_keys(products, memory, stage, group);
        if constexpr (kCoded) {
            store(chunk + 1, 0);
            load(chunk + 2, 0);
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_arrived(products);
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                memory.scores[group][fragment_head(n, i) * kScoreRow + warp % 4 * 16 + fragment_dim(i)] =
                    products[4 * n + i];
            }
        }
        __syncthreads();
        bool seen[kLaneKeys];
#pragma unroll
        for (int k = 0; k < kLaneKeys; ++k) {
            const int key = first_key + chunk * KEYS + kLaneKeys * lane + k;
            seen[k] = key <= position;
        }
        const bool ends = progress.ends_unit(last);
        weigh(running, memory, seen, scale, ends);
        ptx::fence_proxy_async();
        __syncthreads();
        keep_unit(unit, memory.factors);
        multiply_values(unit, memory, stage, group);
        if constexpr (kCoded) {
            store(chunk + 1, 1);
            load(chunk + 2, 1);
        }
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) ptx::wgmma_arrived(unit[d]);
        if (!kCoded && !last) {
            __syncthreads();
            begin_chunk(chunk + kStages, stage, position + 1);
        }
        if (ends) {
            finish_unit(group_sums, unit, memory.factors);
            if (progress.ends_part(last)) {
                store_part(group_sums, running, part_values + part * kRank, part_weights + part, parts, head_count,
                           64 * group * kDimTiles + warp % 4 * 16, 64);
                ++part;
            }
        }
    }
}

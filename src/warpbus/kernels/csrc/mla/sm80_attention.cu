// Multi-head latent attention (MLA) in its absorbed form: one query per head and row over the cache of latents.
//
// Computes, for each row, softmax(q k^T * scale) v over the keys 0 to position, where a token's key is its latent with
// its rotary key, its value the latent, and all heads share both. The result is left in parts, which mla/outputs.cu adds
// up. Weights and sums are float32.
//
// Shapes and layout
//   q            [rows, heads, kKeyDim] ELEMENT, contiguous
//   positions    int [rows]
//   block_table  int [rows, n], the last stride 1: key p of a row is in block block_table[row, p >> shift] of the cache; LISTED:
//                in slot block_table[row, p], block << shift | token in the block
//   latents      [blocks, 1 << shift, a token], see mla/latents.cuh; strides of blocks and tokens in ELEMENT or, in FP8, in
//                bytes, multiples of 16 bytes; all begins at multiples of 16 bytes; shift is at least 4
//   part_values, part_weights  float [rows, heads, parts, kRank], float2 [rows, heads, parts]: see attention/combine.cuh.
//                Only parts with keys up to the position are written.
//   chunks_per_unit   chunks of KEYS keys make a unit, units_per_part (1 or those of a group) units a part, parts_per_block parts
//                are the work of a block; how many there are in all depends on `limit`, which all positions are below
//   inputs_ready nothing but q and the keys at the positions is an output of kernels that may still run
//   scale        log2(e) times that of the scores
//
// Macros
//   ELEMENT  __half or __nv_bfloat16
//   CODE     the CacheCode of the cache: kElement or kFp8
//   HEADS    8, 16, 24 or 32: heads of a tile, rounded up
//   LISTED   0; or 1 where each key has a slot of its own: those that an indexer has selected. inputs_ready is 0 then
//   KEYS     32, or 16 where shared memory is small: keys of a chunk
//   OTHER_BYTES  of shared memory, as the host asks for it: of all that is no stage
//
// Grid: (blocks of a row, tiles of heads, rows), 256 threads. Dynamic shared memory: Memory and `stages` chunks: 3 to
// 5, of FP8 2.
//
// Algorithm. The keys of a chunk are the rows of a matrix product and the heads its columns, so that a tile of 20
// heads takes 24 columns and a key is read once for all of them. Chunks come by cp.async in `stages` stages. Warps share
// the products with queries by keys and by features; then each warp weighs the keys for some heads; then warps share the
// products with values by features. The last and the first step are one for two chunks, so that a chunk takes two
// barriers. Exponents are integers and additions form one tree: units one after another to groups, groups one after
// another to a row. Where a part is a group, its block adds up the units; otherwise mla/outputs.cu does. So the result
// does not depend on what a block has, and that of a row not on the batch around it. Chunks of an FP8 cache come by way of
// registers: a chunk is written as elements while the keys of the one before it are weighed, and the registers are loaded
// again for the next one.
#include "common/ptx.cuh"
#include "mla/sums.cuh"

constexpr int kChunk = 8;  // elements of 16 bytes
constexpr int kKeyTiles = KEYS / 16;
constexpr int kSplits = kWarps / kKeyTiles;  // of the features, among warps with the same keys
constexpr int kSteps = kKeyDim / 16;
constexpr int kSplitSteps = (kSteps + kSplits - 1) / kSplits;
constexpr int kHeadPairs = (kHeadTiles + 1) / 2;
constexpr int kPieces = kKeyDim / kChunk;       // of 16 bytes, of a key
static_assert(kPieces == 2 * 32 + 8, "begin_chunk copies keys of 72 pieces");
// Rows in shared memory, so long that fragments are read and written without bank conflicts. In the order of tile.cuh
// each ldmatrix would compute its address; here it is a constant away from the first.
constexpr int kRow = kKeyDim + kChunk;
constexpr int kScoreRow = KEYS + 4;
constexpr int kWeightRow = KEYS + kChunk;

struct Memory {
    ELEMENT queries[HEADS * kRow];
    ELEMENT weights[HEADS * kWeightRow];
    float scores[kSplits][HEADS * kScoreRow];  // of each part of the features
    Factors factors[HEADS];
};
static_assert(sizeof(Memory) == OTHER_BYTES, "the host asks for other room beside the stages");
constexpr int kStage = KEYS * kRow;

// What a lane gives to load a 16 x 16 block of a matrix with rows of `Row` elements as A or transposed A, and as B.
template <int Row>
__device__ __forceinline__ const ELEMENT* below_place(const ELEMENT* matrix) {
    const int lane = threadIdx.x % 32;
    return matrix + lane % 16 * Row + lane / 16 * kChunk;
}
template <int Row>
__device__ __forceinline__ const ELEMENT* right_place(const ELEMENT* matrix) {
    const int lane = threadIdx.x % 32;
    return matrix + (lane % 8 + lane / 16 * 8) * Row + lane / 8 % 2 * kChunk;
}

// B fragments of the heads 16 * pair to 16 * pair + 15, of which the last 8 may not be there, from `columns` on.
template <int Row>
__device__ __forceinline__ void load_heads(ptx::uint32 (&b)[4], const ELEMENT* columns, int pair) {
    const bool half = 2 * pair + 1 == kHeadTiles;  // then the first 8 are loaded twice
    const int back = half && threadIdx.x % 32 >= 16 ? 8 * Row : 0;
    ptx::ldmatrix_x4(b, ptx::shared_address(columns + 16 * pair * Row - back));
}

// Products of a chunk's keys with the queries, of this warp's keys and features, into `scores`.
__device__ __forceinline__ void multiply_keys(Memory& memory, const ELEMENT* keys) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tile = warp % kKeyTiles, split = warp / kKeyTiles;
    float sums[2][kHeadTiles][4] = {};  // of even and odd steps: a product waits for the one before it in its sums
    const ELEMENT* rows = below_place<kRow>(keys + 16 * tile * kRow + 16 * split * kSplitSteps);
    const ELEMENT* queries = right_place<kRow>(memory.queries + 16 * split * kSplitSteps);
    constexpr bool kEven = kSplitSteps * kSplits == kSteps;
    const int steps = min(kSplitSteps, kSteps - split * kSplitSteps);
    // A step's fragments are asked for before the products of the step ahead of it.
    ptx::uint32 a[2][4], b[2][kHeadPairs][4];
    const auto load = [&](int i) {
        ptx::ldmatrix_x4(a[i % 2], ptx::shared_address(rows + 16 * i));
#pragma unroll
        for (int pair = 0; pair < kHeadPairs; ++pair) load_heads<kRow>(b[i % 2][pair], queries + 16 * i, pair);
    };
    load(0);
#pragma unroll
    for (int i = 0; i < kSplitSteps; ++i) {
        if (i + 1 < kSplitSteps && (kEven || i + 1 < steps)) load(i + 1);
        if (!kEven && i >= steps) continue;
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n) {
            const ptx::uint32(&of_pair)[4] = b[i % 2][n / 2];
            ptx::mma_m16n8k16<ELEMENT>(sums[i % 2][n], a[i % 2], of_pair[n % 2 * 2], of_pair[n % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int head = 8 * n + 2 * (lane % 4) + i % 2;
            const int key = 16 * tile + lane / 4 + i / 2 * 8;
            memory.scores[split][head * kScoreRow + key] = sums[0][n][i] + sums[1][n][i];
        }
    }
}

// Weigh the keys of a chunk; a lane has one key, which counts where it is `seen`.
__device__ __forceinline__ void weigh(Running& running, Memory& memory, bool seen, float scale, bool ends_unit) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float scores[kOwnHeads][1];
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i) {
        const int at = (warp + kWarps * i) * kScoreRow + lane % KEYS;
        float sum = 0.0f;
#pragma unroll
        for (int split = 0; split < kSplits; ++split) sum += memory.scores[split][at];
        scores[i][0] = seen ? sum * scale : attention::minus_infinity();
    }
    running.weigh(scores, memory.factors, ends_unit);
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i) {
        if (lane < KEYS) memory.weights[(warp + kWarps * i) * kWeightRow + lane] = from_float<ELEMENT>(scores[i][0]);
    }
}

// Add the products of a chunk's weights with this warp's features of its values to the unit's sums.
__device__ __forceinline__ void multiply_values(Sums& sums, const Memory& memory, const ELEMENT* values) {
    const int warp = threadIdx.x / 32;
    const ELEMENT* rows = right_place<kRow>(values + 16 * warp * kDimTiles);
    const ELEMENT* weights = right_place<kWeightRow>(memory.weights);
    ptx::uint32 a[2][4], b[2][kHeadPairs][4];
    const auto load = [&](int i) {  // block i of the chunk: kDimTiles for each 16 keys
        const int step = i / kDimTiles, d = i % kDimTiles;
        if (d == 0) {
#pragma unroll
            for (int pair = 0; pair < kHeadPairs; ++pair) {
                load_heads<kWeightRow>(b[step % 2][pair], weights + 16 * step, pair);
            }
        }
        ptx::ldmatrix_x4_trans(a[i % 2], ptx::shared_address(rows + 16 * step * kRow + 16 * d));
    };
    load(0);
#pragma unroll
    for (int i = 0; i < KEYS / 16 * kDimTiles; ++i) {
        if (i + 1 < KEYS / 16 * kDimTiles) load(i + 1);
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n) {
            const ptx::uint32(&of_pair)[4] = b[i / kDimTiles % 2][n / 2];
            float(&sum)[4] = reinterpret_cast<float(&)[4]>(sums[i % kDimTiles][4 * n]);
            ptx::mma_m16n8k16<ELEMENT>(sum, a[i % 2], of_pair[n % 2 * 2], of_pair[n % 2 * 2 + 1]);
        }
    }
}

// The previous kernel may write q, positions, block_table and latents: no __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_attention(const ELEMENT* q, const int* positions, const int* block_table, const Cache* latents,
                  float* part_values, float2* part_weights, long long block_table_stride, long long block_stride,
                  long long token_stride, int heads, int tile_heads, int shift, int stages, int chunks_per_unit,
                  int units_per_part, int parts_per_block, int parts, int inputs_ready, float scale) {
    extern __shared__ __align__(128) unsigned char shared[];
    Memory& memory = *reinterpret_cast<Memory*>(shared);
    ELEMENT* stage0 = reinterpret_cast<ELEMENT*>(shared + sizeof(Memory));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long row = blockIdx.z;
    const int first_head = blockIdx.y * tile_heads;
    const int head_count = min(tile_heads, heads - first_head);
    const int first_key = blockIdx.x * parts_per_block * units_per_part * chunks_per_unit * KEYS;
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    if (!inputs_ready) ptx::griddepcontrol_wait();
#else
    inputs_ready = 0;  // no kernel begins before the previous one has ended
#endif
    const int position = positions[row];
    if (first_key > position) {
        if (inputs_ready) ptx::griddepcontrol_wait();  // so that dependents have waited for its predecessors too
        return;
    }
    const int most = parts_per_block * units_per_part * chunks_per_unit;
    const int chunks = min(most, (position - first_key) / KEYS + 1);
    const int* row_table = block_table + row * block_table_stride;

    // A warp copies kRows keys, all of one block of the cache: two times 32 pieces of each, then the last pieces of all.
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
    const auto begin_chunk = [&](int chunk, int index, int last) {
        if (chunk < chunks) {
            const int first = first_key + chunk * KEYS + warp * kRows;
            const long long offset = offset_ahead(first);
            const ptx::uint32 to = ptx::shared_address(stage0 + index * kStage + warp * kRows * kRow + lane * kChunk);
            look_ahead(chunk + 1);
            if (first + kRows <= last) {
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
                    const Cache* piece = key_at(offset, i) + lane * kChunk;
                    ptx::cp_async_16(to + 2 * i * kRow, piece);
                    ptx::cp_async_16(to + 2 * (i * kRow + 32 * kChunk), piece + 32 * kChunk);
                }
            } else {
#pragma unroll 1
                for (int i = 0; i < kRows; ++i) {  // zeros past the position, whatever the memory holds
                    const int valid = first + i < last ? 16 : 0;
                    if (first + i == position && valid == 0) continue;
                    const Cache* key = key_at(offset, i) + lane * kChunk;
                    const Cache* piece = valid == 0 ? latents : key;
                    ptx::cp_async_16(to + 2 * i * kRow, piece, valid);
                    ptx::cp_async_16(to + 2 * (i * kRow + 32 * kChunk), valid == 0 ? piece : piece + 32 * kChunk, valid);
                }
            }
            const int row = lane / 8;
            const Cache* key = key_at(offset, row);
            if (row < kRows && (first + row != position || position < last)) {
                const int valid = first + row < last ? 16 : 0, skip = 64 - 8 * row;  // pieces; `to` is at piece `lane`
                const Cache* piece = valid == 0 ? latents : key + (lane + skip) * kChunk;
                ptx::cp_async_16(to + 2 * (row * kRow + skip * kChunk), piece, valid);
            }
        }
        ptx::cp_async_commit();
    };
    // Of an FP8 cache: the warp's keys of a chunk, on their way.
    CodedTokens<kRows> coming;
    const auto load = [&](int chunk) {
        if (chunk < chunks) {
            const int first = first_key + chunk * KEYS + warp * kRows;
            const long long offset = offset_ahead(first);
            coming.load([&](int i) { return reinterpret_cast<const unsigned char*>(key_at(offset, i)); },
                        position + 1 - first);
            look_ahead(chunk + 1);
        }
    };
    const auto store = [&](int chunk, int index) {
        if (chunk < chunks) {
            ELEMENT* to = stage0 + index * kStage + warp * kRows * kRow;
            coming.store(kRows, [&](int token, int piece) {
                return reinterpret_cast<uint4*>(to + token * kRow + piece * kChunk);
            });
        }
    };
    look_ahead(0);
    if constexpr (kCoded) {
        load(0);
        if (inputs_ready) {
            ptx::griddepcontrol_wait();
            const int own_first = first_key + warp * kRows;
            if (own_first <= position && position < own_first + kRows) {  // the previous kernel's output: load it again
                look_ahead(0);
                load(0);
            }
        }
        store(0, 0);
        load(1);
    } else {
        // The key at the position is an output of the previous kernel. If its chunk is one of the first, it comes by itself.
        const int late = inputs_ready && first_key + (stages - 1) * KEYS > position ? position : -1;
        for (int chunk = 0; chunk < stages - 1; ++chunk) begin_chunk(chunk, chunk, late < 0 ? position + 1 : position);
        if (inputs_ready) ptx::griddepcontrol_wait();
        if (late >= first_key && threadIdx.x < kPieces) {
            const Cache* from = latents + row_table[late >> shift] * block_stride + (late & mask) * token_stride;
            *reinterpret_cast<uint4*>(stage0 + (late - first_key) * kRow + threadIdx.x * kChunk) =
                *reinterpret_cast<const uint4*>(from + threadIdx.x * kChunk);
        }
    }

    const ELEMENT* own = q + (row * heads + first_head) * kKeyDim;
    for (int at = threadIdx.x; at < HEADS * kPieces; at += kThreads) {
        const int head = at / kPieces, piece = at % kPieces;
        uint4 x = {};
        if (head < head_count) x = *reinterpret_cast<const uint4*>(own + head * kKeyDim + piece * kChunk);
        *reinterpret_cast<uint4*>(memory.queries + head * kRow + piece * kChunk) = x;
    }
    const auto seen = [&](int chunk) { return lane < KEYS && first_key + chunk * KEYS + lane <= position; };
    Running running;
    running.clear();
    Sums unit = {}, group = {};
    Progress progress(chunks_per_unit, units_per_part);
    long long part = (row * heads + first_head) * parts + blockIdx.x * parts_per_block;  // of the first head

    // Of two stages, the one that is not read gets chunk `chunk`; of more, the next ones are on their way.
    const auto prepare = [&](int chunk, int index) {
        if constexpr (kCoded) {
            store(chunk, index);
            load(chunk + 1);
        } else {
            ptx::cp_async_wait(stages - 3);
        }
    };
    if constexpr (!kCoded) ptx::cp_async_wait(stages - 2);
    __syncthreads();
    multiply_keys(memory, stage0);
    __syncthreads();
    bool ends = progress.ends_unit(chunks == 1);
    weigh(running, memory, seen(0), scale, ends);
    prepare(1, 1);
    __syncthreads();
    int index = 0;  // of the chunk's stage
    // Here the chunk's weights and the next one's keys are there, and the stage of the one before is free.
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int next = index + 1 == stages ? 0 : index + 1;
        const bool last = chunk + 1 == chunks;
        if constexpr (!kCoded) begin_chunk(chunk + stages - 1, index == 0 ? stages - 1 : index - 1, position + 1);
        keep_unit(unit, memory.factors);
        multiply_values(unit, memory, stage0 + index * kStage);
        if (ends) {
            finish_unit(group, unit, memory.factors);
            if (progress.ends_part(last)) {
                store_part(group, running, part_values + part * kRank, part_weights + part, parts, head_count,
                           16 * warp * kDimTiles, 16);
                ++part;
            }
        }
        if (last) break;
        multiply_keys(memory, stage0 + next * kStage);
        __syncthreads();
        ends = progress.ends_unit(chunk + 2 == chunks);
        weigh(running, memory, seen(chunk + 1), scale, ends);
        prepare(chunk + 2, index);
        index = next;
        __syncthreads();
    }
}

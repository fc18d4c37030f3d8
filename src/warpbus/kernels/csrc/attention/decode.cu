// Decode attention: one new token per row, grouped queries (GQA), paged keys and values. One launch takes the projections to
// the heads' outputs.
//
// Computes for each row: RoPE of q and k; stores k and v into the cache at the row's position, unless STORED; then softmax(q
// k^T / sqrt(head_dim)) v over the keys 0 to position, in float32.
//
// Shapes and layout
//   qkv        [batch, (kv_heads * group + 2 kv_heads) * head_dim] ELEMENT, contiguous: all queries, keys, values
//   table      float [positions, rotary]: rotary / 2 cosines per position, then as many sines
//   positions  int [batch]
//   block_table  int [batch, n], last stride 1: key p of a row is in block block_table[row, p >> shift] of the cache, at p
//              modulo the block size; n blocks hold `limit` keys; entries beyond the row's position are not used
//   keys, values  [blocks, kv_heads, 1 << shift, head_dim]: ELEMENT, or codes of 8 or, two per byte, 4 bits; the last stride is 1, strides of blocks
//              and tokens are in units of 16 bytes, that of heads in elements; shift is at least 4
//   key_scales, value_scales  float [blocks, kv_heads, 1 << shift], last stride 1, for codes: the largest magnitude of a
//              head's vector / 127 (int8), / 448 (e4m3) or / 8 (int4)
//   out        [batch, kv_heads * group, head_dim] ELEMENT, contiguous; for int4 in the basis of the cached vectors
//   part_values, part_weights  scratch for `parts` parts of each row and KV head, see combine.cuh; unused if parts is 1
//   counters   int [batch * gridDim.y], zero before and after the kernel
//   head_dim is a multiple of 16, for int4 of 32, up to HEAD_DIM, rotary is even and at most head_dim.
//   The first `rotary` dimensions rotate: as pairs (2i, 2i+1) if `interleaved`, else (i, i + rotary / 2).
//   stages     2 to 4
//   chunks_per_unit, units_per_group   how the keys are divided, a function of `limit` alone: at most 64 units, 16 groups; a
//              group has up to 4 units, a quarter 4 groups
//   units_per_part   1 (then parts_per_block is 1), the units of a group, or those of a quarter
//   parts_per_block, parts   `parts` per row and tile; the first block has the first `parts_per_block` ones
//   combiners  blocks that reduce the parts of a row
//   limit      upper bound of all positions
//   late       the next kernel may start when this kernel's last copies have been issued; 0: at once
//   inputs_ready    only qkv is written by kernels that may still run: everything else is loaded before they have ended
//   scale      log2(e) / sqrt(head_dim)
//
// Macros
//   ELEMENT     __half or __nv_bfloat16
//   HEAD_DIM    64, 128 or 256: the row length in shared memory
//   CODE        CacheCode: whether the cache holds ELEMENT or codes, and which
//   STORED      1: the new keys and values are in the cache already, as int4 needs; 0: the kernel stores them
//   STAGE_BYTES, OTHER_BYTES  shared memory that the host requests: per stage; for everything else
//
// Grid: (blocks for `parts`, kv_heads * tiles, batch); a tile has up to 16 of the queries of a KV head. 128 threads. Dynamic
// shared memory: Memory in block.cuh; `shared_bytes` in ops/attention.py.
//
// Algorithm. The queries of a KV head are the rows of a matrix product, so that a key or value is read once for all queries
// of a tile. Keys are processed in chunks of kKeys, loaded by cp.async in `stages` stages. In a chunk, each of four warps
// multiplies the queries with a quarter of the keys and writes the softmax weights to shared memory, relative to its own
// maximum. After a barrier each warp rescales them to a common exponent and multiplies them with a quarter of the values'
// dimensions. `chunks_per_unit` chunks form a unit, whose sum stays in the tensor cores' accumulators; units are added up to
// groups and groups to quarters of a row in float32, up to the size of a part. A block leaves each part in global memory, and
// the last blocks of a row reduce its parts. Weights are relative to an integer exponent and additions form one tree
// (combine.cuh), so the result depends neither on how parts are assigned to blocks nor on the rest of the batch. The block
// that has the position of the new token rotates the key, stores key and value into the cache and inserts them into its own
// stages. If there are several tiles of queries, each has such a block, and these blocks store the same values.
#include "attention/combine.cuh"
#include "attention/load.cuh"
#include "attention/products.cuh"

// The final output of a row and tile that has one part.
__device__ __forceinline__ void store_output(ELEMENT* out, const Running& all, int queries, int head_dim,
                                             const Place& place) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float inverse = 1.0f / all.weight[r];
#pragma unroll
        for (int i = 0; i < kOutTiles; ++i) {
            const int dim = output_dim(place, i / 2, i % 2);
            const float2 x = output_pair(all.values, i / 2, i % 2, r);
            if (place.row(r) < queries && dim < head_dim) {
                *reinterpret_cast<unsigned int*>(out + place.row(r) * head_dim + dim) =
                    pack_pair<ELEMENT>(x.x * inverse, x.y * inverse);
            }
        }
    }
}

__device__ __forceinline__ void store_part(const attention::Parts& parts, int part, const Running& all,
                                           const Place& place) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (place.row(r) >= parts.queries) continue;
        const int index = parts.index(part, place.row(r));
#pragma unroll
        for (int i = 0; i < kOutTiles; ++i) {
            const int dim = output_dim(place, i / 2, i % 2);
            if (dim < parts.head_dim) {
                *reinterpret_cast<float2*>(parts.values + index * parts.head_dim + dim) =
                    output_pair(all.values, i / 2, i % 2, r);
            }
        }
        if (place.quarter == 0 && place.t == 0) parts.weights[index] = make_float2(all.exponent[r], all.weight[r]);
    }
}

// The previous kernel may write qkv, table and positions: no __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    decode_attention(const ELEMENT* qkv, const float* table, const int* positions,
                     const int* block_table, Cache* keys, Cache* values, float* key_scales, float* value_scales,
                     ELEMENT* __restrict__ out, float* part_values, float2* part_weights, int* counters,
                     long long block_table_stride,
                     long long key_head_stride, long long value_head_stride, long long key_scale_block_stride,
                     long long key_scale_head_stride, long long value_scale_block_stride,
                     long long value_scale_head_stride, unsigned int key_block_stride, unsigned int key_token_stride,
                     unsigned int value_block_stride, unsigned int value_token_stride, int shift, int group,
                     int head_dim, int rotary, int interleaved, int stages, int chunks_per_unit, int units_per_group,
                     int units_per_part, int parts_per_block, int parts, int combiners, int limit, int late,
                     int inputs_ready, float scale) {
    extern __shared__ __align__(128) unsigned char memory[];
    const int tiles = (group + kTile - 1) / kTile;
    const int kv_heads = gridDim.y / tiles;
    const int kv_head = blockIdx.y / tiles;
    const int first_query = blockIdx.y % tiles * kTile;
    const int query_count = min(kTile, group - first_query);
    const long long row = blockIdx.z;
    const int warp = threadIdx.x / 32;
    const Place place;
    const Memory at(memory);
    const int part_keys = units_per_part * chunks_per_unit * kKeys;
    const int block_keys = parts_per_block * part_keys;
    const int first_key = blockIdx.x * block_keys;
    const int* row_table = block_table + row * block_table_stride;
    const Source key_source = {keys + kv_head * key_head_stride, key_block_stride, key_token_stride,
                               key_scales + kv_head * key_scale_head_stride, key_scale_block_stride};
    const Source value_source = {values + kv_head * value_head_stride, value_block_stride, value_token_stride,
                                 value_scales + kv_head * value_scale_head_stride, value_scale_block_stride};
#if __CUDA_ARCH__ >= 900
    if (!late) ptx::griddepcontrol_launch_dependents();
    // The previous kernel may have written the cache, so nothing is used before the wait. But L2 may prefetch from where
    // position and table point now: they always name blocks of the cache, if perhaps not yet the right ones.
    if (!inputs_ready && warp < 2) {
        const int ahead = min(min(stages * kKeys, block_keys), limit - first_key);
        const int last = __ldcg(positions + row);
        if (warp == 0) prefetch(key_source, row_table, shift, first_key, ahead, limit, last, head_dim);
        if (warp == 1) prefetch(value_source, row_table, shift, first_key, ahead, limit, last, head_dim);
    }
    if (!inputs_ready) ptx::griddepcontrol_wait();
#else
    inputs_ready = 0;  // no kernel begins before the previous one has ended
#endif
    const ELEMENT* projected = qkv + row * kv_heads * (group + 2) * head_dim;
    const int position = positions[row];  // everything waits for the position, except what follows
    Blocks row_blocks(row_table, shift, limit, first_key);
    const bool is_key = warp % 2 == 0;
    Queries queries(head_dim, rotary, interleaved);
    NewToken token;
    const auto begin_projected = [&] {
        queries.begin(projected + (kv_head * group + first_query) * head_dim, query_count, head_dim);
        token.begin(projected + (kv_heads * (group + warp % 2) + kv_head) * head_dim, head_dim, is_key ? rotary : 0,
                    interleaved);
    };
    if (!inputs_ready) begin_projected();
    const Range range = {first_key, min(first_key + block_keys, position + 1), kStored ? -1 : position};
    if (range.begin >= range.end) {
        if (inputs_ready) ptx::griddepcontrol_wait();  // so that dependents have waited for its predecessors too
        return;
    }

    const float* row_angles = table + static_cast<long long>(position) * rotary;
    const attention::Angles angles(row_angles, queries.pair, rotary);
    const int new_block = row_blocks.of_key(position);
    const long long head = (row * kv_heads + kv_head) * group + first_query;  // the tile's first head in `out`
    const int blocks = position / block_keys + 1;                             // cache blocks that hold keys of this row
    const int count = position / part_keys + 1;                               // parts of this row
    const int chunks = (range.end - range.begin + kKeys - 1) / kKeys;
    // The values of a chunk and the keys of the next chunk, with its scales, are one group of copies. Beyond the last chunk a
    // group is empty.
    const auto begin_keys = [&](int chunk, int index) {
        if (chunk >= chunks) return;
        row_blocks.turn_to(chunk);
        fetch(at.stage(index).keys, key_source, row_blocks, chunk, range, head_dim);
        if constexpr (kCoded) {
            fetch_scales(at.stage(index).scales(), key_source, value_source, row_blocks, chunk, range);
        }
    };
    const auto begin_values = [&](int chunk, int index) {
        if (chunk >= chunks) return;
        fetch(at.stage(index).values, value_source, row_blocks, chunk, range, head_dim);
    };
    begin_keys(0, 0);
    ptx::cp_async_commit();
    for (int chunk = 0; chunk < stages - 1; ++chunk) {
        begin_values(chunk, chunk);
        begin_keys(chunk + 1, chunk + 1);
        ptx::cp_async_commit();
    }

    if (inputs_ready) {
        ptx::griddepcontrol_wait();
        begin_projected();
    }
    queries.store(at.tile, angles, query_count, head_dim);
    if constexpr (kPacked) {
        __syncthreads();
        rotate_queries(at.tile, head_dim);
    }
    const bool has_new = !kStored && range.end == position + 1;
    if (has_new && warp < 2) {
        const int inside = row_blocks.inside(position);
        void* cached = is_key ? key_source.at(new_block, inside) : value_source.at(new_block, inside);
        float* cached_scale =
            is_key ? key_source.scale_at(new_block, inside) : value_source.scale_at(new_block, inside);
        append(token, row_angles, cached, cached_scale, at.fresh->rows[warp], at.fresh->scales + warp, head_dim,
               is_key ? rotary : 0, interleaved);
    }
    const int new_row = position - (range.begin + (chunks - 1) * kKeys);  // within the last chunk
    // The key and all scales must be there before the last chunk is multiplied, the value before its weights are used.
    const auto insert_key = [&](Stage& stage) {
        if (!has_new || warp >= 2) return;
        __syncwarp();
        if (warp == 0) insert(stage.keys, at.fresh->rows[0], new_row);
        if (kCoded && threadIdx.x % 32 == 0) stage.scales()[warp * kKeys + new_row] = at.fresh->scales[warp];
    };
    const auto insert_value = [&](Stage& stage) {
        if (has_new && warp == 1) insert(stage.values, at.fresh->rows[1], new_row);
    };
    if (chunks == 1) insert_key(at.stage(0));
    ptx::cp_async_wait(stages - 1);
    __syncthreads();

    const attention::Parts own = {part_values + head * parts * head_dim, part_weights + head * parts, query_count,
                                  head_dim};
    int part = blockIdx.x * parts_per_block;  // its index in `own`
    Unfinished unit;
    Running group_sum, part_sum;
    unit.clear();
    group_sum.clear();
    part_sum.clear();
    int index = 0;  // of the chunk's stage
    int chunks_left = chunks_per_unit, units_left = units_per_group, part_units_left = units_per_part;
    // At the single barrier of a chunk, its weights and values and the next chunk's keys are complete, and all warps have
    // used its keys and the values of the previous chunk, so that these buffers can be refilled.
    for (int chunk = 0; chunk < chunks; ++chunk) {
#if __CUDA_ARCH__ >= 900
        if (late && chunk == max(chunks - stages, 0)) ptx::griddepcontrol_launch_dependents();
#endif
        Stage& stage = at.stage(index);
        Weighed& weighed = at.tile->weighed[chunk % 2];
        const int previous = index == 0 ? stages - 1 : index - 1;
        const int next = index + 1 == stages ? 0 : index + 1;
        const float* value_scales = stage.scales() + kKeys;
        Scores scores;
        float largest[2];
        multiply_keys(scores, at.tile->queries, stage.keys, place);
        find_maxima(largest, scores, scale, stage.scales(), range.end - (range.begin + chunk * kKeys), place);
        unit.raise(value_scales);
        unit.weigh(weighed, scores, largest, value_scales, place);
        if (chunk + 2 == chunks) insert_key(at.stage(next));
        if (chunk + 1 == chunks) insert_value(stage);
        ptx::cp_async_wait(stages - 2);
        __syncthreads();
        begin_values(chunk + stages - 1, previous);
        begin_keys(chunk + stages, index);
        ptx::cp_async_commit();
        unit.add(weighed, stage.values, place);
        const bool last = chunk + 1 == chunks;
        if (--chunks_left == 0 || last) {
            unit.finish(group_sum);
            chunks_left = chunks_per_unit;
            if (--units_left == 0 || last) {
                part_sum.add(group_sum, 1.0f);
                group_sum.clear();
                units_left = units_per_group;
            }
            if (--part_units_left == 0 && !last) {
                store_part(own, part++, part_sum, place);
                part_sum.clear();
                part_units_left = units_per_part;
            }
        }
        index = next;
    }

    if (count == 1) {
        store_output(out + head * head_dim, part_sum, query_count, head_dim, place);
        return;
    }
    store_part(own, part, part_sum, place);
    int* counter = counters + row * gridDim.y + blockIdx.y;
    const int sharing = min(combiners, blocks);
    __syncthreads();
    if (threadIdx.x == 0) at.fresh->rank = attention::arrive(counter, blocks, sharing);
    __syncthreads();
    const int rank = at.fresh->rank;
    if (rank < 0) return;
    const int in_group = units_per_part < units_per_group ? units_per_group : 1;
    auto* scratch = reinterpret_cast<float*>(at.tile);  // no longer in use
    attention::combine<HEAD_DIM>(own, count, in_group, rank, sharing, scratch, out + head * head_dim);
    if (threadIdx.x == 0) attention::leave(counter, blocks, sharing);
}

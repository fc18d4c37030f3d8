// Attention of one new token a row with grouped queries, from the projections to the heads' outputs, in one launch.
//
// Computes, for each row: q and k rotated (RoPE), k and v written into the cache at the row's position, and
// softmax(q k^T / sqrt(head_dim)) v over the keys 0 to position, in float32.
//
// Shapes and layout
//   qkv        [batch, (kv_heads * group + 2 kv_heads) * head_dim] ELEMENT, contiguous: all queries, keys, values
//   table      float [positions, rotary]: for each position rotary / 2 cosines, then as many sines
//   positions  int [batch]
//   keys, values  [rows >= batch, kv_heads, capacity, head_dim]: ELEMENT, or codes of 8 bits; the last stride is 1, the
//              others are given in elements; rows of head_dim begin at multiples of 16 bytes
//   key_scales, value_scales  float [rows, kv_heads, capacity], the last stride 1, for codes: the largest magnitude
//              of a head's vector / 127 or / 448
//   out        [batch, kv_heads * group, head_dim] ELEMENT, contiguous
//   part_values, part_weights  scratch for `parts` parts of each row and KV head, see combine.cuh; unused if parts is 1
//   counters   int [batch * kv_heads], zero; left at zero
//   head_dim is a multiple of 16 up to HEAD_DIM, rotary is even and at most head_dim, group is at most 64.
//   The first `rotary` dimensions rotate: as pairs (2i, 2i+1) where `interleaved`, else (i, i + rotary / 2).
//   scale      log2(e) / sqrt(head_dim)
//
// Macros
//   ELEMENT     __half or __nv_bfloat16
//   HEAD_DIM    64, 128 or 256: the row in shared memory
//   CODE_BITS   0: the cache holds ELEMENT; 8: it holds codes, int8 or e4m3 by the argument `code`
//
// Grid: kv_heads * parts blocks a row, the parts of a KV head one after another; 128 threads for each 16 queries.
// Dynamic shared memory: Layout below, as `shared_bytes` in ops/attention.py.
//
// How it works. The queries of a KV head are the rows of a matrix product, so that a key or value is read once for all
// of them. Keys come in chunks of kKeys, by cp.async in `stages` stages. In a chunk, each of four warps multiplies the
// queries with a quarter of the keys; they agree on the maximum, write the weights to shared memory, and each
// multiplies them with a quarter of the values' dimensions. `chunks_per_unit` chunks make a unit, whose sum the tensor
// cores keep; a block has `units_per_block` units, 1 or 8, and sums them in float32; the last blocks of a row sum the
// blocks. Weights are relative to an integer exponent and additions have one order (combine.cuh), so the result does
// not depend on units_per_block, and that of a row not on the batch around it. The block that has the position of the
// new token rotates the key, writes both into the cache and puts them into its own tiles.
#include "attention/cache.cuh"
#include "attention/combine.cuh"
#include "attention/rope.cuh"
#include "common/tile.cuh"

#if CODE_BITS == 8
using Cache = unsigned char;
#else
using Cache = ELEMENT;
#endif

constexpr bool kCoded = CODE_BITS == 8;
constexpr int kWarps = 4;                            // that share a tile of queries
constexpr int kTile = 16;                            // queries
constexpr int kMaxThreads = HEAD_DIM == 256 ? 256 : 512;
constexpr int kKeys = HEAD_DIM == 256 ? 32 : 64;     // of a chunk
constexpr int kWarpKeys = kKeys / kWarps;
constexpr int kColumns = HEAD_DIM * sizeof(Cache) / 2;  // of a row of the cache, in units of 2 bytes
constexpr int kPieces = kColumns / kChunk;              // of 16 bytes
constexpr int kBlockDims = kCoded ? 32 : 16;            // of values that one ldmatrix brings
constexpr int kWarpDims = HEAD_DIM / kWarps < kBlockDims ? kBlockDims : HEAD_DIM / kWarps;
constexpr int kOutTiles = kWarpDims / 8;
constexpr unsigned int kAll = 0xffffffff;

using Unit = unsigned short;  // what tiles of the cache are made of

// The block's shared memory.
struct Layout {
    Unit* keys;      // [stages][kKeys][kColumns], as tile.cuh orders it
    Unit* values;    // the same
    float* scales;   // [stages][keys, values][kKeys], for codes
    ELEMENT* queries;  // [queries][HEAD_DIM], rotated
    ELEMENT* weights;  // [queries][kKeys]
    float* maxima;     // [queries][kWarps]
    float* sums;       // [queries][kWarps]
    Unit* fresh;       // [key, value][kColumns]: the new token's
    float* fresh_scales;
    int* rank;

    __device__ __forceinline__ Layout(unsigned char* memory, int stages, int tiles) {
        keys = reinterpret_cast<Unit*>(memory);
        values = keys + stages * kKeys * kColumns;
        scales = reinterpret_cast<float*>(values + stages * kKeys * kColumns);
        queries = reinterpret_cast<ELEMENT*>(scales + (kCoded ? stages * 2 * kKeys : 0));
        weights = queries + tiles * kTile * HEAD_DIM;
        maxima = reinterpret_cast<float*>(weights + tiles * kTile * kKeys);
        sums = maxima + tiles * kTile * kWarps;
        fresh = reinterpret_cast<Unit*>(sums + tiles * kTile * kWarps);
        fresh_scales = reinterpret_cast<float*>(fresh + 2 * kColumns);
        rank = reinterpret_cast<int*>(fresh_scales + 2);
    }
};

// The keys or the values of one row and KV head.
struct Source {
    Cache* data;
    long long stride;  // of tokens, in elements
    float* scales;
};

// Which keys a block has: from `begin` to `end`, of them the new one at `position`, or not if that is beyond.
struct Range {
    int begin, end, position;
};

// Begin to copy the chunk from key `first` on. Past the end, and past head_dim, come zeros, whatever the memory holds.
// The row of the new token is left out.
__device__ __forceinline__ void fetch(Unit* tile, const Source& source, int first, const Range& range, int head_dim) {
    constexpr int kRounds = kKeys * kPieces / (32 * kWarps);
    const int piece = threadIdx.x % kPieces;
    const int dim = piece * (16 / static_cast<int>(sizeof(Cache)));
    const int step = blockDim.x / kPieces;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
        const int row = threadIdx.x / kPieces + i * step;
        const int key = first + row;
        if (row < kKeys && key != range.position) {
            const bool there = key < range.end && dim < head_dim;
            const Cache* from = source.data + (there ? key * source.stride + dim : 0);
            ptx::cp_async_16(ptx::shared_address(tile + chunk_offset<kColumns>(row, piece)), from, there ? 16 : 0);
        }
    }
}

// The scales of a chunk's keys and values, one a thread.
__device__ __forceinline__ void fetch_scales(float* scales, const Source& keys, const Source& values, int first,
                                             const Range& range) {
    const int key = first + static_cast<int>(threadIdx.x) % kKeys;
    if (threadIdx.x < 2 * kKeys && key != range.position) {
        const float* from = (threadIdx.x < kKeys ? keys.scales : values.scales) + (key < range.end ? key : 0);
        attention::cp_async_4(ptx::shared_address(scales + threadIdx.x), from, key < range.end ? 4 : 0);
    }
}

// Wait for a chunk's keys, or for its values too: what was begun after them may be under way. `stages` is 2 to 4.
__device__ __forceinline__ void wait_keys(int stages) {
    if (stages == 2) ptx::cp_async_wait<1>();
    else if (stages == 3) ptx::cp_async_wait<3>();
    else ptx::cp_async_wait<5>();
}
__device__ __forceinline__ void wait_values(int stages) {
    if (stages == 2) ptx::cp_async_wait<2>();
    else if (stages == 3) ptx::cp_async_wait<4>();
    else ptx::cp_async_wait<6>();
}

// Where the pair of dimensions from `dim` on stands in a row of queries. Codes of keys come out of ldmatrix four at a
// time, so a thread has four neighbouring dimensions of each 16 in place of two and two: the queries follow that order.
__device__ __forceinline__ int query_column(int dim) {
    if constexpr (!kCoded) return dim;
    const int within = dim % 16;
    return dim - within + (within % 4 == 0 ? within / 2 : 8 + within / 2 - 1);
}

// Rotate the group's queries into shared memory; zeros where there is no query and past head_dim.
__device__ __forceinline__ void load_queries(ELEMENT* queries, const ELEMENT* heads, const float* angles, int group,
                                             int head_dim, int rotary, bool interleaved) {
#pragma unroll
    for (int i = 0; i < kTile * HEAD_DIM / (2 * 32 * kWarps); ++i) {
        const int pair = threadIdx.x + i * blockDim.x;
        const int query = pair / (HEAD_DIM / 2);
        const int dim = 2 * (pair % (HEAD_DIM / 2));
        float2 x = {0.0f, 0.0f};
        if (query < group && dim < head_dim) {
            x = attention::rotated_pair(heads + query * head_dim, dim, angles, rotary, interleaved);
        }
        const int column = query_column(dim);
        ELEMENT* place = queries + chunk_offset<HEAD_DIM>(query, column / kChunk) + column % kChunk;
        *reinterpret_cast<unsigned int*>(place) = pack_pair<ELEMENT>(x.x, x.y);
    }
}

// A warp writes the new token's key or value into the cache, and for this block into `fresh`. A value has rotary 0.
__device__ __forceinline__ void append(const ELEMENT* head, const float* angles, const Source& source, int position,
                                       Unit* fresh, float* fresh_scale, int head_dim, int rotary, bool interleaved,
                                       int code) {
    constexpr int kPairs = HEAD_DIM / 64;  // of a lane
    const int lane = threadIdx.x % 32;
    Cache* cached = source.data + position * source.stride;
    unsigned int pairs[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const int dim = 2 * (lane + 32 * i);
        float2 x = {0.0f, 0.0f};
        if (dim < head_dim) x = attention::rotated_pair(head, dim, angles, rotary, interleaved);
        pairs[i] = pack_pair<ELEMENT>(x.x, x.y);
    }
    if constexpr (!kCoded) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const int pair = lane + 32 * i;
            reinterpret_cast<unsigned int*>(fresh)[pair] = pairs[i];
            if (2 * pair < head_dim) reinterpret_cast<unsigned int*>(cached)[pair] = pairs[i];
        }
    } else {
        // Magnitudes are ordered as their bits are, and NaN stands above all.
        unsigned int largest = 0;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const float2 x = unpack_pair<ELEMENT>(pairs[i]);
            largest = max(largest, max(__float_as_uint(fabsf(x.x)), __float_as_uint(fabsf(x.y))));
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) largest = max(largest, __shfl_xor_sync(kAll, largest, offset));
        const float scale = __uint_as_float(largest) / (code == attention::kInt8 ? 127.0f : 448.0f);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const int pair = lane + 32 * i;
            float2 x = unpack_pair<ELEMENT>(pairs[i]);
            x = scale == 0.0f ? make_float2(0.0f, 0.0f) : make_float2(x.x / scale, x.y / scale);
            const unsigned int codes = attention::quantize(x.x, code) | attention::quantize(x.y, code) << 8;
            fresh[pair] = static_cast<Unit>(codes);
            if (2 * pair < head_dim) reinterpret_cast<Unit*>(cached)[pair] = static_cast<Unit>(codes);
        }
        if (lane == 0) source.scales[position] = *fresh_scale = scale;
    }
}

// Put the new token's key and value into row `row` of a chunk's tiles.
__device__ __forceinline__ void insert(const Layout& at, int stage, int row) {
    if (threadIdx.x < 2 * kPieces) {
        const int piece = threadIdx.x % kPieces;
        const bool is_value = threadIdx.x >= kPieces;
        Unit* tile = (is_value ? at.values : at.keys) + stage * kKeys * kColumns;
        const uint4 part = reinterpret_cast<const uint4*>(at.fresh)[threadIdx.x];
        *reinterpret_cast<uint4*>(tile + chunk_offset<kColumns>(row, piece)) = part;
        if (kCoded && piece == 0) at.scales[(2 * stage + is_value) * kKeys + row] = at.fresh_scales[is_value];
    }
}

// Four 8 x 8 matrices side by side: eight rows, four chunks from `chunk` on.
__device__ __forceinline__ void load_strip(ptx::uint32 (&fragment)[4], const Unit* tile, int row0, int chunk) {
    const int lane = threadIdx.x % 32;
    ptx::ldmatrix_x4(fragment, ptx::shared_address(tile + chunk_offset<kColumns>(row0 + lane % 8, chunk + lane / 8)));
}

// Products of the tile's 16 queries with the warp's keys: an accumulator of mma for each 8 keys.
__device__ __forceinline__ void multiply_keys(float (&scores)[kWarpKeys / 8][4], const ELEMENT* queries,
                                              const Unit* keys, int tile, int quarter, int code) {
    constexpr int kSteps = kCoded ? 4 : 2;  // of 16 dimensions in a strip
#pragma unroll
    for (int strip = 0; strip < kPieces / 4; ++strip) {
        ptx::uint32 k[kWarpKeys / 8][4];
#pragma unroll
        for (int j = 0; j < kWarpKeys / 8; ++j) load_strip(k[j], keys, quarter * kWarpKeys + 8 * j, 4 * strip);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            ptx::uint32 q[4];
            load_block<HEAD_DIM, Second::below, false>(q, queries, tile * kTile, (strip * kSteps + step) * 16);
#pragma unroll
            for (int j = 0; j < kWarpKeys / 8; ++j) {
                if constexpr (kCoded) {
                    ptx::mma_m16n8k16<ELEMENT>(scores[j], q, attention::dequantize<ELEMENT, 0, 1>(k[j][step], code),
                                               attention::dequantize<ELEMENT, 2, 3>(k[j][step], code));
                } else {
                    ptx::mma_m16n8k16<ELEMENT>(scores[j], q, k[j][2 * step], k[j][2 * step + 1]);
                }
            }
        }
    }
}

// Add the products of the chunk's weights with the warp's dimensions of the values. Codes stand in pairs, so that their
// accumulators have the even and the odd dimensions of each 16; see output_dim.
__device__ __forceinline__ void multiply_values(float (&sums)[kOutTiles][4], const ELEMENT* weights, const Unit* values,
                                                int tile, int quarter, int code) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
        ptx::uint32 p[4];
        load_block<kKeys, Second::below, false>(p, weights, tile * kTile, 16 * step);
#pragma unroll
        for (int block = 0; block < kWarpDims / kBlockDims; ++block) {
            ptx::uint32 v[4];
            const int column = 16 * (quarter * (kWarpDims / kBlockDims) + block);
            load_block<kColumns, Second::below, true>(v, values, 16 * step, column);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if constexpr (kCoded) {
                    float(*out)[4] = sums + 4 * block + 2 * half;
                    const ptx::uint32 low = v[2 * half], high = v[2 * half + 1];
                    ptx::mma_m16n8k16<ELEMENT>(out[0], p, attention::dequantize<ELEMENT, 0, 2>(low, code),
                                               attention::dequantize<ELEMENT, 0, 2>(high, code));
                    ptx::mma_m16n8k16<ELEMENT>(out[1], p, attention::dequantize<ELEMENT, 1, 3>(low, code),
                                               attention::dequantize<ELEMENT, 1, 3>(high, code));
                } else {
                    ptx::mma_m16n8k16<ELEMENT>(sums[2 * block + half], p, v[2 * half], v[2 * half + 1]);
                }
            }
        }
    }
}

// The pair number `pair` (0 or 1) of a thread's dimensions in the 16 from 16 `half` of its warp's on: where it begins
// in the head, and its sums in row lane / 4 (`below` 0) or 8 below.
__device__ __forceinline__ int output_dim(int quarter, int half, int pair) {
    const int t = threadIdx.x % 4;
    return quarter * kWarpDims + 16 * half + (kCoded ? 4 * t + 2 * pair : 8 * pair + 2 * t);
}
__device__ __forceinline__ float2 output_pair(const float (&sums)[kOutTiles][4], int half, int pair, int below) {
    const float* first = sums[2 * half];
    const float* second = sums[2 * half + 1];
    if constexpr (kCoded) return make_float2(first[2 * below + pair], second[2 * below + pair]);
    return pair == 0 ? make_float2(first[2 * below], first[2 * below + 1])
                     : make_float2(second[2 * below], second[2 * below + 1]);
}

// What a thread keeps of rows lane / 4 and 8 below: exponents, sums of weights, and accumulators of its dimensions.
struct Running {
    float exponent[2];
    float weight[2];
    float values[kOutTiles][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            exponent[r] = attention::minus_infinity();
            weight[r] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) values[n][i] = 0.0f;
        }
    }

    // Add a unit; `factor` is what its values have to be multiplied with, a power of two.
    __device__ __forceinline__ void add(const Running& unit, float factor) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float joined = fmaxf(exponent[r], unit.exponent[r]);
            const float keep = attention::power_of_two(exponent[r] - joined);
            const float take = attention::power_of_two(unit.exponent[r] - joined);
            exponent[r] = joined;
            weight[r] = fmaf(unit.weight[r], take, weight[r] * keep);
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; ++i) {
                    values[n][i] = fmaf(unit.values[n][i], take * factor, values[n][i] * keep);
                }
            }
        }
    }
};

// The largest of the chunk's value scales, rounded down to a power of two, as its exponent: weights are multiplied with
// the scales over that, so that they stay within what 16 bits hold. 0 for a chunk of zeros.
__device__ __forceinline__ float scale_exponent(const float* scales) {
    const int lane = threadIdx.x % 32;
    unsigned int largest = 0;
#pragma unroll
    for (int i = lane; i < kKeys; i += 32) largest = max(largest, __float_as_uint(scales[i]));
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) largest = max(largest, __shfl_xor_sync(kAll, largest, offset));
    const int exponent = static_cast<int>(largest >> 23);
    return exponent == 0 ? 0.0f : static_cast<float>(exponent - 127);
}

// 2^exponent for any integer exponent whose power is a normal number; for others the nearest one.
__device__ __forceinline__ float any_power_of_two(float exponent) {
    return __int_as_float((127 + static_cast<int>(fminf(fmaxf(exponent, -126.0f), 127.0f))) << 23);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    decode_attention(const ELEMENT* __restrict__ qkv, const float* __restrict__ table,
                     const int* __restrict__ positions, Cache* keys, Cache* values, float* key_scales,
                     float* value_scales, ELEMENT* __restrict__ out, float* part_values, float2* part_weights,
                     int* counters, long long key_row_stride, long long key_head_stride, long long key_token_stride,
                     long long value_row_stride, long long value_head_stride, long long value_token_stride,
                     long long key_scale_row_stride, long long key_scale_head_stride, long long value_scale_row_stride,
                     long long value_scale_head_stride, int kv_heads, int group, int head_dim, int rotary,
                     int interleaved, int code, int stages, int chunks_per_unit, int units_per_block, int parts,
                     int combiners, float scale) {
    extern __shared__ __align__(128) unsigned char memory[];
#if __CUDA_ARCH__ >= 900
    // The cache may have been written just before, so nothing is read ahead of the wait.
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const int part = blockIdx.x % parts;
    const int pair = blockIdx.x / parts;  // of row and KV head
    const long long row = pair / kv_heads;
    const int kv_head = pair % kv_heads;
    const int position = positions[row];
    const int block_keys = units_per_block * chunks_per_unit * kKeys;
    const Range range = {part * block_keys, min((part + 1) * block_keys, position + 1), position};
    if (range.begin >= range.end) return;

    const int warp = threadIdx.x / 32;
    const int tile = warp / kWarps;
    const int quarter = warp % kWarps;
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
    const int chunks = (range.end - range.begin + kKeys - 1) / kKeys;
    // A block of one chunk has memory for one stage.
    const Layout at(memory, min(stages, units_per_block * chunks_per_unit), blockDim.x / (32 * kWarps));
    const Source key_source = {keys + row * key_row_stride + kv_head * key_head_stride, key_token_stride,
                               key_scales + (row * key_scale_row_stride + kv_head * key_scale_head_stride)};
    const Source value_source = {values + row * value_row_stride + kv_head * value_head_stride, value_token_stride,
                                 value_scales + (row * value_scale_row_stride + kv_head * value_scale_head_stride)};
    // A chunk's keys with all scales are one group of copies, its values another; past the last chunk they are empty.
    const auto begin_chunk = [&](int chunk) {
        const int stage = chunk % stages;
        const int first = range.begin + chunk * kKeys;
        if (chunk < chunks) {
            fetch(at.keys + stage * kKeys * kColumns, key_source, first, range, head_dim);
            if constexpr (kCoded) fetch_scales(at.scales + 2 * stage * kKeys, key_source, value_source, first, range);
        }
        ptx::cp_async_commit();
        if (chunk < chunks) fetch(at.values + stage * kKeys * kColumns, value_source, first, range, head_dim);
        ptx::cp_async_commit();
    };
    for (int chunk = 0; chunk < stages - 1; ++chunk) begin_chunk(chunk);

    const ELEMENT* projected = qkv + row * kv_heads * (group + 2) * head_dim;
    const float* angles = table + static_cast<long long>(position) * rotary;
    load_queries(at.queries, projected + kv_head * group * head_dim, angles, group, head_dim, rotary, interleaved);
    const bool has_new = range.end == position + 1;
    if (has_new && warp < 2) {
        const ELEMENT* head = projected + (kv_heads * (group + warp) + kv_head) * head_dim;
        const bool is_key = warp == 0;
        const Source source = {is_key ? key_source.data : value_source.data,
                               is_key ? key_source.stride : value_source.stride,
                               is_key ? key_source.scales : value_source.scales};
        append(head, angles, source, position, at.fresh + warp * kColumns, at.fresh_scales + warp, head_dim,
               is_key ? rotary : 0, interleaved, code);
    }
    __syncthreads();

    Running unit, all;
    unit.clear();
    all.clear();
    // For codes: the exponent that a unit's values are relative to beside that of its weights.
    float unit_scale = attention::minus_infinity();
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int stage = chunk % stages;
        const int first = range.begin + chunk * kKeys;
        const float* scales = at.scales + 2 * stage * kKeys;
        if (has_new && chunk == chunks - 1) insert(at, stage, position - first);
        wait_keys(stages);
        __syncthreads();
        begin_chunk(chunk + stages - 1);

        float scores[kWarpKeys / 8][4] = {};
        multiply_keys(scores, at.queries, at.keys + stage * kKeys * kColumns, tile, quarter, code);
        float largest[2] = {attention::minus_infinity(), attention::minus_infinity()};
#pragma unroll
        for (int j = 0; j < kWarpKeys / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = quarter * kWarpKeys + 8 * j + 2 * t + i % 2;
                const float factor = kCoded ? scale * scales[column] : scale;
                scores[j][i] = first + column < range.end ? scores[j][i] * factor : attention::minus_infinity();
                largest[i / 2] = fmaxf(largest[i / 2], scores[j][i]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAll, largest[r], 1));
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAll, largest[r], 2));
            if (t == 0) at.maxima[(tile * kTile + g + 8 * r) * kWarps + quarter] = largest[r];
        }
        __syncthreads();

        float rescale[2];
        float total[2];
        float value_factor[kWarpKeys / 8][2];
        float drop = 1.0f;
        if constexpr (kCoded) {
            const float joined = fmaxf(unit_scale, scale_exponent(scales + kKeys));
            drop = attention::power_of_two(unit_scale - joined);
            unit_scale = joined;
            const float inverse = any_power_of_two(-joined);
#pragma unroll
            for (int j = 0; j < kWarpKeys / 8; ++j) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    value_factor[j][i] = scales[kKeys + quarter * kWarpKeys + 8 * j + 2 * t + i] * inverse;
                }
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int query = tile * kTile + g + 8 * r;
            const float4 four = *reinterpret_cast<const float4*>(at.maxima + query * kWarps);
            const float joined = fmaxf(unit.exponent[r], ceilf(fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w))));
            rescale[r] = attention::power_of_two(unit.exponent[r] - joined);
            unit.exponent[r] = joined;
            total[r] = 0.0f;
#pragma unroll
            for (int j = 0; j < kWarpKeys / 8; ++j) {
                float low = exp2f(scores[j][2 * r] - joined), high = exp2f(scores[j][2 * r + 1] - joined);
                total[r] += low + high;
                if constexpr (kCoded) {
                    low *= value_factor[j][0];
                    high *= value_factor[j][1];
                }
                const int column = quarter * (kWarpKeys / kChunk) + j;
                ELEMENT* place = at.weights + chunk_offset<kKeys>(query, column) + 2 * t;
                *reinterpret_cast<unsigned int*>(place) = pack_pair<ELEMENT>(low, high);
            }
            total[r] += __shfl_xor_sync(kAll, total[r], 1);
            total[r] += __shfl_xor_sync(kAll, total[r], 2);
            if (t == 0) at.sums[query * kWarps + quarter] = total[r];
        }
        wait_values(stages);
        __syncthreads();

#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float4 four = *reinterpret_cast<const float4*>(at.sums + (tile * kTile + g + 8 * r) * kWarps);
            unit.weight[r] = unit.weight[r] * rescale[r] + ((four.x + four.y) + (four.z + four.w));
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n) {
                unit.values[n][2 * r] *= rescale[r] * drop;
                unit.values[n][2 * r + 1] *= rescale[r] * drop;
            }
        }
        if (quarter * kWarpDims < HEAD_DIM) {
            multiply_values(unit.values, at.weights, at.values + stage * kKeys * kColumns, tile, quarter, code);
        }
        if ((chunk + 1) % chunks_per_unit == 0 || chunk + 1 == chunks) {
            all.add(unit, kCoded ? any_power_of_two(unit_scale) : 1.0f);
            unit.clear();
            unit_scale = attention::minus_infinity();
        }
    }

    const int blocks = position / block_keys + 1;  // that have keys of this row
    const long long head = static_cast<long long>(pair) * group;  // the first of the group in `out`
    const attention::Parts handed = {part_values + head * parts * head_dim, part_weights + head * parts, group,
                                     head_dim};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int query = tile * kTile + g + 8 * r;
        if (query >= group) continue;
        const float inverse = 1.0f / all.weight[r];
#pragma unroll
        for (int i = 0; i < kOutTiles; ++i) {
            const int dim = output_dim(quarter, i / 2, i % 2);
            if (dim >= head_dim) continue;
            const float2 x = output_pair(all.values, i / 2, i % 2, r);
            if (blocks == 1) {
                const unsigned int packed = pack_pair<ELEMENT>(x.x * inverse, x.y * inverse);
                *reinterpret_cast<unsigned int*>(out + (head + query) * head_dim + dim) = packed;
            } else {
                *reinterpret_cast<float2*>(handed.values + handed.index(part, query) * head_dim + dim) = x;
            }
        }
        if (blocks > 1 && quarter == 0 && t == 0) {
            handed.weights[handed.index(part, query)] = make_float2(all.exponent[r], all.weight[r]);
        }
    }
    if (blocks == 1) return;
    __syncthreads();
    const int sharing = min(combiners, blocks);
    if (threadIdx.x == 0) *at.rank = attention::arrive(counters + pair, blocks, sharing);
    __syncthreads();
    const int rank = *at.rank;
    if (rank < 0) return;
    auto* scratch = reinterpret_cast<float*>(memory);
    attention::combine<HEAD_DIM>(handed, blocks, rank, sharing, scratch, out + head * head_dim);
    if (threadIdx.x == 0) attention::leave(counters + pair, blocks, sharing);
}

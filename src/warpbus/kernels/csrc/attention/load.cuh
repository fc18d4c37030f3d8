// How a block of decode.cu fills its shared memory: chunks of the cache, the queries, the new token.
#pragma once
#include "attention/block.cuh"
#include "attention/cache.cuh"
#include "attention/rope.cuh"
#include "common/hadamard.cuh"

// The keys or the values of one KV head.
struct Source {
    Cache* data;
    unsigned int block_stride, token_stride;  // in units of 16 bytes
    float* scales;
    long long scale_stride;  // of blocks

    // The first 16 bytes of a token's vector, and its scale, by cache block and position in the block.
    __device__ __forceinline__ uint4* at(unsigned int block, unsigned int token) const {
        return reinterpret_cast<uint4*>(data) + static_cast<unsigned long long>(block) * block_stride +
               token * token_stride;
    }
    __device__ __forceinline__ float* scale_at(int block, int token) const {
        return scales + block * scale_stride + token;
    }
};

// The keys of a block: `begin` to `end`, including the new one at `position`, or not if that is beyond. -1 if no token is new
// because all are stored.
struct Range {
    int begin, end, position;
};

// The part of a row's block table that a block of the kernel reads. Each lane has the entry of kSpan keys, which are in one
// cache block whatever its size, and a warp the entries of kWindow chunks: one register for the current window, one for the
// next, loaded long before it is needed. Entries beyond the row's position are loaded but not used.
class Blocks {
  public:
    static constexpr int kSpan = 16;
    static constexpr int kSpans = kKeys / kSpan;  // spans per chunk
    static constexpr int kWindow = 32 / kSpans;   // in chunks

    // `table` is the row's and has entries for the keys below `limit`; `begin` is the first key of this block.
    __device__ __forceinline__ Blocks(const int* table, int shift, int limit, int begin)
        : table_(table), shift_(shift), last_(limit - 1), next_(begin + 32 * kSpan), now_(entry(begin)),
          ahead_(entry(next_)) {}

    // Called once per chunk, in order, before the chunk is accessed; `chunk` counts from 0.
    __device__ __forceinline__ void turn_to(int chunk) {
        if (chunk == 0 || chunk % kWindow != 0) return;
        now_ = ahead_;
        next_ += 32 * kSpan;
        ahead_ = entry(next_);
    }

    // The cache block of row `row` of a chunk in the window. All lanes call it.
    __device__ __forceinline__ int of(int chunk, int row) const {
        return __shfl_sync(kAll, now_, chunk % kWindow * kSpans + row / kSpan);
    }

    // The cache block of a key that belongs to the row, and the key's position in its block.
    __device__ __forceinline__ int of_key(int key) const { return table_[key >> shift_]; }
    __device__ __forceinline__ int inside(int key) const { return key & ((1 << shift_) - 1); }

  private:
    __device__ __forceinline__ int entry(int first) const {
        const int key = first + kSpan * static_cast<int>(threadIdx.x % 32);
        return table_[min(key, last_) >> shift_];
    }

    const int* table_;
    int shift_, last_, next_, now_, ahead_;
};

#if __CUDA_ARCH__ >= 900
// Prefetches the keys or values from `first` on into L2, `count` at most and no span beyond `position`, if the tokens of a
// cache block are contiguous. Called by one warp before griddepcontrol_wait: the data may be old and must not stay in L1.
__device__ __forceinline__ void prefetch(const Source& source, const int* table, int shift, int first, int count,
                                         int limit, int position, int head_dim) {
    const int offset = Blocks::kSpan * static_cast<int>(threadIdx.x % 32);
    const int key = first + offset;
    const int block = __ldcg(table + (min(key, limit - 1) >> shift));  // does not wait for the position
    const int bytes = head_dim * kBits / 8;
    if (offset < count && key <= position && source.token_stride * 16 == bytes) {
        ptx::bulk_prefetch(source.at(block, key & ((1 << shift) - 1)), Blocks::kSpan * bytes);
    }
}
#endif

// Starts copying a chunk. Beyond the end, and beyond head_dim, it writes zeros, whatever the memory holds. The row of the new
// token is left out. A chunk without such special cases, as most are, takes a few instructions per copy.
__device__ __forceinline__ void fetch(Unit* tile, const Source& source, const Blocks& blocks, int chunk,
                                      const Range& range, int head_dim) {
    constexpr int kRounds = kTileUnits / kChunk / kThreads;
    constexpr int kRows = kThreads / kPieces;  // per round
    const int piece = threadIdx.x % kPieces;
    const int dim = piece * (128 / kBits);
    const int row0 = threadIdx.x / kPieces;
    const int first = range.begin + chunk * kKeys;
    const auto to = [&](int row) { return ptx::shared_address(tile + chunk_offset<kColumns>(row, piece)); };
    if (first + kKeys <= (kStored ? range.end : range.position) && head_dim == HEAD_DIM) {
        const uint4* from = nullptr;
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            const int row = row0 + i * kRows;
            if (i * kRows % Blocks::kSpan == 0) {
                from = source.at(blocks.of(chunk, row), blocks.inside(first + row)) + piece;
            }
            ptx::cp_async_16(to(row), from);
            from += kRows * source.token_stride;
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < kRounds; ++i) {
            const int row = row0 + i * kRows;
            const int key = first + row;
            const int block = blocks.of(chunk, row);
            if (key == range.position) continue;
            const bool there = key < range.end && dim < head_dim;
            const void* from = source.data;
            if (there) from = source.at(block, blocks.inside(key)) + piece;
            ptx::cp_async_16(to(row), from, there ? 16 : 0);
        }
    }
}

// The scales of a chunk's keys and values, one per thread.
__device__ __forceinline__ void fetch_scales(float* scales, const Source& keys, const Source& values,
                                             const Blocks& blocks, int chunk, const Range& range) {
    if (threadIdx.x >= 2 * kKeys) return;
    const int row = static_cast<int>(threadIdx.x) % kKeys;
    const int key = range.begin + chunk * kKeys + row;
    const int block = blocks.of(chunk, row);
    if (key == range.position) return;
    const bool there = key < range.end, of_keys = threadIdx.x < kKeys;
    const float* from = of_keys ? keys.scales : values.scales;
    if (there) from += block * (of_keys ? keys.scale_stride : values.scale_stride) + blocks.inside(key);
    attention::cp_async_4(ptx::shared_address(scales + threadIdx.x), from, there ? 4 : 0);
}

// The position of the pair of dimensions from `dim` on in a row of queries. ldmatrix delivers codes of keys in groups of
// four, so that a thread has four adjacent dimensions of each 16 instead of two and two; the queries follow that order.
__device__ __forceinline__ int query_column(int dim) {
    if constexpr (!kCoded || kPacked) return dim;  // `rotate_queries` reorders those for packed codes
    const int within = dim % 16;
    return dim - within + (within % 4 == 0 ? within / 2 : 8 + within / 2 - 1);
}

// The queries that are being copied to shared memory. A thread has the same pair of dimensions of several queries.
struct Queries {
    static constexpr int kPairs = HEAD_DIM / 2;
    static constexpr int kRounds = kTile * kPairs / kThreads;
    attention::Pair pair;
    attention::Unturned<ELEMENT> unturned[kRounds];

    __device__ __forceinline__ static int dim() { return 2 * (threadIdx.x % kPairs); }
    __device__ __forceinline__ static int row(int i) { return threadIdx.x / kPairs + i * (kTile / kRounds); }

    __device__ __forceinline__ Queries(int head_dim, int rotary, bool interleaved)
        : pair(dim() < head_dim ? dim() : 0, rotary, interleaved) {}

    // Starts loading `count` queries.
    __device__ __forceinline__ void begin(const ELEMENT* heads, int count, int head_dim) {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            unturned[i].load(heads + min(row(i), count - 1) * head_dim, pair);
        }
    }

    // Writes them, rotated, to shared memory; zeros where there is no query and beyond head_dim.
    __device__ __forceinline__ void store(QueryTile* tile, const attention::Angles& angles, int count,
                                          int head_dim) const {
        const int column = query_column(dim());
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            const bool there = row(i) < count && dim() < head_dim;
            const float2 x = unturned[i].turned(pair, angles);
            ELEMENT* element = tile->queries + chunk_offset<HEAD_DIM>(row(i), column / kChunk) + column % kChunk;
            *reinterpret_cast<unsigned int*>(element) = there ? pack_pair<ELEMENT>(x.x, x.y) : 0;
        }
    }
};

// For packed codes: multiplies the queries by the Hadamard matrix, and writes them in the order in which a thread has its
// codes. It has eight adjacent dimensions of each 32; code j of the lower and of the upper half of its word are a pair.
// Called between barriers.
__device__ __forceinline__ void rotate_queries(QueryTile* tile, int head_dim) {
    constexpr int kLanes = HEAD_DIM / kChunk;  // of a query
    const int chunk = threadIdx.x % kLanes;
    const int column = chunk / 4 * 32 + chunk % 4 * 2;
#pragma unroll
    for (int row = threadIdx.x / kLanes; row < kTile; row += kThreads / kLanes) {
        const ELEMENT* from = tile->queries + chunk_offset<HEAD_DIM>(row, chunk);
        const Vector16<ELEMENT> query = *reinterpret_cast<const Vector16<ELEMENT>*>(from);
        float x[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) x[i] = to_float(query.element[i]);
        hadamard::transform(x, hadamard::block_of(head_dim));
        __syncwarp();
#pragma unroll
        for (int j = 0; j < kChunk / 2; ++j) {
            const int at = column + 8 * j;
            ELEMENT* to = tile->queries + chunk_offset<HEAD_DIM>(row, at / kChunk) + at % kChunk;
            *reinterpret_cast<unsigned int*>(to) = pack_pair<ELEMENT>(x[j], x[j + kChunk / 2]);
        }
    }
}

// The new token's key or value on its way to the cache; one warp has all of it. A value has rotary 0.
struct NewToken {
    static constexpr int kPairs = HEAD_DIM / 64;  // per lane
    attention::Unturned<ELEMENT> unturned[kPairs];

    __device__ __forceinline__ static int dim(int i) { return 2 * (threadIdx.x % 32 + 32 * i); }
    __device__ __forceinline__ static attention::Pair pair(int i, int head_dim, int rotary, bool interleaved) {
        return attention::Pair(dim(i) < head_dim ? dim(i) : 0, rotary, interleaved);
    }

    // Starts loading.
    __device__ __forceinline__ void begin(const ELEMENT* head, int head_dim, int rotary, bool interleaved) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) unturned[i].load(head, pair(i, head_dim, rotary, interleaved));
    }
};

// Writes it, rotated, into the cache, and into `fresh` for this block.
__device__ __forceinline__ void append(const NewToken& token, const float* angles, void* cached, float* cached_scale,
                                       Unit* fresh, float* fresh_scale, int head_dim, int rotary, bool interleaved) {
    constexpr int kPairs = NewToken::kPairs;
    const int lane = threadIdx.x % 32;
    unsigned int pairs[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const attention::Pair pair = NewToken::pair(i, head_dim, rotary, interleaved);
        const float2 x = token.unturned[i].turned(pair, attention::Angles(angles, pair, rotary));
        pairs[i] = NewToken::dim(i) < head_dim ? pack_pair<ELEMENT>(x.x, x.y) : 0;
    }
    if constexpr (!kCoded) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const int pair = lane + 32 * i;
            reinterpret_cast<unsigned int*>(fresh)[pair] = pairs[i];
            if (2 * pair < head_dim) static_cast<unsigned int*>(cached)[pair] = pairs[i];
        }
    } else {
        // Magnitudes have the order of their bits, and NaN is above all of them.
        unsigned int largest = 0;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const float2 x = unpack_pair<ELEMENT>(pairs[i]);
            largest = max(largest, max(__float_as_uint(fabsf(x.x)), __float_as_uint(fabsf(x.y))));
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) largest = max(largest, __shfl_xor_sync(kAll, largest, offset));
        const float scale = __uint_as_float(largest) / largest_code(CODE);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const int pair = lane + 32 * i;
            float2 x = unpack_pair<ELEMENT>(pairs[i]);
            x = scale == 0.0f ? make_float2(0.0f, 0.0f) : make_float2(x.x / scale, x.y / scale);
            const unsigned int codes = to_code(x.x, CODE) | to_code(x.y, CODE) << 8;
            fresh[pair] = static_cast<Unit>(codes);
            if (2 * pair < head_dim) static_cast<Unit*>(cached)[pair] = static_cast<Unit>(codes);
        }
        if (lane == 0) *cached_scale = *fresh_scale = scale;
    }
}

// Copies the new token's key or value into row `row` of a chunk, by the warp that has written it to `fresh`.
__device__ __forceinline__ void insert(Unit* tile, const Unit* fresh, int row) {
    const int piece = threadIdx.x % 32;
    if (piece < kPieces) {
        const uint4 part = reinterpret_cast<const uint4*>(fresh)[piece];
        *reinterpret_cast<uint4*>(tile + chunk_offset<kColumns>(row, piece)) = part;
    }
}

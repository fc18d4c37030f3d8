// How a block of decode.cu fills its shared memory: chunks of the cache, the queries, the new token.
#pragma once
#include "attention/block.cuh"
#include "attention/cache.cuh"
#include "attention/rope.cuh"

// The keys or the values of one KV head.
struct Source {
    Cache* data;
    unsigned int block_stride, token_stride;  // in pieces of 16 bytes
    float* scales;
    long long scale_stride;  // of blocks

    // Piece 0 of the vector of a token, and its scale, from its block of the cache and its place in the block.
    __device__ __forceinline__ uint4* at(unsigned int block, unsigned int token) const {
        return reinterpret_cast<uint4*>(data) + static_cast<unsigned long long>(block) * block_stride +
               token * token_stride;
    }
    __device__ __forceinline__ float* scale_at(int block, int token) const {
        return scales + block * scale_stride + token;
    }
};

// Which keys a block has: from `begin` to `end`, of them the new one at `position`, or not if that is beyond. -1 where
// no token is new, because all are stored.
struct Range {
    int begin, end, position;
};

// The part of a row's block table that a block of the kernel is at. A lane has the entry of kSpan keys, which lie in
// one block of the cache whatever its size, and a warp those of kWindow chunks: a register for the window in use,
// another for the next, asked for long before it is needed. Entries past the row's position are loaded, but not used.
class Blocks {
  public:
    static constexpr int kSpan = 16;
    static constexpr int kSpans = kKeys / kSpan;  // of a chunk
    static constexpr int kWindow = 32 / kSpans;   // chunks

    // `table` is the row's, which has entries for the keys below `limit`; `begin` the first key of the block's.
    __device__ __forceinline__ Blocks(const int* table, int shift, int limit, int begin)
        : table_(table), shift_(shift), last_(limit - 1), next_(begin + 32 * kSpan), now_(entry(begin)),
          ahead_(entry(next_)) {}

    // To call once for each chunk, before anything is asked of it; `chunk` counts from 0.
    __device__ __forceinline__ void turn_to(int chunk) {
        if (chunk == 0 || chunk % kWindow != 0) return;
        now_ = ahead_;
        next_ += 32 * kSpan;
        ahead_ = entry(next_);
    }

    // The block of row `row` of a chunk in the window. All lanes call it.
    __device__ __forceinline__ int of(int chunk, int row) const {
        return __shfl_sync(kAll, now_, chunk % kWindow * kSpans + row / kSpan);
    }

    // The block of a key that is known to be the row's, and a key's place in its block.
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
// Bring the keys or values from `first` on into L2, `count` at most and no span past `position`, if the tokens of a block
// of the cache lie one after another. One warp calls it, ahead of griddepcontrol_wait: what it reads may be from before,
// and must not stay in L1.
__device__ __forceinline__ void prefetch(const Source& source, const int* table, int shift, int first, int count,
                                         int limit, int position, int head_dim) {
    const int offset = Blocks::kSpan * static_cast<int>(threadIdx.x % 32);
    const int key = first + offset;
    const int block = __ldcg(table + (min(key, limit - 1) >> shift));  // does not wait for the position
    const int bytes = head_dim * static_cast<int>(sizeof(Cache));
    if (offset < count && key <= position && source.token_stride * 16 == bytes) {
        ptx::bulk_prefetch(source.at(block, key & ((1 << shift) - 1)), Blocks::kSpan * bytes);
    }
}
#endif

// Begin to copy a chunk. Past the end, and past head_dim, come zeros, whatever the memory holds. The row of the new
// token is left out. A chunk with nothing to look out for, as most are, takes a few instructions for each copy.
__device__ __forceinline__ void fetch(Unit* tile, const Source& source, const Blocks& blocks, int chunk,
                                      const Range& range, int head_dim) {
    constexpr int kRounds = kTileUnits / kChunk / kThreads;
    constexpr int kRows = kThreads / kPieces;  // in a round
    const int piece = threadIdx.x % kPieces;
    const int dim = piece * (16 / static_cast<int>(sizeof(Cache)));
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

// The scales of a chunk's keys and values, one a thread.
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

// Where the pair of dimensions from `dim` on stands in a row of queries. Codes of keys come out of ldmatrix four at a
// time, so a thread has four neighbouring dimensions of each 16 in place of two and two: the queries follow that order.
__device__ __forceinline__ int query_column(int dim) {
    if constexpr (!kCoded) return dim;
    const int within = dim % 16;
    return dim - within + (within % 4 == 0 ? within / 2 : 8 + within / 2 - 1);
}

// The queries on their way to shared memory. A thread has the same pair of dimensions of several queries.
struct Queries {
    static constexpr int kPairs = HEAD_DIM / 2;
    static constexpr int kRounds = kTile * kPairs / kThreads;
    attention::Pair pair;
    attention::Unturned<ELEMENT> unturned[kRounds];

    __device__ __forceinline__ static int dim() { return 2 * (threadIdx.x % kPairs); }
    __device__ __forceinline__ static int row(int i) { return threadIdx.x / kPairs + i * (kTile / kRounds); }

    __device__ __forceinline__ Queries(int head_dim, int rotary, bool interleaved)
        : pair(dim() < head_dim ? dim() : 0, rotary, interleaved) {}

    // Begin to load `count` queries.
    __device__ __forceinline__ void begin(const ELEMENT* heads, int count, int head_dim) {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            unturned[i].load(heads + min(row(i), count - 1) * head_dim, pair);
        }
    }

    // Rotate them into shared memory; zeros where there is no query and past head_dim.
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

// The new token's key or value on its way to the cache; a warp has it whole. A value has rotary 0.
struct NewToken {
    static constexpr int kPairs = HEAD_DIM / 64;  // of a lane
    attention::Unturned<ELEMENT> unturned[kPairs];

    __device__ __forceinline__ static int dim(int i) { return 2 * (threadIdx.x % 32 + 32 * i); }
    __device__ __forceinline__ static attention::Pair pair(int i, int head_dim, int rotary, bool interleaved) {
        return attention::Pair(dim(i) < head_dim ? dim(i) : 0, rotary, interleaved);
    }

    // Begin to load.
    __device__ __forceinline__ void begin(const ELEMENT* head, int head_dim, int rotary, bool interleaved) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) unturned[i].load(head, pair(i, head_dim, rotary, interleaved));
    }
};

// Write it, rotated, to its place in the cache and for this block into `fresh`.
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
        // Magnitudes are ordered as their bits are, and NaN stands above all.
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

// Put the new token's key or value into row `row` of a chunk, by the warp that has written it to `fresh`.
__device__ __forceinline__ void insert(Unit* tile, const Unit* fresh, int row) {
    const int piece = threadIdx.x % 32;
    if (piece < kPieces) {
        const uint4 part = reinterpret_cast<const uint4*>(fresh)[piece];
        *reinterpret_cast<uint4*>(tile + chunk_offset<kColumns>(row, piece)) = part;
    }
}

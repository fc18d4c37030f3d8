// The rotary position embedding of tokens' queries and keys, and the write of their keys and values into the cache.
//
// Shapes and layout
//   qkv     [tokens, (heads + 2 kv_heads) * size], contiguous: the queries of all heads, then keys, then values;
//           ELEMENT = float, __half or __nv_bfloat16
//   table   float [positions, rotary]: for each position rotary / 2 cosines, then as many sines
//   positions, slots    int and long long [tokens]: a token's row of the table, and its place in the cache: the block
//           times the block's size, and the place in the block
//   q       [tokens, heads, size]; k [tokens, kv_heads, size]: rotated, contiguous
//   keys, values    [blocks, kv_heads, 1 << shift, size], the last stride 1, the others any (in elements); size / 2 bytes
//           for codes of 4 bits
//   key_scales, value_scales    float [blocks, kv_heads, 1 << shift], the last stride 1; null unless `code` has scales
// The first `rotary` dimensions of a head rotate, as pairs (2i, 2i+1) where `interleaved`, else (i, i + rotary / 2).
// `code`: 0 ELEMENT, 1 int8, 2 fp8 e4m3, 3 int4. The scale is the largest magnitude of the token's head vector / 127 or / 448;
// the code is the vector over the scale, rounded to nearest even. A vector of zeros has scale 0 and codes 0, and one
// with NaN the scale NaN. With 4 bits the vector is first multiplied by the Hadamard matrix, the scale is its largest
// magnitude / 8, and its ratios are rounded down to the middle of an interval.
//   fixed_key_scales, fixed_value_scales    float [kv_heads], positive, or null: the scales to take in place of those
// Launch: one block a token. `lanes` (a power of two, at most 32) threads share a head, 8 elements each, and a block
// takes kBlock / lanes heads at a time. `vectorised`: size and rotary / 2 are multiples of 8, all is aligned to 16
// bytes (codes to 8).
//
// A thread has the same dimensions in all its heads, so it keeps its cosines and sines in registers. What its elements
// are paired with is read a second time, from L1: the other half of the head has been asked for by the same warp.
#include "common/cache_codes.cuh"
#include "common/hadamard.cuh"
#include "common/ptx.cuh"
#include "step/chunk.cuh"

using step::Chunk;
using step::kChunk;

constexpr int kBlock = 128;

struct alignas(8) Codes {
    unsigned char code[kChunk];
};

// How a thread's eight dimensions turn: out = x * cosine + partner * sine, where the sine has the sign of the pair's
// side.
struct Rotation {
    float cosine[kChunk];
    float sine[kChunk];
    int partner;  // where the partners begin, in halves: a multiple of kChunk away
};

__device__ __forceinline__ Rotation rotation_of(const float* angles, int first, int rotary, bool interleaved) {
    const int half = rotary / 2;
    Rotation turn;
    turn.partner = first < half ? first + half : first - half;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        const int at = first + i;
        const bool rotates = at < rotary;
        const int pair = interleaved ? at / 2 : (at < half ? at : at - half);
        const bool leads = interleaved ? at % 2 == 0 : at < half;
        turn.cosine[i] = rotates ? angles[pair] : 1.0f;
        turn.sine[i] = rotates ? (leads ? -angles[half + pair] : angles[half + pair]) : 0.0f;
    }
    return turn;
}

// The partners of a thread's elements, from the head that begins at `head`; what does not rotate gets itself.
__device__ __forceinline__ Chunk<ELEMENT> partners(const ELEMENT* head, const Chunk<ELEMENT>& value, int first,
                                                   int rotary, int partner, bool interleaved, bool vectorised) {
    Chunk<ELEMENT> other = value;
    if (interleaved) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) other.element[i] = value.element[i ^ 1];
    } else if (vectorised) {
        if (first < rotary) other = *reinterpret_cast<const Chunk<ELEMENT>*>(head + partner);
    } else {
        const int half = rotary / 2;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            const int at = first + i;
            if (at < rotary) other.element[i] = head[at < half ? at + half : at - half];
        }
    }
    return other;
}

// Quantize a head's vector, spread over `lanes` threads, and write codes and scale. Threads that do not store come
// along to the shuffles.
__device__ __forceinline__ void store_codes(unsigned char* row, float* scale_of_row, int chunk, int size, int lanes,
                                            int code, bool vectorised, bool stores, const float* fixed,
                                            const Chunk<ELEMENT>& value) {
    float x[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] = to_float(value.element[i]);
    if (code == kInt4) hadamard::transform(x, hadamard::block_of(size));
    // Magnitudes are ordered as their bits are, and NaN stands above all.
    unsigned int largest = 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) largest = max(largest, __float_as_uint(fabsf(x[i])));
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
        largest = max(largest, __shfl_xor_sync(0xffffffff, largest, offset));
    }
    if (!stores) return;
    const float scale = fixed == nullptr ? __uint_as_float(largest) / largest_code(code) : *fixed;
    Codes codes;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        codes.code[i] = static_cast<unsigned char>(to_code(scale == 0.0f ? 0.0f : x[i] / scale, code));
    }
    if (code == kInt4) {
        alignas(4) unsigned char packed[kChunk / 2];
#pragma unroll
        for (int i = 0; i < kChunk / 2; ++i) packed[i] = codes.code[2 * i] | codes.code[2 * i + 1] << 4;
        if (vectorised) {
            reinterpret_cast<unsigned int*>(row)[chunk] = *reinterpret_cast<const unsigned int*>(packed);
        } else {
#pragma unroll
            for (int i = 0; i < kChunk / 2; ++i) {
                if (kChunk * chunk + 2 * i < size) row[kChunk / 2 * chunk + i] = packed[i];
            }
        }
    } else if (vectorised) {
        reinterpret_cast<Codes*>(row)[chunk] = codes;
    } else {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            if (kChunk * chunk + i < size) row[kChunk * chunk + i] = codes.code[i];
        }
    }
    if (chunk == 0) *scale_of_row = scale;
}

// The previous kernel may write qkv, table, positions and slots: no __restrict__ (see ptx::griddepcontrol_wait).
// Four blocks a multiprocessor are enough: without the 4 the assembler spills registers to make room for more.
extern "C" __global__ void __launch_bounds__(kBlock, 4)
    rope_and_cache(const ELEMENT* qkv, const float* table, const int* positions,
                   const long long* slots, ELEMENT* __restrict__ q, ELEMENT* __restrict__ k, void* __restrict__ keys,
                   void* __restrict__ values, float* __restrict__ key_scales, float* __restrict__ value_scales,
                   const float* fixed_key_scales, const float* fixed_value_scales,
                   long long key_block_stride, long long key_head_stride, long long key_token_stride,
                   long long value_block_stride, long long value_head_stride, long long value_token_stride,
                   long long key_scale_block_stride, long long key_scale_head_stride,
                   long long value_scale_block_stride, long long value_scale_head_stride, int shift, int heads,
                   int kv_heads, int size, int rotary, int lanes, int code, int interleaved, int vectorised) {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const long long token = blockIdx.x;
    const int position = positions[token];
    const long long place = slots[token];
    const long long block = place >> shift;
    const int inside = static_cast<int>(place - (block << shift));
    const int chunk = threadIdx.x % lanes;
    const int first = kChunk * chunk;
    const Rotation turn = rotation_of(table + static_cast<long long>(position) * rotary, first, rotary, interleaved);

    const ELEMENT* source = qkv + token * (heads + 2 * kv_heads) * size;
    const int all = heads + 2 * kv_heads;
    const int at_once = kBlock / lanes;  // heads
    for (int begin = 0; begin < all; begin += at_once) {
        const int own = begin + static_cast<int>(threadIdx.x) / lanes;
        const bool stores = own < all && first < size;
        const int index = min(own, all - 1);
        const ELEMENT* head = source + static_cast<long long>(index) * size;
        Chunk<ELEMENT> value = {};
        if (first < size) value = step::load_chunk(head, chunk, size, vectorised);
        if (index < heads + kv_heads) {
            if (first < rotary) {
                const Chunk<ELEMENT> other =
                    partners(head, value, first, rotary, turn.partner, interleaved, vectorised);
#pragma unroll
                for (int i = 0; i < kChunk; ++i) {
                    value.element[i] = from_float<ELEMENT>(to_float(value.element[i]) * turn.cosine[i] +
                                                           to_float(other.element[i]) * turn.sine[i]);
                }
            }
            ELEMENT* out = index < heads ? q + (token * heads + index) * size
                                         : k + (token * kv_heads + index - heads) * size;
            if (stores) step::store_chunk(out, chunk, size, vectorised, value);
        }
        if (begin + at_once <= heads) continue;  // queries alone
        const bool is_value = index >= heads + kv_heads;
        const int kv_head = max(0, index - heads - (is_value ? kv_heads : 0));
        const long long at =
            is_value ? block * value_block_stride + kv_head * value_head_stride + inside * value_token_stride
                     : block * key_block_stride + kv_head * key_head_stride + inside * key_token_stride;
        void* cache = is_value ? values : keys;
        const bool caches = stores && index >= heads;
        if (code == kElement) {
            if (caches) step::store_chunk(static_cast<ELEMENT*>(cache) + at, chunk, size, vectorised, value);
        } else {
            float* scale = is_value ? value_scales + block * value_scale_block_stride + kv_head * value_scale_head_stride
                                    : key_scales + block * key_scale_block_stride + kv_head * key_scale_head_stride;
            const float* fixed = is_value ? fixed_value_scales : fixed_key_scales;
            store_codes(static_cast<unsigned char*>(cache) + at, scale + inside, chunk, size, lanes, code, vectorised,
                        caches, fixed == nullptr ? nullptr : fixed + kv_head, value);
        }
    }
}

// Queries of the absorbed form of multi-head latent attention, and the new tokens' latents.
//
// Computes, for each row:
//   out[head]    = (nope[head] of_keys[head], rope(rotary[head]))       the query of each head, for keys of kKeyDim
//   latents[slot] = (rms_norm(latent), rope(rotary key))                 what the cache holds of the new token
// The norm is rounded as in step/norm.cu, products are added in float32 and rounded once.
//
// Shapes and layout
//   q          [rows, heads * kQueryDim] ELEMENT, contiguous; of each head kNope features, then kRope that rotate
//   latent     [rows, kKeyDim] ELEMENT, rows `latent_stride` elements apart; the latent, then the rotary key
//   norm       [kRank] ELEMENT
//   kv_b       [heads, head_stride / kRank, kRank] ELEMENT; of each head the first kNope rows are of_keys
//   table      float [positions, kRope]: for each position kRope / 2 cosines, then as many sines
//   positions  int [rows]; slots long long [rows]: block << shift | token in the block
//   latents    [blocks, 1 << shift, a token], the cache, see mla/latents.cuh; strides of blocks and tokens in ELEMENT or,
//              in FP8, in bytes
//   out        [rows, heads, kKeyDim] ELEMENT, contiguous
//   All begin at multiples of 16 bytes, strides are multiples of 16 bytes.
//
// Macros: ELEMENT, __half or __nv_bfloat16; CODE, the CacheCode of the cache.
// Grid: (heads * kParts + 1, tiles of kTile rows), 128 threads. A block has kColumns features of the latent in one head,
// whose weights it fetches before the previous kernel has ended; the first of a head rotates too. The last block of a tile
// norms and stores the latents. Dynamic shared memory: Memory.
#include "attention/rope.cuh"
#include "common/tile.cuh"
#include "mla/latents.cuh"

constexpr int kTile = 16;     // rows of a block
constexpr int kColumns = 64;  // features of the latent of a block
constexpr int kParts = kRank / kColumns;
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

struct Memory {
    ELEMENT weights[kNope * kColumns];
    ELEMENT queries[kTile * kQueryDim];
};

// Rotate the pair of `head` from `dim` on.
__device__ __forceinline__ unsigned int rotated(const ELEMENT* head, int dim, const float* angles, bool interleaved) {
    const attention::Pair pair(dim, kRope, interleaved);
    attention::Unturned<ELEMENT> unturned;
    unturned.load(head, pair);
    const float2 x = unturned.turned(pair, attention::Angles(angles, pair, kRope));
    return pack_pair<ELEMENT>(x.x, x.y);
}

// Round eight features of a latent to codes, with the scale of their group, which 16 lanes have; the scale goes to `scale`.
// The piece becomes what the codes stand for. All lanes of a warp call it.
__device__ __forceinline__ uint2 round_piece(Vector16<ELEMENT>& piece, float& scale) {
    unsigned int largest = 0;  // magnitudes have the order of their bits, and NaN is above all of them
#pragma unroll
    for (int j = 0; j < kChunk; ++j) largest = max(largest, __float_as_uint(fabsf(to_float(piece.element[j]))));
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) largest = max(largest, __shfl_xor_sync(0xffffffff, largest, offset));
    const float ratio = fminf(fmaxf(__uint_as_float(largest) / largest_code(kFp8), 0x1p-24f), 0x1p7f);
    scale = __uint_as_float((__float_as_uint(ratio) + 0x7FFFFF) & 0xFF800000);  // up to the next power of two
    if (largest > 0x7F800000) scale = __uint_as_float(largest);                  // NaN
    const float inverse = 1.0f / scale;  // exact
    uint2 codes = {};
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
        unsigned int& word = j < 4 ? codes.x : codes.y;
        word |= to_e4m3(to_float(piece.element[j]) * inverse) << j % 4 * 8;
    }
    *reinterpret_cast<uint4*>(&piece) = eight_elements(codes, e4m3_factor(scale));
    return codes;
}

// Norm a latent, rotate its key, and store both at `to`, and as they are read from there at `copy`, unless it is null. One
// warp calls it.
__device__ __forceinline__ void store_latent(const ELEMENT* latent, const ELEMENT* norm, const float* angles, Cache* to,
                                             ELEMENT* copy, float eps, bool interleaved) {
    constexpr int kPieces = kRank / (32 * kChunk);
    const int lane = threadIdx.x % 32;
    Vector16<ELEMENT> pieces[kPieces];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        pieces[i] = *reinterpret_cast<const Vector16<ELEMENT>*>(latent + (lane + 32 * i) * kChunk);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            const float x = to_float(pieces[i].element[j]);
            sum = fmaf(x, x, sum);
        }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
    const float factor = rsqrtf(sum / kRank + eps);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        const int dim = (lane + 32 * i) * kChunk;
        const Vector16<ELEMENT> scale = *reinterpret_cast<const Vector16<ELEMENT>*>(norm + dim);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            const ELEMENT normed = from_float<ELEMENT>(to_float(pieces[i].element[j]) * factor);
            pieces[i].element[j] = from_float<ELEMENT>(to_float(normed) * to_float(scale.element[j]));
        }
        if constexpr (kCoded) {
            float group_scale;
            *reinterpret_cast<uint2*>(to + dim) = round_piece(pieces[i], group_scale);
            if (lane % 16 == 0) reinterpret_cast<float*>(to + kScalesAt)[2 * i + lane / 16] = group_scale;
        } else {
            *reinterpret_cast<Vector16<ELEMENT>*>(to + dim) = pieces[i];
        }
        if (copy != nullptr) *reinterpret_cast<Vector16<ELEMENT>*>(copy + dim) = pieces[i];
    }
    const unsigned int key = rotated(latent + kRank, 2 * lane, angles, interleaved);
    reinterpret_cast<unsigned int*>(to + (kCoded ? kRotaryAt : kRank))[lane] = key;
    if (copy != nullptr) *reinterpret_cast<unsigned int*>(copy + kRank + 2 * lane) = key;
}

// The previous kernel may write q, latent, positions and slots: no __restrict__ (see ptx::griddepcontrol_wait).
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    mla_queries(const ELEMENT* q, const ELEMENT* latent, const ELEMENT* __restrict__ norm,
                const ELEMENT* __restrict__ kv_b, const float* table, const int* positions, const long long* slots,
                Cache* latents, ELEMENT* out, long long latent_stride, long long head_stride, long long block_stride,
                long long token_stride, int rows, int heads, int shift, int interleaved, float eps) {
    extern __shared__ __align__(128) unsigned char shared[];
    Memory& memory = *reinterpret_cast<Memory*>(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = blockIdx.x / kParts, part = blockIdx.x % kParts;
    const int first_row = blockIdx.y * kTile;
    const int count = min(kTile, rows - first_row);
    const bool absorbs = head < heads;
    if (absorbs) {
        const ELEMENT* from = kv_b + head * head_stride + part * kColumns;
        for (int i = threadIdx.x; i < kNope * kColumns / kChunk; i += kThreads) {
            const int row = i / (kColumns / kChunk), chunk = i % (kColumns / kChunk);
            ptx::cp_async_16(ptx::shared_address(memory.weights + chunk_offset<kColumns>(row, chunk)),
                             from + row * kRank + chunk * kChunk);
        }
    }
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    if (!absorbs) {
        for (int row = first_row + warp; row < first_row + count; row += kWarps) {
            const long long slot = slots[row];
            Cache* to = latents + (slot >> shift) * block_stride + (slot & ((1 << shift) - 1)) * token_stride;
            store_latent(latent + row * latent_stride, norm, table + static_cast<long long>(positions[row]) * kRope, to,
                         nullptr, eps, interleaved);
        }
        return;
    }
    for (int i = threadIdx.x; i < kTile * kNope / kChunk; i += kThreads) {
        const int row = i / (kNope / kChunk), chunk = i % (kNope / kChunk);
        const long long at = static_cast<long long>(first_row + min(row, count - 1)) * heads + head;
        ptx::cp_async_16(ptx::shared_address(memory.queries + chunk_offset<kQueryDim>(row, chunk)),
                         q + at * kQueryDim + chunk * kChunk, row < count ? 16 : 0);
    }
    ptx::cp_async_commit();
    if (part == 0) {
        for (int i = threadIdx.x; i < count * (kRope / 2); i += kThreads) {
            const int row = first_row + i / (kRope / 2), dim = 2 * (i % (kRope / 2));
            const long long at = static_cast<long long>(row) * heads + head;
            const float* angles = table + static_cast<long long>(positions[row]) * kRope;
            *reinterpret_cast<unsigned int*>(out + at * kKeyDim + kRank + dim) =
                rotated(q + at * kQueryDim + kNope, dim, angles, interleaved);
        }
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    float sums[2][4] = {};
#pragma unroll
    for (int step = 0; step < kNope / 16; ++step) {
        ptx::uint32 a[4], b[4];
        load_block<kQueryDim, Second::below, false>(a, memory.queries, 0, 16 * step);
        load_block<kColumns, Second::below, true>(b, memory.weights, 16 * step, 16 * warp);
        ptx::mma_m16n8k16<ELEMENT>(sums[0], a, b[0], b[1]);
        ptx::mma_m16n8k16<ELEMENT>(sums[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // i % 2: which eight columns; i / 2: which eight rows
        const int row = lane / 4 + i / 2 * 8;
        const int column = part * kColumns + 16 * warp + i % 2 * 8 + 2 * (lane % 4);
        if (row < count) {
            const long long at = static_cast<long long>(first_row + row) * heads + head;
            *reinterpret_cast<unsigned int*>(out + at * kKeyDim + column) =
                pack_pair<ELEMENT>(sums[i % 2][i / 2 * 2], sums[i % 2][i / 2 * 2 + 1]);
        }
    }
}

// For prompts, whose latents are expanded: rotate the queries in place; norm, rotate and store the latents, also in `out`,
// [rows, kKeyDim] contiguous. Everything else as above. Grid: rows; 128 threads.
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_rope_and_cache(ELEMENT* q, const ELEMENT* latent, const ELEMENT* __restrict__ norm, const float* table,
                       const int* positions, const long long* slots, Cache* latents, ELEMENT* out,
                       long long latent_stride, long long block_stride, long long token_stride, int heads, int shift,
                       int interleaved, float eps) {
    const long long row = blockIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
#endif
    const float* angles = table + static_cast<long long>(positions[row]) * kRope;
    if (warp == 0) {
        const long long slot = slots[row];
        Cache* to = latents + (slot >> shift) * block_stride + (slot & ((1 << shift) - 1)) * token_stride;
        store_latent(latent + row * latent_stride, norm, angles, to, out + row * kKeyDim, eps, interleaved);
        return;
    }
    for (int head = warp - 1; head < heads; head += kWarps - 1) {
        ELEMENT* rotary = q + (row * heads + head) * kQueryDim + kNope;
        const unsigned int pair = rotated(rotary, 2 * lane, angles, interleaved);
        __syncwarp();  // all lanes have read their partners
        *reinterpret_cast<unsigned int*>(rotary + 2 * lane) = pair;
    }
}

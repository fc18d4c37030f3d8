// The scores that an indexer of sparse attention (DSA) gives the cached keys of each row's sequence.
//
// Computes scores[row, p] = sum over heads of weights[row, head] * max(0, q[row, head] . key p) for the keys p from 0 to the
// row's position. Products of 16-bit elements are exact in float32; they are added in float32 by the tensor cores, and so
// are the heads, in a fixed order: a score depends on its own query and key alone, not on the batch, the length or `tiles`.
//
// Shapes and layout
//   q            [rows, kHeads, kDim] ELEMENT, contiguous, rotated
//   weights      float [rows, kHeads], contiguous
//   positions    int [rows]
//   block_table  int [rows, n], the last stride 1: key p of a row is in block block_table[row, p >> shift] of the cache
//   keys         [blocks, 1 << shift, kDim] ELEMENT, rotated; strides of blocks and tokens in elements, multiples of 8;
//                shift is at least 4
//   scores       float [rows, width]; entries past a row's position are not written
//   tiles        of kTile keys, that a warp computes one after another
//   q, weights and keys begin at multiples of 16 bytes. What the cache holds past a row's position is not used.
//
// Macro ELEMENT: __half or __nv_bfloat16.
// Grid: (rows, blocks of kWarps * tiles * kTile keys), kThreads threads: rows of one sequence read its keys together.
//
// Algorithm. The heads are the rows of a matrix product and the keys its columns, so that a key is read once for all heads. No
// shared memory: the order of the features in a product is free, as long as it is that of both operands, so a lane loads 8
// neighbouring features of a key, 16 bytes, which are its part of the operands of two mma. The queries stay in registers for
// all tiles of a warp; the next tile's keys are loaded where those of this one have been used.
#include "common/numeric.cuh"
#include "common/ptx.cuh"

constexpr int kHeads = 32;
constexpr int kDim = 128;
constexpr int kTile = 16;  // keys
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kPieces = kDim / 32;       // of 32 features: 8 of each of four lanes
constexpr int kHeadTiles = kHeads / 16;  // the rows of mma
constexpr int kKeyTiles = kTile / 8;     // the columns of mma
constexpr unsigned int kAll = 0xffffffff;

// max(0, x), where NaN stays.
__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }

extern "C" __global__ void __launch_bounds__(kThreads, 3)
    index_scores(const ELEMENT* __restrict__ q, const float* __restrict__ weights, const int* __restrict__ positions,
                 const int* __restrict__ block_table, const ELEMENT* __restrict__ keys, float* __restrict__ scores,
                 long long block_table_stride, long long block_stride, long long token_stride, long long width, int shift,
                 int tiles) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = lane / 4, quarter = lane % 4;  // the lane's operands are of the keys `group` and `group` + 8
    const long long row = blockIdx.x;
    const int position = positions[row];
    const int first = blockIdx.y * tiles * kWarps;
    const int end = min(first + tiles * kWarps, position / kTile + 1);
    int tile = first + warp;
    if (tile >= end) return;
    const int* row_table = block_table + row * block_table_stride;
    const int mask = (1 << shift) - 1;
    // The lane's features of its first key of a tile. All keys of a tile are in one block of the cache.
    const auto place = [&](int tile) {
        const int key = tile * kTile;
        const long long block = row_table[key >> shift];
        return keys + block * block_stride + ((key & mask) + group) * token_stride + quarter * 8;
    };
    uint4 loaded[kPieces][kKeyTiles];
    const auto load = [&](const ELEMENT* from, int piece) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
            loaded[piece][n] = __ldcg(reinterpret_cast<const uint4*>(from + 8 * n * token_stride + 32 * piece));
        }
    };
    const ELEMENT* from = place(tile);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) load(from, piece);
    if (tile + kWarps < end) from = place(tile + kWarps);

    // A lane has the heads `group` and `group` + 8 of each 16.
    ptx::uint32 queries[kHeadTiles][kPieces][2][4];
    float factors[kHeadTiles][2];
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m) {
        const long long head = row * kHeads + 16 * m + group;
        const ELEMENT* own = q + head * kDim + quarter * 8;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            const uint4 low = *reinterpret_cast<const uint4*>(own + 32 * piece);
            const uint4 high = *reinterpret_cast<const uint4*>(own + 8 * kDim + 32 * piece);
            const ptx::uint32 pairs[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
            for (int i = 0; i < 8; ++i) queries[m][piece][i / 4][i % 4] = pairs[i / 4][i % 4];
        }
        factors[m][0] = weights[head];
        factors[m][1] = weights[head + 8];
    }
    float* out = scores + row * width;
#pragma unroll 1
    for (; tile < end; tile += kWarps) {
        const bool more = tile + kWarps < end;
        float products[kHeadTiles][kKeyTiles][4] = {};
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) {
                const uint4 key = loaded[piece][n];
#pragma unroll
                for (int m = 0; m < kHeadTiles; ++m) {
                    ptx::mma_m16n8k16<ELEMENT>(products[m][n], queries[m][piece][0], key.x, key.y);
                    ptx::mma_m16n8k16<ELEMENT>(products[m][n], queries[m][piece][1], key.z, key.w);
                }
            }
            if (more) load(from, piece);
        }
        if (tile + 2 * kWarps < end) from = place(tile + 2 * kWarps);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
            float sums[2] = {0.0f, 0.0f};  // of two neighbouring keys, over the lane's heads
#pragma unroll
            for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i % 2] = fmaf(relu(products[m][n][i]), factors[m][i / 2], sums[i % 2]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int offset = 4; offset < 32; offset *= 2) sums[i] += __shfl_xor_sync(kAll, sums[i], offset);
                const int key = tile * kTile + 8 * n + 2 * quarter + i;
                if (group == 0 && key <= position) out[key] = sums[i];
            }
        }
    }
}

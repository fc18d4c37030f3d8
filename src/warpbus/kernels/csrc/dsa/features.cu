// Rotary positions of an indexer's queries and keys, and the keys into their cache.
//
// Computes out_q = rope(q), out_k = rope(k) and keys[slot] = out_k: in float32, rounded once. The first `rotary` features of
// a head rotate, the others stay.
//
// Shapes and layout
//   q, out_q   [rows, heads, size] ELEMENT, contiguous; size is even
//   k, out_k   [rows, size] ELEMENT, contiguous
//   table      float [positions, rotary]: for each position rotary / 2 cosines, then as many sines
//   positions  int [rows]; slots long long [rows]: block << shift | token in the block
//   keys       [blocks, 1 << shift, size] ELEMENT; strides of blocks and tokens in elements, even
//   All begin at multiples of 4 bytes.
//
// Macro ELEMENT: __half or __nv_bfloat16.
// Grid: (rows, blocks of kThreads pairs of features), kThreads threads: a thread has one pair.
#include "attention/rope.cuh"

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
    index_rope_and_cache(const ELEMENT* __restrict__ q, const ELEMENT* __restrict__ k, const float* __restrict__ table,
                         const int* __restrict__ positions, const long long* __restrict__ slots,
                         ELEMENT* __restrict__ out_q, ELEMENT* __restrict__ out_k, ELEMENT* __restrict__ keys,
                         long long block_stride, long long token_stride, int heads, int size, int rotary, int shift,
                         int interleaved) {
    const long long row = blockIdx.x;
    const int at = blockIdx.y * kThreads + threadIdx.x;
    const int head = at / (size / 2), dim = at % (size / 2) * 2;
    if (head > heads) return;
    const bool is_key = head == heads;
    const long long first = is_key ? row * size : (row * heads + head) * size;
    const attention::Pair pair(dim, rotary, interleaved != 0);
    attention::Unturned<ELEMENT> unturned;
    unturned.load((is_key ? k : q) + first, pair);
    const float* angles = table + static_cast<long long>(positions[row]) * rotary;
    const float2 x = unturned.turned(pair, attention::Angles(angles, pair, rotary));
    const unsigned int turned = pack_pair<ELEMENT>(x.x, x.y);
    *reinterpret_cast<unsigned int*>((is_key ? out_k : out_q) + first + dim) = turned;
    if (is_key) {
        const long long slot = slots[row], inside = slot & ((1LL << shift) - 1);
        ELEMENT* to = keys + (slot >> shift) * block_stride + inside * token_stride;
        *reinterpret_cast<unsigned int*>(to + dim) = turned;
    }
}

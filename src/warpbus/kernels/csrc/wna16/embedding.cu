// out [count, k] = the rows `tokens` of a packed weight [n, k], dequantized: a quantized embedding.
//
// Shapes: any count, n, k >= 1; every token is at least 0 and less than n, otherwise the kernel traps, as torch's embedding
// does. ELEMENT = __half or __nv_bfloat16: the type of scales, zero points and out, which is contiguous. `codes`, `scales`
// and `zeros` have the layout of kernels/ops/packed.py, with codes of BITS = 2, 3, 4 or 8 bits; zeros is null if all zero
// points are `middle`. Column c belongs to group c >> group_shift of `groups`; a group has 32 columns or more.
//
// The result has the bits of QTensor.dequantize. Row r of a tile of 16 is in four lanes of each load of 64 columns (8 bits:
// 32), together with row r + 8 or r - 8: four threads take the place of these lanes, so that twice the bytes of the row are
// read. Threads stride over all loads of all tokens by the size of the grid.
#include "wna16/dequantize.cuh"

using Packed = Codes<ELEMENT, BITS>;

constexpr int kBlock = 128;
constexpr int kSteps = Packed::kLoadSteps;
constexpr int kColumns = 16 * kSteps;  // columns per load

// Two neighbouring columns; nothing is written from column k on.
__device__ __forceinline__ void store_pair(ELEMENT* row, int column, int k, ptx::uint32 pair) {
    if (k % 2 == 0) {
        if (column < k) *reinterpret_cast<ptx::uint32*>(row + column) = pair;
        return;
    }
    const ELEMENT* const both = reinterpret_cast<const ELEMENT*>(&pair);
    if (column < k) row[column] = both[0];
    if (column + 1 < k) row[column + 1] = both[1];
}

extern "C" __global__ void __launch_bounds__(kBlock, 8)
    wna16_embedding(const long long* __restrict__ tokens, const ptx::uint32* __restrict__ codes,
                    const ELEMENT* __restrict__ scales, const ELEMENT* __restrict__ zeros, ELEMENT* __restrict__ out,
                    int count, int n, int k, int groups, int group_shift, int middle) {
    const int loads_of_row = (k + 63) / 64 * Packed::kLoads;
    const long long quads = static_cast<long long>(count) * loads_of_row;  // of threads
    const int t = threadIdx.x % 4;
    const ptx::uint32 middle_pair = pack_pair<ELEMENT>(static_cast<float>(middle), static_cast<float>(middle));
    for (long long i = static_cast<long long>(blockIdx.x) * (kBlock / 4) + threadIdx.x / 4; i < quads;
         i += static_cast<long long>(gridDim.x) * (kBlock / 4)) {
        const long long place = i / loads_of_row;
        const int load = static_cast<int>(i - place * loads_of_row);
        const long long token = tokens[place];
        if (token < 0 || token >= n) __trap();
        const long long row_tile = token / 16;
        const int g = static_cast<int>(token % 8);
        const bool lower = token % 16 >= 8;  // row g + 8 of the tile
        ptx::uint32 words[Packed::kLoadWords];
        read_codes(words, codes + (row_tile * loads_of_row + load) * (32 * Packed::kLoadWords), 4 * g + t);
        ELEMENT* const target = out + place * k;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int column = load * kColumns + step * 16;
            const int group = min(column >> group_shift, groups - 1);  // there may be no group beyond k
            const long long pair = ((row_tile * groups + group) * 8 + g) * 2;
            const auto zero = Packed::zeros(
                zeros == nullptr ? middle_pair : *reinterpret_cast<const ptx::uint32*>(zeros + pair));
            ptx::uint32 a[4];
            Packed::integers(a, words, step, zero);
            scale_fragment<ELEMENT>(a, Packed::scales(*reinterpret_cast<const ptx::uint32*>(scales + pair)));
            store_pair(target, column + 2 * t, k, lower ? a[1] : a[0]);
            store_pair(target, column + 2 * t + 8, k, lower ? a[3] : a[2]);
        }
    }
}

// out [n, 64 tiles] = the columns of a packed weight [n, k] from column 64 * `first` on, dequantized.
//
// Shapes: any n, k >= 1. The last tile may extend beyond k; the values written there are undefined. ELEMENT = __half or
// __nv_bfloat16: the type of scales, zero points and out, which is contiguous. `codes`, `scales` and `zeros` have the layout
// of kernels/ops/packed.py, with codes of BITS = 2, 3, 4 or 8 bits; zeros is null if all zero points are `middle`.
// Column c belongs to group c >> group_shift of `groups`; a group has 32 columns or more. `stride` is k in tiles of 64
// columns.
//
// The result has the bits of QTensor.dequantize. A warp takes the codes of 16 rows by 64 columns (8 bits: 32), in a
// grid-stride loop. The four lanes of a quad write 16 bytes of a row at a time, one half of a 32-byte sector after the other.
#include "wna16/dequantize.cuh"

using Packed = Codes<ELEMENT, BITS>;

constexpr int kBlock = 256;
constexpr int kLoads = Packed::kLoads;
constexpr int kSteps = Packed::kLoadSteps;
constexpr int kColumns = 16 * kSteps;  // columns per load

extern "C" __global__ void __launch_bounds__(kBlock)
    wna16_dequantize(const ptx::uint32* __restrict__ codes, const ELEMENT* __restrict__ scales,
                     const ELEMENT* __restrict__ zeros, ELEMENT* __restrict__ out, int n, int stride, int first,
                     int tiles, int groups, int group_shift, int middle) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int loads_of_row = tiles * kLoads;
    const long long loads = static_cast<long long>((n + 15) / 16) * loads_of_row;
    const long long warps = static_cast<long long>(gridDim.x) * (kBlock / 32);
    const ptx::uint32 middle_pair = pack_pair<ELEMENT>(static_cast<float>(middle), static_cast<float>(middle));
    for (long long i = static_cast<long long>(blockIdx.x) * (kBlock / 32) + threadIdx.x / 32; i < loads; i += warps) {
        const int row_tile = static_cast<int>(i / loads_of_row);
        const int load = static_cast<int>(i - static_cast<long long>(row_tile) * loads_of_row);
        ptx::uint32 words[Packed::kLoadWords];
        const long long at = (static_cast<long long>(row_tile) * stride + first) * kLoads + load;
        read_codes(words, codes + at * (32 * Packed::kLoadWords), lane);
        const int row = row_tile * 16 + g;
        ELEMENT* const target = out + static_cast<long long>(row) * (64 * tiles) + load * kColumns + 2 * t;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            // There may be no group beyond k; the last group's scale is used.
            const int column = first * 64 + load * kColumns + step * 16;
            const int group = min(column >> group_shift, groups - 1);
            const long long pair = ((static_cast<long long>(row_tile) * groups + group) * 8 + g) * 2;
            const auto zero = Packed::zeros(
                zeros == nullptr ? middle_pair : *reinterpret_cast<const ptx::uint32*>(zeros + pair));
            ptx::uint32 a[4];
            Packed::integers(a, words, step, zero);
            scale_fragment<ELEMENT>(a, Packed::scales(*reinterpret_cast<const ptx::uint32*>(scales + pair)));
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // rows g and g + 8
                if (row + 8 * half >= n) continue;
                ELEMENT* const place = target + static_cast<long long>(8 * half) * (64 * tiles) + step * 16;
                *reinterpret_cast<ptx::uint32*>(place) = a[half];
                *reinterpret_cast<ptx::uint32*>(place + 8) = a[half + 2];
            }
        }
    }
}

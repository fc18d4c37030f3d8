// out [16 tiles, columns] = a rectangle of a matrix [n, k] whose weights are a trellis of 2 or 3 bits, dequantized.
//
// Macros
//   ELEMENT  __half or __nv_bfloat16: the type of out
//   BITS     2 or 3: of a weight; kernels/ops/trellis_packed.py describes the layout of codes, scales and signs
//
// Shapes: the rectangle begins at row 16 first_tile and column 128 first_block of the matrix, which has `blocks` blocks of 128
// columns in a row. `columns` is a multiple of 32, and of 128 unless the rectangle ends where the matrix does. out is
// contiguous and begins at a multiple of 16 bytes.
//
// W = scale * Q R^T (qtensor/trellis.py), where R^T multiplies 2^levels neighbouring columns by a Hadamard matrix over its
// root, and then each column by its sign. Sums of the numbers Q are exact in fp32; a weight is rounded to ELEMENT once.
//
// A warp takes 16 rows by 128 columns in a grid-stride loop. Lane 4 g + q has the numbers of the rows g and g + 8 in the
// columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of each of 8 tiles (decode.cuh), so that five of the seven levels of butterflies
// stay in its registers. For the two between lanes each lane gives half of its numbers away; then it has 8 neighbouring
// columns of a row together, and the four lanes of a quad write 64 bytes.
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "trellis/decode.cuh"

constexpr int kThreads = 256;

// The sum of the signed bytes that `ones` has ones for. Added to 1.5 * 2^23 it is in the lower bits of a float; a conversion would
// take four times as long.
__device__ __forceinline__ float sum_of(ptx::uint32 bytes, int ones) {
    constexpr float kShift = 12582912.0f;
    return __int_as_float(__dp4a(static_cast<int>(bytes), ones, __float_as_int(kShift))) - kShift;
}

__device__ __forceinline__ void butterfly(float& low, float& high) {
    const float sum = low + high, difference = low - high;
    low = sum;
    high = difference;
}

// A butterfly of numbers that lie in lanes `distance` apart. The lower lane does that of both lanes' first number, the upper
// one that of the second numbers.
__device__ __forceinline__ void butterfly_of_lanes(float& first, float& second, int distance) {
    const bool upper = threadIdx.x & distance;
    const float kept = upper ? second : first;
    const float other = __shfl_xor_sync(0xffffffff, upper ? first : second, distance);
    first = upper ? other : kept;
    second = upper ? kept : other;
    butterfly(first, second);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    trellis_dequantize(const uint4* __restrict__ codes, const float* __restrict__ scales,
                       const unsigned char* __restrict__ signs, ELEMENT* __restrict__ out, int blocks, int first_tile,
                       int tiles, int first_block, int columns, int levels) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const Window window(lane);
    const float unit = exp2f(-0.5f * levels) * kUnit;
    const int across = (columns + kBlock - 1) / kBlock;
    const long long pieces = static_cast<long long>(tiles) * across;
    const long long warps = static_cast<long long>(gridDim.x) * (kThreads / 32);
    for (long long i = static_cast<long long>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; i < pieces; i += warps) {
        const int tile = static_cast<int>(i / across), block = static_cast<int>(i - static_cast<long long>(tile) * across);
        const uint4* const from = codes + (static_cast<long long>(first_tile + tile) * blocks + first_block + block) * kVectors;
        float v[2][kUnits * kTiles][2][2];  // row g or g + 8, tile, half of its columns, one of two neighbours
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            const uint4 first = from[u * kWords + window.first], second = from[u * kWords + window.second];
            const ptx::uint32 low[kTiles] = {first.x, first.y, first.z, first.w};
            const ptx::uint32 high[kTiles] = {second.x, second.y, second.z, second.w};
#pragma unroll
            for (int c = 0; c < kTiles; ++c) {
                ptx::uint32 bytes[4];
                bytes_of(bytes, __funnelshift_r(low[c], high[c], window.shift));
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    v[s % 2][u * kTiles + c][s / 2][0] = sum_of(bytes[s], 0x00000101);
                    v[s % 2][u * kTiles + c][s / 2][1] = sum_of(bytes[s], 0x01010000);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            auto& row = v[h];
#pragma unroll
            for (int c = 0; c < 8; ++c) {
#pragma unroll
                for (int s = 0; s < 2; ++s) butterfly(row[c][s][0], row[c][s][1]);
#pragma unroll
                for (int e = 0; e < 2; ++e) butterfly(row[c][0][e], row[c][1][e]);
            }
#pragma unroll
            for (int level = 4; level < 7; ++level) {
                if (level >= levels) break;
                const int distance = 1 << (level - 4);
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    if (c & distance) continue;
#pragma unroll
                    for (int s = 0; s < 2; ++s) {
#pragma unroll
                        for (int e = 0; e < 2; ++e) butterfly(row[c][s][e], row[c + distance][s][e]);
                    }
                }
            }
            // The lanes' bits take the places of those of a half and of a tile, which now tell columns apart.
#pragma unroll
            for (int c = 0; c < 8; ++c) {
#pragma unroll
                for (int e = 0; e < 2; ++e) butterfly_of_lanes(row[c][0][e], row[c][1][e], 1);
            }
#pragma unroll
            for (int c = 0; c < 8; c += 2) {
#pragma unroll
                for (int s = 0; s < 2; ++s) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) butterfly_of_lanes(row[c][s][e], row[c + 1][s][e], 2);
                }
            }
            const int within = 16 * tile + g + 8 * h;
            const float scale = scales[16ll * first_tile + within] * unit;
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const int at = block * kBlock + 32 * t + 8 * q;
                if (at >= columns) continue;
                const unsigned sign = signs[first_block * (kBlock / 8) + at / 8];
                ptx::uint32 packed[4];
#pragma unroll
                for (int pair = 0; pair < 4; ++pair) {
                    const auto& own = row[2 * t + pair / 2][pair % 2];
                    packed[pair] = pack_pair<ELEMENT>(sign >> 2 * pair & 1 ? -own[0] * scale : own[0] * scale,
                                                      sign >> 2 * pair & 2 ? -own[1] * scale : own[1] * scale);
                }
                *reinterpret_cast<uint4*>(out + static_cast<long long>(within) * columns + at) =
                    make_uint4(packed[0], packed[1], packed[2], packed[3]);
            }
        }
    }
}

// Coordinate descent's loop over a block of columns: each is rounded anew to what is best while all others stay.
//
// For each row of each part and j = 0, 1, ..., columns - 1:
//   g = gradient[j] - sum over k < j of corner[k][j] * changes[k]
//   wanted = centred[j] * scale + g / corner[j][j]                   IEEE operations
//   new = clamp(round(wanted / scale) + zero, 0, max_code) - zero    half to even; IEEE division
//   changes[j] = (new - centred[j]) * scale, centred[j] = new
// The sum is that over the columns before j's tile of 16, in order, taken from gradient[j], and those of the tile, in
// order, each with one rounding (fma).
//
// Shapes and layout
//   gradient        float [parts][columns][rows], columns 1 to 128, the rows contiguous
//   corner          float [columns][columns], rows corner_row apart; what is below the diagonal is not used
//   centred         float [parts][columns][rows], codes less their zero points, the rows contiguous; written
//   scales, zeros   float [parts][groups][rows]
//   groups          int [columns], the group of each column
//   changes         float [parts][columns][rows], contiguous
//   vector          1: rows of the corner begin at multiples of 16 bytes
// One thread a row, 32, 64 or 128 in a block, and as many blocks for each part as its rows take. Dynamic shared memory,
// with T = ceil(columns / 16): 128 T (T + 1) floats for the corner and 16 (T - 1) floats a thread for the changes. Built
// like round_columns.cu.
#include "gptq/columns.cuh"

namespace {

struct Columns {
    float gradient[kTile], centred[kTile], scale[kTile], zero[kTile];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kMaxThreads)
    round_again(const float* __restrict__ gradient, const float* __restrict__ corner, float* __restrict__ centred,
                const float* __restrict__ scales, const float* __restrict__ zeros, const int* __restrict__ groups,
                float* __restrict__ changes, long long gradient_part, int gradient_column, long long corner_row,
                long long centred_part, int centred_column, long long scales_part, int scales_group,
                long long zeros_part, int zeros_group, int columns, int rows, int max_code, int vector) {
    extern __shared__ float4 storage[];
    const int count = (columns + kTile - 1) / kTile;
    float* tiles = reinterpret_cast<float*>(storage);
    float* history = tiles + tile_offset(count) + threadIdx.x;
    begin_corner(tiles, corner, corner_row, columns, vector);

    const Place place(rows);
    const float* own_gradient = gradient + place.part * gradient_part;
    float* own_centred = centred + place.part * centred_part;
    const float* own_scales = scales + place.part * scales_part + place.row;
    const float* own_zeros = zeros + place.part * zeros_part + place.row;
    const long long first = place.part * columns * rows;
    // A column is the same for all threads, and so is where it begins. Beyond the last column it is the last one again,
    // which nothing comes of.
    auto load = [&](int t) {
        Columns loaded;
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
            const long long column = min(t * kTile + i, columns - 1);
            const long long group = groups[column];
            loaded.gradient[i] = (own_gradient + column * gradient_column)[place.row];
            loaded.centred[i] = (own_centred + column * centred_column)[place.row];
            loaded.scale[i] = own_scales[group * scales_group];
            loaded.zero[i] = own_zeros[group * zeros_group];
        }
        return loaded;
    };

    Columns next = load(0);
    for (int t = 0; t < count; ++t) {
        const Columns now = next;
        if (t + 1 < count) next = load(t + 1);
        wait_corner(t);
        const float* tile = tiles + tile_offset(t);
        float pending[kTile], change[kTile];
        sum_history(pending, tile, history, t * kTile);
#pragma unroll
        for (int i = 0; i < kTile; ++i) pending[i] = now.gradient[i] - pending[i];
#pragma unroll
        for (int j = 0; j < kTile; ++j) {
            float coefficient[kTile];
            load_row(coefficient, tile, t * kTile + j);
            const Divisor scale(now.scale[j]), curvature(coefficient[j]);
            const float wanted = __fadd_rn(__fmul_rn(now.centred[j], now.scale[j]), curvature.divide(pending[j]));
            const float rounded = nearest_centred(wanted, scale, now.zero[j], max_code);
            change[j] = __fmul_rn(rounded - now.centred[j], now.scale[j]);
#pragma unroll
            for (int i = j + 1; i < kTile; ++i) pending[i] = fmaf(-coefficient[i], change[j], pending[i]);
            const long long column = t * kTile + j;
            if (place.live && column < columns) {
                (own_centred + column * centred_column)[place.row] = rounded;
                (changes + first + column * rows)[place.row] = change[j];
            }
        }
        if (t + 1 < count) remember(history, t, change);
    }
}

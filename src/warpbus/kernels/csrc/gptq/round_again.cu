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
// One thread a row. Dynamic shared memory, with T = ceil(columns / 16): 128 T (T + 1) floats for the corner and
// 16 (T - 1) floats a thread for the changes. Built like round_columns.cu.
#include "gptq/columns.cuh"

namespace {

struct Columns {
    float gradient[kTile], centred[kTile], scale[kTile], zero[kTile];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kMaxThreads)
    round_again(const float* __restrict__ gradient, const float* __restrict__ corner, float* __restrict__ centred,
                const float* __restrict__ scales, const float* __restrict__ zeros, const int* __restrict__ groups,
                float* __restrict__ changes, long long gradient_part, long long gradient_column, long long corner_row,
                long long centred_part, long long centred_column, long long scales_part, long long scales_group,
                long long zeros_part, long long zeros_group, int parts, int columns, int rows, int max_code,
                int vector) {
    extern __shared__ float4 storage[];
    const int count = (columns + kTile - 1) / kTile;
    float* tiles = reinterpret_cast<float*>(storage);
    float* history = tiles + tile_offset(count) + threadIdx.x;
    begin_corner(tiles, corner, corner_row, columns, vector);

    const Place place(parts, rows);
    const float* own_gradient = place.at(gradient, {gradient_part, gradient_column});
    const float* own_scales = place.at(scales, {scales_part, scales_group});
    const float* own_zeros = place.at(zeros, {zeros_part, zeros_group});
    float* own_centred = place.at(centred, {centred_part, centred_column});
    const long long first = place.part * columns * rows + place.row;
    auto load = [&](int t) {
        Columns loaded;
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
            const int column = t * kTile + i;
            const bool inside = column < columns;
            const int group = inside ? groups[column] : 0;
            loaded.gradient[i] = inside ? own_gradient[column * gradient_column] : 0.0f;
            loaded.centred[i] = inside ? own_centred[column * centred_column] : 0.0f;
            loaded.scale[i] = inside ? own_scales[group * scales_group] : 1.0f;
            loaded.zero[i] = inside ? own_zeros[group * zeros_group] : 0.0f;
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
            const float wanted =
                __fadd_rn(__fmul_rn(now.centred[j], now.scale[j]), curvature.divide(pending[j]));
            const float rounded = nearest_centred(wanted, scale, now.zero[j], max_code);
            change[j] = __fmul_rn(rounded - now.centred[j], now.scale[j]);
#pragma unroll
            for (int i = j + 1; i < kTile; ++i) pending[i] = fmaf(-coefficient[i], change[j], pending[i]);
            const int column = t * kTile + j;
            if (place.live && column < columns) {
                own_centred[column * centred_column] = rounded;
                changes[first + static_cast<long long>(column) * rows] = change[j];
            }
        }
        if (t + 1 < count) remember(history, t, change);
    }
}

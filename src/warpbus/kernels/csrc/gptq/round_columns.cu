// GPTQ's loop over a block of columns: each is rounded after it has made up for the errors of those before it.
//
// For each row of each part and j = 0, 1, ..., columns - 1:
//   t = target[j] + sum over k < j of errors[k] * corner[k][j]
//   codes[j] = clamp(round(t / scale) + zero, 0, max_code)         half to even; IEEE division
//   errors[j] = weight[j] - (codes[j] - zero) * scale              rounded once
// The sum is that over the columns before j's tile of 16, in order, added to target[j], and those of the tile, in order,
// each with one rounding (fma).
//
// Shapes and layout
//   weight, target   float [parts][columns][rows], columns 1 to 128, the rows contiguous
//   corner           float [columns][columns], rows corner_row apart; only what is above the diagonal is used
//   scales, zeros    float [parts][groups][rows]
//   groups           int [columns], the group of each column
//   codes, errors    unsigned char and float [parts][columns][rows], contiguous
//   vector           1: rows of the corner begin at multiples of 16 bytes
// One thread a row, 32, 64 or 128 in a block, and as many blocks for each part as its rows take. Dynamic shared memory,
// with T = ceil(columns / 16): 128 T (T + 1) floats for the corner and 16 (T - 1) floats a thread for the errors.
//
// Rounding is one dependent chain through all columns, so latency is what counts: what the next tile needs is loaded
// while this one is rounded.
#include "gptq/columns.cuh"

namespace {

struct Columns {
    float target[kTile], weight[kTile], scale[kTile], zero[kTile];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kMaxThreads)
    round_columns(const float* __restrict__ weight, const float* __restrict__ target, const float* __restrict__ corner,
                  const float* __restrict__ scales, const float* __restrict__ zeros, const int* __restrict__ groups,
                  unsigned char* __restrict__ codes, float* __restrict__ errors, long long weight_part,
                  int weight_column, long long target_part, int target_column, long long corner_row,
                  long long scales_part, int scales_group, long long zeros_part, int zeros_group, int columns,
                  int rows, int max_code, int vector) {
    extern __shared__ float4 storage[];
    const int count = (columns + kTile - 1) / kTile;
    float* tiles = reinterpret_cast<float*>(storage);
    float* history = tiles + tile_offset(count) + threadIdx.x;
    begin_corner(tiles, corner, corner_row, columns, vector);

    const Place place(rows);
    const float* own_weight = weight + place.part * weight_part;
    const float* own_target = target + place.part * target_part;
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
            loaded.weight[i] = (own_weight + column * weight_column)[place.row];
            loaded.target[i] = (own_target + column * target_column)[place.row];
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
        float wanted[kTile], left[kTile];
        sum_history(wanted, tile, history, t * kTile);
#pragma unroll
        for (int i = 0; i < kTile; ++i) wanted[i] = now.target[i] + wanted[i];
#pragma unroll
        for (int j = 0; j < kTile; ++j) {
            const Divisor scale(now.scale[j]);
            const float centred = nearest_centred(wanted[j], scale, now.zero[j], max_code);
            left[j] = fmaf(-centred, now.scale[j], now.weight[j]);
            float coefficient[kTile];
            load_row(coefficient, tile, t * kTile + j);
#pragma unroll
            for (int i = j + 1; i < kTile; ++i) wanted[i] = fmaf(coefficient[i], left[j], wanted[i]);
            const long long column = t * kTile + j;
            if (place.live && column < columns) {
                (codes + first + column * rows)[place.row] = static_cast<unsigned char>(centred + now.zero[j]);
                (errors + first + column * rows)[place.row] = left[j];
            }
        }
        if (t + 1 < count) remember(history, t, left);
    }
}

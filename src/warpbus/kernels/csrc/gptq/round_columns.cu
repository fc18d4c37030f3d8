// GPTQ's loop over a block of columns: each column is rounded after the errors of earlier columns have been added to it.
//
// For each row of each part and j = 0, 1, ..., columns - 1:
//   t = target[j] + sum over k < j of errors[k] * corner[k][j]
//   centred[j] = clamp(round(t / scale) + zero, 0, max_code) - zero   half to even; IEEE division
//   errors[j] = weight[j] - centred[j] * scale                        rounded once
// The sum is that over the columns before j's tile of 16, in order, added to target[j], and those of the tile, in order,
// each with one rounding (fma).
//
// Shapes and layout
//   weight, target   float [parts][columns][rows], columns 1 to 128, the rows contiguous
//   corner           float [matrices][columns][columns], rows corner_row apart; only what is above the diagonal is used
//   scales, zeros    float [parts][groups][rows]
//   groups           int [matrices][columns], the group of each column
//   centred          float [parts][columns][rows], the rows contiguous: the codes less their zero points
//   errors           float or bfloat16 [parts][columns][rows], the rows contiguous: rounded where nothing is summed up
//                    from them any more
//   matrix_parts     parts of each matrix, which follow one another
//   vector           1: rows of the corner begin at multiples of 16 bytes
// 128 threads per block, and as many blocks for each part as its rows take, 32 a block. Dynamic shared memory, with
// T = ceil(columns / 16): 128 T (T + 1) floats for the corner.
//
// Estimate: rounding is one dependent chain through all columns. 20 cycles for the quotient, 8 to round, 10 to clamp and 8 to
// the next column are a latency of 46, or 6 K for 128 columns, which hides the other products of a tile and the shuffles.
// Adding results to later tiles takes 28 times 16 quads from shared memory and 64 products for each of the four warps, 4 to 7
// K cycles. With 2 K until the first column can be rounded that is 12 to 15 K cycles, 7 to 9 us, as long as there are no more
// blocks than multiprocessors; with many more, a block's 34 K instructions take 9 K cycles of a multiprocessor.
#include "gptq/columns.cuh"

namespace {

// A lane's part of a tile.
struct Columns {
    float target[kRows][kOwn], weight[kRows][kOwn], scale[kRows][kOwn], zero[kRows][kOwn];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    round_columns(const float* __restrict__ weight, const float* __restrict__ target, const float* __restrict__ corner,
                  const float* __restrict__ scales, const float* __restrict__ zeros, const int* __restrict__ groups,
                  float* __restrict__ centred, void* __restrict__ errors, long long weight_part, int weight_column,
                  long long target_part, int target_column, long long corner_matrix, long long corner_row, long long scales_part,
                  int scales_group, long long zeros_part, int zeros_group, long long centred_part, int centred_column,
                  long long errors_part, int errors_column, int errors_are_narrow, int columns, int rows, int max_code,
                  long long groups_matrix, int matrix_parts, int vector) {
    extern __shared__ float4 storage[];
    __shared__ int own_groups[kTile * kTiles];
    const int count = (columns + kTile - 1) / kTile;
    float* tiles = reinterpret_cast<float*>(storage);
    const Place place(rows, matrix_parts);
    const float* own_corner = corner + place.matrix * corner_matrix;
    begin_corner(tiles, own_corner, corner_row, columns, 0, 1, vector);
    load_groups(own_groups, groups + place.matrix * groups_matrix, columns);

    const float* own_weight = weight + place.part * weight_part;
    const float* own_target = target + place.part * target_part;
    const float* own_scales = scales + place.part * scales_part;
    const float* own_zeros = zeros + place.part * zeros_part;
    float* own_centred = centred + place.part * centred_part;
    const Carried carried{errors, errors_part, errors_column, errors_are_narrow};
    // Beyond the last column it loads the last one again; the results are not used.
    auto load = [&](int t) {
        Columns loaded;
#pragma unroll
        for (int e = 0; e < kOwn; ++e) {
            const int column = t * kTile + place.lane * kOwn + e;
            const long long group = own_groups[column];
            const long long valid = min(column, columns - 1);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                loaded.weight[r][e] = (own_weight + valid * weight_column)[place.row[r]];
                loaded.target[r][e] = (own_target + valid * target_column)[place.row[r]];
                loaded.scale[r][e] = (own_scales + group * scales_group)[place.row[r]];
                loaded.zero[r][e] = (own_zeros + group * zeros_group)[place.row[r]];
            }
        }
        return loaded;
    };

    Sums sums;
    Columns next = load(0);
    begin_corner(tiles, own_corner, corner_row, columns, 1, count, vector);
    wait_corner<1>();  // for tile 0
    for (int t = 0; t < count; ++t) {
        Columns now = next;
        if (t + 1 < count) next = load(t + 1);
        const float* tile = tiles + tile_offset(t);
        float wanted[kRows][kTile], left[kRows][kTile];
        Divisor divisors[kRows][kOwn];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int e = 0; e < kOwn; ++e) divisors[r][e] = Divisor(now.scale[r][e]);
#pragma unroll
            for (int i = 0; i < kTile; ++i) {
                wanted[r][i] = of_lane(now.target[r][i % kOwn] + sums.of[0][r][i % kOwn], i / kOwn);
            }
        }
#pragma unroll
        for (int j = 0; j < kTile; ++j) {
            const int owner = j / kOwn, e = j % kOwn;
            float coefficient[kTile];
            load_row(coefficient, tile, t * kTile + j);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const Divisor scale = of_lane(divisors[r][e], owner);
                const float zero = of_lane(now.zero[r][e], owner);
                const float code = nearest_centred(wanted[r][j], scale, zero, max_code);
                left[r][j] = fmaf(-code, scale.value, of_lane(now.weight[r][e], owner));
#pragma unroll
                for (int i = j + 1; i < kTile; ++i) wanted[r][i] = fmaf(coefficient[i], left[r][j], wanted[r][i]);
                // Values that no lane needs any more are overwritten by the results.
                if (place.lane == owner) {
                    now.target[r][e] = code;
                    now.weight[r][e] = left[r][j];
                }
            }
        }
#pragma unroll
        for (int e = 0; e < kOwn; ++e) {
            const long long column = t * kTile + place.lane * kOwn + e;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if (place.live[r] && column < columns) {
                    (own_centred + column * centred_column)[place.row[r]] = now.target[r][e];
                    carried.store(place.part, column, place.row[r], now.weight[r][e]);
                }
            }
        }
        if (t == 0) wait_corner<0>();  // for the others
        sums.carry_over(tiles, t, count, place.lane, left);
    }
}

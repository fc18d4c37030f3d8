// Coordinate descent over a block of columns: each column is rounded again to its optimum while all others are fixed.
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
//   corner          float [matrices][columns][columns], rows corner_row apart; what is below the diagonal is not used
//   centred         float [parts][columns][rows], codes less their zero points, the rows contiguous; written
//   scales, zeros   float [parts][groups][rows]
//   groups          int [matrices][columns], the group of each column
//   changes         float or bfloat16 [parts][columns][rows], the rows contiguous: rounded where nothing is summed up
//                   from them any more
//   matrix_parts    parts of each matrix, which follow one another
//   vector          1: rows of the corner begin at multiples of 16 bytes
// 128 threads per block, and as many blocks for each part as its rows take, 32 a block. Dynamic shared memory, with
// T = ceil(columns / 16): 128 T (T + 1) floats for the corner. Built like round_columns.cu, with a second quotient in the
// chain: by estimate 74 cycles per column, 15 to 19 K for 128 columns with all else, 9 to 11 us.
#include "gptq/columns.cuh"

namespace {

// A lane's part of a tile.
struct Columns {
    float gradient[kRows][kOwn], centred[kRows][kOwn], scale[kRows][kOwn], zero[kRows][kOwn];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    round_again(const float* __restrict__ gradient, const float* __restrict__ corner, float* __restrict__ centred,
                const float* __restrict__ scales, const float* __restrict__ zeros, const int* __restrict__ groups,
                void* __restrict__ changes, long long gradient_part, int gradient_column, long long corner_matrix, long long corner_row,
                long long centred_part, int centred_column, long long scales_part, int scales_group,
                long long zeros_part, int zeros_group, long long changes_part, int changes_column,
                int changes_are_narrow, int columns, int rows, int max_code, long long groups_matrix, int matrix_parts,
                int vector) {
    extern __shared__ float4 storage[];
    __shared__ int own_groups[kTile * kTiles];
    const int count = (columns + kTile - 1) / kTile;
    float* tiles = reinterpret_cast<float*>(storage);
    const Place place(rows, matrix_parts);
    const float* own_corner = corner + place.matrix * corner_matrix;
    begin_corner(tiles, own_corner, corner_row, columns, 0, 1, vector);
    load_groups(own_groups, groups + place.matrix * groups_matrix, columns);

    const float* own_gradient = gradient + place.part * gradient_part;
    float* own_centred = centred + place.part * centred_part;
    const float* own_scales = scales + place.part * scales_part;
    const float* own_zeros = zeros + place.part * zeros_part;
    const Carried carried{changes, changes_part, changes_column, changes_are_narrow};
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
                loaded.gradient[r][e] = (own_gradient + valid * gradient_column)[place.row[r]];
                loaded.centred[r][e] = (own_centred + valid * centred_column)[place.row[r]];
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
        float pending[kRows][kTile], change[kRows][kTile];
        Divisor divisors[kRows][kOwn];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int e = 0; e < kOwn; ++e) divisors[r][e] = Divisor(now.scale[r][e]);
#pragma unroll
            for (int i = 0; i < kTile; ++i) {
                pending[r][i] = of_lane(now.gradient[r][i % kOwn] - sums.of[0][r][i % kOwn], i / kOwn);
            }
        }
#pragma unroll
        for (int j = 0; j < kTile; ++j) {
            const int owner = j / kOwn, e = j % kOwn;
            float coefficient[kTile];
            load_row(coefficient, tile, t * kTile + j);
            const Divisor curvature(coefficient[j]);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const Divisor scale = of_lane(divisors[r][e], owner);
                const float before = of_lane(now.centred[r][e], owner);
                const float wanted = __fadd_rn(__fmul_rn(before, scale.value), curvature.divide(pending[r][j]));
                const float rounded = nearest_centred(wanted, scale, of_lane(now.zero[r][e], owner), max_code);
                change[r][j] = __fmul_rn(rounded - before, scale.value);
#pragma unroll
                for (int i = j + 1; i < kTile; ++i) pending[r][i] = fmaf(-coefficient[i], change[r][j], pending[r][i]);
                // Values that no lane needs any more are overwritten by the results.
                if (place.lane == owner) {
                    now.centred[r][e] = rounded;
                    now.gradient[r][e] = change[r][j];
                }
            }
        }
#pragma unroll
        for (int e = 0; e < kOwn; ++e) {
            const long long column = t * kTile + place.lane * kOwn + e;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if (place.live[r] && column < columns) {
                    (own_centred + column * centred_column)[place.row[r]] = now.centred[r][e];
                    carried.store(place.part, column, place.row[r], now.gradient[r][e]);
                }
            }
        }
        if (t == 0) wait_corner<0>();  // for the others
        sums.carry_over(tiles, t, count, place.lane, change);
    }
}

// The scales of one group at their least-squares optimum, where that helps after it is rounded to the dtype of scales.
//
// For each row of each part, with c and g the `size` numbers of centred and gradient in the columns `members`:
//   slope = c . g;  curvature = c . corner c
//   change = stored(scale + slope / max(curvature, the least normal float)) - scale
//   change = 0 unless change (change curvature - 2 slope) < 0, scale + change != 0, and change is finite
//   scales += change;  delta[j] = c[j] * change
// The curvature is twice what is above the diagonal and once what is on it, both in order of the columns.
//
// Shapes and layout
//   gradient, centred   float [parts][columns][rows], the rows contiguous
//   members             long long [size], 1 to 128 columns
//   corner              float [size][size], symmetric, rows corner_row apart; what is below the diagonal is not used
//   scales              float [parts][rows]; written
//   delta               float [parts][size][rows], contiguous
//   scale_dtype         a number of scale_dtype.cuh
//   vector              1: rows of the corner begin at multiples of 16 bytes
// One thread a row, 32, 64 or 128 in a block, and as many blocks for each part as its rows take. Dynamic shared memory,
// with T = ceil(size / 16): 128 T (T + 1) floats for the corner and 16 (T - 1) floats a thread for c.
#include "gptq/columns.cuh"
#include "gptq/scale_dtype.cuh"

constexpr float kTiny = 1.17549435e-38f;  // the least normal float

extern "C" __global__ void __launch_bounds__(kMaxThreads)
    fit_scales(const float* __restrict__ gradient, const long long* __restrict__ members,
               const float* __restrict__ centred, const float* __restrict__ corner, float* __restrict__ scales,
               float* __restrict__ delta, long long gradient_part, long long gradient_column, long long centred_part,
               long long centred_column, long long corner_row, long long scales_part, int size, int rows,
               int scale_dtype, int vector) {
    extern __shared__ float4 storage[];
    const int count = (size + kTile - 1) / kTile;
    float* tiles = reinterpret_cast<float*>(storage);
    float* history = tiles + tile_offset(count) + threadIdx.x;
    begin_corner(tiles, corner, corner_row, size, vector);

    const Place place(rows);
    const float* own_gradient = gradient + place.part * gradient_part + place.row;
    const float* own_centred = centred + place.part * centred_part + place.row;
    float slope = 0.0f, beside = 0.0f, on = 0.0f;
    for (int t = 0; t < count; ++t) {
        float own[kTile], sum[kTile];
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
            const int k = t * kTile + i;
            own[i] = 0.0f;
            if (k < size) {
                own[i] = own_centred[members[k] * centred_column];
                slope = fmaf(own[i], own_gradient[members[k] * gradient_column], slope);
            }
        }
        wait_corner(t);
        const float* tile = tiles + tile_offset(t);
        sum_history(sum, tile, history, t * kTile);
#pragma unroll
        for (int j = 0; j < kTile; ++j) {
            float coefficient[kTile];
            load_row(coefficient, tile, t * kTile + j);
            beside = fmaf(own[j], sum[j], beside);
            on = fmaf(__fmul_rn(own[j], own[j]), coefficient[j], on);
#pragma unroll
            for (int i = j + 1; i < kTile; ++i) sum[i] = fmaf(coefficient[i], own[j], sum[i]);
        }
        if (t + 1 < count) remember(history, t, own);
    }
    if (!place.live) return;

    const float curvature = fmaf(2.0f, beside, on);
    float& scale = scales[place.part * scales_part + place.row];
    float change = as_stored(scale + slope / fmaxf(curvature, kTiny), scale_dtype) - scale;
    const bool better = __fmul_rn(change, __fsub_rn(__fmul_rn(change, curvature), 2.0f * slope)) < 0.0f;
    // Infinity and NaN are what differs from itself after subtraction.
    if (!better || scale + change == 0.0f || change - change != 0.0f) change = 0.0f;
    scale += change;
    const long long first = place.part * size * rows + place.row;
    for (int k = 0; k < size; ++k) {
        delta[first + static_cast<long long>(k) * rows] = own_centred[members[k] * centred_column] * change;
    }
}

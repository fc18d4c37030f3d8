// The factor of a corner, S = U U^T with U upper triangular, and U's inverse: one block for at most 128 columns.
//
// In place, as Gauss and Jordan invert, from the last column to the first. T begins as S; for j = columns - 1, ..., 0:
//   p = T[j][j], u = T[.][j] / sqrt(p) above the diagonal, w = T[j][.] / sqrt(p)
//   T[i][k] -= u[i] w[k]   for i < j and k != j: left of column j what is still to be factored, right of it the inverse
//   T[i][j] = -u[i] / sqrt(p), T[j][k] = w[k] for k > j, T[j][j] = 1 / sqrt(p)
// Then u and sqrt(p) are column j of U, and what T has become is U's inverse.
//
// Shapes and layout
//   matrix, upper, inverse   float [columns][columns], rows ..._row apart, columns 1 to 128; matrix is symmetric, and
//                            what is below its diagonal is not read; the others get zeros below theirs
//   failed                   int, set to 1 if a p is not positive; upper and inverse mean nothing then
// 256 threads, one block; dynamic shared memory: 4 * 128 * 129 bytes. A thread has 8 rows and 2 x 4 columns of T in
// registers; a warp's rows are 16 neighbours, so that it has nothing more to do once they are through. Shared memory is read
// and written without bank conflicts. A step is a chain, of a barrier, reads, a root and a product, beside which two warps
// of a scheduler have 64 products each: by estimate 350 cycles, and 25 us for 128 columns.

namespace {

constexpr int kSize = 128;
constexpr int kThreads = 256;
constexpr int kRows = 8;     // of a thread
constexpr int kColumns = 4;  // of a thread, in each half of the matrix
constexpr int kAcross = 16;  // threads that share rows
constexpr int kHalf = kSize / 2;
constexpr int kPitch = kSize + 1;

__device__ __forceinline__ void load_four(float (&to)[4], const float* from) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

__device__ __forceinline__ void store_four(float* to, const float (&from)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    factor_corner(const float* __restrict__ matrix, float* __restrict__ upper, float* __restrict__ inverse,
                  int* __restrict__ failed, long long matrix_row, long long upper_row, long long inverse_row,
                  int columns) {
    extern __shared__ float factor[];  // U, rows kPitch apart
    // Column and row of the step, twice: while some still read those of a step, others write those of the next one.
    __shared__ alignas(16) float column[2][kSize], row[2][kSize];
    const int thread = threadIdx.x;
    const int across = thread % kAcross;
    const int first_row = thread / kAcross * kRows;
    const int first_column = across * kColumns;
    float t[2][kRows][kColumns];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                const int i = first_row + r, k = h * kHalf + first_column + c;
                const bool there = i < columns && k < columns;
                t[h][r][c] = there ? matrix[min(i, k) * matrix_row + max(i, k)] : static_cast<float>(i == k);
            }
        }
    }
    for (int base = (columns - 1) / kRows * kRows; base >= 0; base -= kRows) {
        const bool own_rows = first_row == base;
        const bool is_before = first_row < base;
        const bool warp_is_through = thread / 32 * (2 * kRows) > base;
        const int half = base / kHalf;
#pragma unroll
        for (int step = kRows - 1; step >= 0; --step) {
            const int j = base + step;
            if (j >= columns) continue;
            const int own = step % kColumns;
            const bool own_column = j % kHalf / kColumns == across;
            float* shared_column = column[step % 2];
            float* shared_row = row[step % 2];
            if (own_column) {
#pragma unroll
                for (int q = 0; q < kRows; q += 4) {
                    float four[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e) four[e] = half ? t[1][q + e][own] : t[0][q + e][own];
                    store_four(shared_column + first_row + q, four);
                }
            }
            if (own_rows) {
                store_four(shared_row + first_column, t[0][step]);
                store_four(shared_row + kHalf + first_column, t[1][step]);
            }
            __syncthreads();
            const float p = shared_row[j];
            float scale = rsqrtf(p);
            scale = scale * (1.5f - 0.5f * p * scale * scale);  // to the last digit
            if (thread < kSize) factor[thread * kPitch + j] = thread < j ? shared_column[thread] * scale : p * scale;
            if (thread == 0 && !(p > 0.0f)) *failed = 1;
            if (warp_is_through) continue;
            float u[kRows], w[2][kColumns];
#pragma unroll
            for (int q = 0; q < kRows; q += 4) {
                float four[4];
                load_four(four, shared_column + first_row + q);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const bool is_above = q + e < step ? is_before || own_rows : is_before;
                    u[q + e] = is_above ? four[e] * scale : 0.0f;
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                load_four(w[h], shared_row + h * kHalf + first_column);
#pragma unroll
                for (int c = 0; c < kColumns; ++c) w[h][c] *= scale;
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
#pragma unroll
                    for (int c = 0; c < kColumns; ++c) t[h][r][c] = fmaf(-u[r], w[h][c], t[h][r][c]);
                }
            }
            if (own_column) {
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    if (r < step ? is_before || own_rows : is_before) {
                        if (half) {
                            t[1][r][own] = -u[r] * scale;
                        } else {
                            t[0][r][own] = -u[r] * scale;
                        }
                    }
                }
            }
            if (own_rows) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int c = 0; c < kColumns; ++c) {
                        const int k = h * kHalf + first_column + c;
                        t[h][step][c] = k > j ? w[h][c] : k == j ? scale : 0.0f;
                    }
                }
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                const int i = first_row + r, k = h * kHalf + first_column + c;
                if (i < columns && k < columns) inverse[i * inverse_row + k] = t[h][r][c];
            }
        }
    }
    __syncthreads();
    for (int index = thread; index < columns * kSize; index += kThreads) {
        const int i = index / kSize, k = index % kSize;
        if (k < columns) upper[i * upper_row + k] = i <= k ? factor[i * kPitch + k] : 0.0f;
    }
}

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
// 256 threads, one block. A thread has 8 rows and 2 x 4 columns of T in registers. A warp's rows are 16 neighbours, so that
// it has nothing more to do once they are through; what is in shared memory is read without bank conflicts. A step is a
// chain of a barrier, four reads, a root and 64 products in each of two warps of a scheduler: by estimate 250 cycles,
// half of them waits, and 18 us for 128 columns.

namespace {

constexpr int kSize = 128;
constexpr int kRows = 8;        // of a thread
constexpr int kColumns = 4;     // of a thread, in each half of the matrix
constexpr int kAcross = 16;     // threads that share rows
constexpr int kHalf = kSize / 2;

}  // namespace

extern "C" __global__ void __launch_bounds__(256, 1)
    factor_corner(const float* __restrict__ matrix, float* __restrict__ upper, float* __restrict__ inverse,
                  int* __restrict__ failed, long long matrix_row, long long upper_row, long long inverse_row,
                  int columns) {
    // Column and row of the step, twice: while some still read those of a step, others write those of the next one.
    __shared__ alignas(16) float column[2][kSize], row[2][kSize];
    const int across = threadIdx.x % kAcross;
    const int first_row = threadIdx.x / kAcross * kRows;
    const int last_of_warp = threadIdx.x / 32 * (2 * kRows);  // the first of its rows: the last to be through
    const int first_column = across * kColumns;
    float t[kRows][2][kColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                const int i = first_row + r, k = h * kHalf + first_column + c;
                const bool there = i < columns && k < columns;
                t[r][h][c] = there ? matrix[min(i, k) * matrix_row + max(i, k)] : static_cast<float>(i == k);
            }
        }
    }
    for (int base = (columns - 1) / kRows * kRows; base >= 0; base -= kRows) {
        const bool own_rows = first_row == base;
        const int half = base / kHalf;
#pragma unroll
        for (int step = kRows - 1; step >= 0; --step) {
            const int j = base + step;
            if (j >= columns) continue;
            const bool own_column = j % kHalf / kColumns == across;
            float* shared_column = column[step % 2];
            float* shared_row = row[step % 2];
            if (own_column) {
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    shared_column[first_row + r] = half ? t[r][1][step % kColumns] : t[r][0][step % kColumns];
                }
            }
            if (own_rows) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int c = 0; c < kColumns; ++c) shared_row[h * kHalf + first_column + c] = t[step][h][c];
                }
            }
            __syncthreads();
            const float p = shared_row[j];
            float scale = rsqrtf(p);
            scale = scale * (1.5f - 0.5f * p * scale * scale);  // to the last digit
            if (threadIdx.x == 0 && !(p > 0.0f)) *failed = 1;
            if (threadIdx.x < columns) {
                const int i = threadIdx.x;
                upper[i * upper_row + j] = i < j ? shared_column[i] * scale : i == j ? p * scale : 0.0f;
            }
            if (last_of_warp > j) continue;
            float w[2][kColumns];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float4 four = *reinterpret_cast<const float4*>(shared_row + h * kHalf + first_column);
                w[h][0] = four.x * scale, w[h][1] = four.y * scale, w[h][2] = four.z * scale, w[h][3] = four.w * scale;
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const float u = first_row + r < j ? shared_column[first_row + r] * scale : 0.0f;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int c = 0; c < kColumns; ++c) t[r][h][c] = fmaf(-u, w[h][c], t[r][h][c]);
                }
                if (own_column && first_row + r < j) {
                    if (half) {
                        t[r][1][step % kColumns] = -u * scale;
                    } else {
                        t[r][0][step % kColumns] = -u * scale;
                    }
                }
            }
            if (own_rows) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int c = 0; c < kColumns; ++c) {
                        const int k = h * kHalf + first_column + c;
                        t[step][h][c] = k > j ? w[h][c] : k == j ? scale : 0.0f;
                    }
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                const int i = first_row + r, k = h * kHalf + first_column + c;
                if (i < columns && k < columns) inverse[i * inverse_row + k] = t[r][h][c];
            }
        }
    }
}

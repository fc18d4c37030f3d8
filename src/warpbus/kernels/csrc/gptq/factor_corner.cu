// The factor of a corner, S = U U^T with U upper triangular, and U's inverse: one block for at most 128 columns.
//
// In place, as Gauss and Jordan invert, eight columns J at a time, from the last ones to the first. T begins as S:
//   U[J][J] and its inverse V from T[J][J]
//   P = T[.][J] V^T in the rows before J, which are U's in these columns; W = V T[J][.], with W[.][J] = V
//   T[i][k] -= P[i][.] W[.][k]   for i before J, with T[i][J] = 0 before: in columns before J what is still to be factored,
//                                in the others the inverse
//   T[J][k] = W[.][k]            for k in and behind J: the inverse's
//
// Shapes and layout
//   matrix, upper, inverse   float [columns][columns], rows ..._row apart, columns 1 to 128; matrix is symmetric, and
//                            what is below its diagonal is not read; the others get zeros below theirs
//   failed                   int, set to 1 if S is not positive definite; upper and inverse mean nothing then
// 256 threads, one block; dynamic shared memory: 4 * 128 * 129 bytes. A thread has 8 rows and 2 x 4 columns of T in
// registers; a warp's rows are 16 neighbours, so that it has nothing more to do once they are through. What is
// sequential, the eight columns of T[J][J], each of four warps does for itself: its lanes need it at once. An estimate
// of 800 cycles for that and 300 to 1,100 for the products, 16 times, is 14 us; an H200 takes 36. A column at a time an
// H100 took 61.

namespace {

constexpr int kSize = 128;
constexpr int kThreads = 256;
constexpr int kStep = 8;     // columns at a time, and rows of a thread
constexpr int kColumns = 4;  // of a thread, in each half of the matrix
constexpr int kAcross = 16;  // threads that share rows
constexpr int kHalf = kSize / 2;
constexpr int kPitch = kSize + 1;

__device__ __forceinline__ void load_four(float* to, const float* from) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

__device__ __forceinline__ void store_four(float* to, const float* from) {
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}

__device__ __forceinline__ void load_eight(float* to, const float* from) {
    load_four(to, from);
    load_four(to + 4, from + 4);
}

__device__ __forceinline__ void store_eight(float* to, const float* from) {
    store_four(to, from);
    store_four(to + 4, from + 4);
}

// S = U U^T in place, of what is on and above the diagonal, and U's inverse. Gives whether S is positive definite.
__device__ __forceinline__ bool factor_step(float (&s)[kStep][kStep], float (&inverse)[kStep][kStep]) {
    bool positive = true;
#pragma unroll
    for (int j = kStep - 1; j >= 0; --j) {
        const float p = s[j][j];
        positive = positive && p > 0.0f;
        float scale = rsqrtf(p);
        scale = scale * (1.5f - 0.5f * p * scale * scale);  // to the last digit
        s[j][j] = p * scale;
        inverse[j][j] = scale;
#pragma unroll
        for (int i = 0; i < j; ++i) s[i][j] *= scale;
#pragma unroll
        for (int k = 0; k < j; ++k) {
#pragma unroll
            for (int i = 0; i <= k; ++i) s[i][k] = fmaf(-s[i][j], s[k][j], s[i][k]);
        }
    }
#pragma unroll
    for (int j = 1; j < kStep; ++j) {
#pragma unroll
        for (int i = j - 1; i >= 0; --i) {
            float sum = 0.0f;
#pragma unroll
            for (int m = i + 1; m <= j; ++m) sum = fmaf(s[i][m], inverse[m][j], sum);
            inverse[i][j] = -inverse[i][i] * sum;
        }
    }
    return positive;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    factor_corner(const float* __restrict__ matrix, float* __restrict__ upper, float* __restrict__ inverse,
                  int* __restrict__ failed, long long matrix_row, long long upper_row, long long inverse_row,
                  int columns) {
    extern __shared__ float factor[];  // U, rows kPitch apart
    // T[.][J] and T[J][.], then P and W.
    __shared__ alignas(16) float own_columns[kSize][kStep], own_rows[kStep][kSize];
    __shared__ alignas(16) float left[kSize][kStep], right[kStep][kSize];
    const int thread = threadIdx.x;
    const int across = thread % kAcross;
    const int first_row = thread / kAcross * kStep;
    const int first_column = across * kColumns;
    float t[2][kStep][kColumns];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int r = 0; r < kStep; ++r) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                const int i = first_row + r, k = h * kHalf + first_column + c;
                const bool there = i < columns && k < columns;
                t[h][r][c] = there ? matrix[min(i, k) * matrix_row + max(i, k)] : static_cast<float>(i == k);
            }
        }
    }
    for (int base = (columns - 1) / kStep * kStep; base >= 0; base -= kStep) {
        const int half = base / kHalf;
        const int place = first_column - base % kHalf;  // of the thread's columns among those of J: 0 or 4
        const bool owns_columns = place == 0 || place == kColumns;
        if (owns_columns) {
#pragma unroll
            for (int r = 0; r < kStep; ++r) {
                float four[kColumns];
#pragma unroll
                for (int c = 0; c < kColumns; ++c) four[c] = half ? t[1][r][c] : t[0][r][c];
                store_four(own_columns[first_row + r] + place, four);
            }
        }
        if (first_row == base) {
#pragma unroll
            for (int r = 0; r < kStep; ++r) {
                store_four(own_rows[r] + first_column, t[0][r]);
                store_four(own_rows[r] + kHalf + first_column, t[1][r]);
            }
        }
        __syncthreads();
        if (thread < kSize) {
            float s[kStep][kStep], v[kStep][kStep];
#pragma unroll
            for (int r = 0; r < kStep; ++r) load_eight(s[r], own_rows[r] + base);
            const bool positive = factor_step(s, v);
            if (thread == 0 && !positive) *failed = 1;
            // As a row, of P and U; as a column, of W.
            float given[kStep], row[kStep], column[kStep];
            load_eight(given, own_columns[thread]);
            const int within = thread - base;
#pragma unroll
            for (int c = 0; c < kStep; ++c) {
                row[c] = 0.0f;
                column[c] = 0.0f;
#pragma unroll
                for (int m = c; m < kStep; ++m) {
                    row[c] = fmaf(v[c][m], given[m], row[c]);
                    column[c] = fmaf(v[c][m], own_rows[m][thread], column[c]);
                }
            }
            store_eight(left[thread], row);
#pragma unroll
            for (int c = 0; c < kStep; ++c) {
#pragma unroll
                for (int m = 0; m < kStep; ++m) {
                    if (within == m) {
                        column[c] = m >= c ? v[c][m] : 0.0f;
                        row[c] = c >= m ? s[m][c] : 0.0f;
                    }
                }
                right[c][thread] = column[c];
                factor[thread * kPitch + base + c] = within < kStep ? row[c] : 0.0f;
            }
        }
        __syncthreads();
        if (first_row < base) {
            if (owns_columns) {
#pragma unroll
                for (int r = 0; r < kStep; ++r) {
#pragma unroll
                    for (int c = 0; c < kColumns; ++c) {
                        if (half) {
                            t[1][r][c] = 0.0f;
                        } else {
                            t[0][r][c] = 0.0f;
                        }
                    }
                }
            }
#pragma unroll
            for (int q = 0; q < kStep; q += 4) {
                float u[kStep][4];
#pragma unroll
                for (int r = 0; r < kStep; ++r) load_four(u[r], left[first_row + r] + q);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        float w[kColumns];
                        load_four(w, right[q + e] + h * kHalf + first_column);
#pragma unroll
                        for (int r = 0; r < kStep; ++r) {
#pragma unroll
                            for (int c = 0; c < kColumns; ++c) t[h][r][c] = fmaf(-u[r][e], w[c], t[h][r][c]);
                        }
                    }
                }
            }
        } else if (first_row == base) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const bool is_inverse = h * kHalf + first_column >= base;
#pragma unroll
                for (int r = 0; r < kStep; ++r) {
                    load_four(t[h][r], right[r] + h * kHalf + first_column);
#pragma unroll
                    for (int c = 0; c < kColumns; ++c) t[h][r][c] = is_inverse ? t[h][r][c] : 0.0f;
                }
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int r = 0; r < kStep; ++r) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                const int i = first_row + r, k = h * kHalf + first_column + c;
                if (i < columns && k < columns) inverse[i * inverse_row + k] = t[h][r][c];
            }
        }
    }
    for (int index = thread; index < columns * kSize; index += kThreads) {
        const int i = index / kSize, k = index % kSize;
        if (k < columns) upper[i * upper_row + k] = factor[i * kPitch + k];
    }
}

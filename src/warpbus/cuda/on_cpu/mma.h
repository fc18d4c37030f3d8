// Tensor cores on a CPU: products of small matrices by the lanes of a warp (WMMA).
//
// Which elements of a matrix a lane holds is not defined in CUDA, and differs here: a program that assumes an order of
// `fragment::x` is wrong on both. Sums are in float32, one product after the other.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace nvcuda::wmma {

struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

struct matrix_a {};
struct matrix_b {};
struct accumulator {};

namespace precision {
struct tf32;
}

// What a fragment stores of a type.
template <class T> struct Stored { using type = T; };
template <> struct Stored<precision::tf32> { using type = float; };
inline float __float_to_tf32(float x) {
    return warpbus::same_bits<float>(warpbus::same_bits<unsigned>(x) + 0x1000 & ~0x1FFFu);
}

// Elements of a matrix `[rows, columns]`: lane i holds `num_elements` of them, the i-th ones by rows.
template <class Use, int M, int N, int K, class T, class Layout = void> struct fragment {
    static_assert(K == 16 ? (M == 16 && N == 16) || (M == 32 && N == 8) || (M == 8 && N == 32) : M == 16 && N == 16 && K == 8,
                  "on the CPU, fragments are 16x16x16, 32x8x16, 8x32x16 or, in TF32, 16x16x8");
    static constexpr int rows = std::is_same_v<Use, matrix_b> ? K : M, columns = std::is_same_v<Use, matrix_a> ? K : N;
    static constexpr int num_elements = rows * columns / static_cast<int>(warpbus::kWarp);
    using element_type = typename Stored<T>::type;
    element_type x[num_elements];
};

// The fragments of the lanes of each warp, while they are multiplied.
inline const void *operands[warpbus::kMostThreads][2];

inline void meet(const char *what, int line) { warpbus::wait_for(warpbus::Waits::warp, what, line); }

template <class Fragment, class Visit> void visit_elements(Fragment &fragment, bool by_columns, unsigned stride, Visit visit) {
    for (int i = 0; i < fragment.num_elements; ++i) {
        const unsigned at = warpbus::lane() * fragment.num_elements + i;
        const unsigned row = at / fragment.columns, column = at % fragment.columns;
        visit(fragment.x[i], by_columns ? size_t{column} * stride + row : size_t{row} * stride + column);
    }
}

template <class Use, int M, int N, int K, class T, class Layout>
void load_matrix_sync(fragment<Use, M, N, K, T, Layout> &to, const typename Stored<T>::type *from, unsigned stride,
                      WARPBUS_LINE) {
    meet("load_matrix_sync", line);
    visit_elements(to, std::is_same_v<Layout, col_major>, stride, [&](auto &element, size_t at) { element = from[at]; });
}
template <int M, int N, int K, class T>
void load_matrix_sync(fragment<accumulator, M, N, K, T> &to, const T *from, unsigned stride, layout_t layout, WARPBUS_LINE) {
    meet("load_matrix_sync", line);
    visit_elements(to, layout == mem_col_major, stride, [&](T &element, size_t at) { element = from[at]; });
}
template <int M, int N, int K, class T>
void store_matrix_sync(T *to, const fragment<accumulator, M, N, K, T> &from, unsigned stride, layout_t layout, WARPBUS_LINE) {
    meet("store_matrix_sync", line);
    visit_elements(from, layout == mem_col_major, stride, [&](const T &element, size_t at) { to[at] = element; });
}
template <class Use, int M, int N, int K, class T, class Layout, class Value>
void fill_fragment(fragment<Use, M, N, K, T, Layout> &fragment, Value value) {
    for (auto &element : fragment.x) element = static_cast<std::decay_t<decltype(element)>>(value);
}

// An element of the matrix whose parts the lanes of this warp hold.
template <class Fragment> auto element_at(int which, int row, int column) {
    const int at = row * Fragment::columns + column, first = static_cast<int>(warpbus::current->number / 32 * 32);
    const auto *its = static_cast<const Fragment *>(operands[first + at / Fragment::num_elements][which]);
    return its->x[at % Fragment::num_elements];
}

template <int M, int N, int K, class T, class U, class A, class B>
void mma_sync(fragment<accumulator, M, N, K, T> &to, const fragment<matrix_a, M, N, K, U, A> &a,
              const fragment<matrix_b, M, N, K, U, B> &b, const fragment<accumulator, M, N, K, T> &c, WARPBUS_LINE) {
    using Sum = std::conditional_t<std::is_integral_v<T>, int, float>;
    operands[warpbus::current->number][0] = &a;
    operands[warpbus::current->number][1] = &b;
    meet("mma_sync", line);
    T found[std::decay_t<decltype(c)>::num_elements];
    for (int i = 0; i < c.num_elements; ++i) {
        const int at = static_cast<int>(warpbus::lane()) * c.num_elements + i;
        Sum sum = static_cast<Sum>(c.x[i]);
        for (int k = 0; k < K; ++k)
            sum += static_cast<Sum>(element_at<fragment<matrix_a, M, N, K, U, A>>(0, at / N, k)) *
                   static_cast<Sum>(element_at<fragment<matrix_b, M, N, K, U, B>>(1, k, at % N));
        found[i] = static_cast<T>(sum);
    }
    meet("mma_sync", line);  // no lane changes its fragments before
    for (int i = 0; i < c.num_elements; ++i) to.x[i] = found[i];
}

}  // namespace nvcuda::wmma

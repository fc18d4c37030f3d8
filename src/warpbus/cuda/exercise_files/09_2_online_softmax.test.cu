#include "exercise.cu"

struct SoftmaxSums {
    int rows, columns;
    Array<float> x;
    Output<float> maxima, sums;
    SoftmaxSums(int rows, int columns)
        : rows(rows), columns(columns), x("x", rising(size_t{1} * rows * columns, columns)), maxima("maxima", rows),
          sums("sums", rows) {}
    // Later elements are larger, and up to 120: exp(120) is more than float32 holds.
    static std::vector<float> rising(size_t count, int columns) {
        std::vector<float> found = values(count);
        for (size_t i = 0; i < count; ++i) found[i] += 116.0f * (i % columns) / columns;
        return found;
    }
    std::string size() const { return named("rows", rows) + ", " + named("columns", columns); }
    void launch() { softmax_sums<<<rows, 32>>>(x, maxima, sums, columns); }
    double largest(size_t row) const {
        double found = x[row * columns];
        for (int i = 1; i < columns; ++i) found = std::fmax(found, x[row * columns + i]);
        return found;
    }
    bool right() const {
        return same(size(), maxima, 0, [&](size_t row) { return largest(row); }) &&
               same(size(), sums, 1e-5, [&](size_t row) {
                   double found = 0;
                   for (int i = 0; i < columns; ++i) found += std::exp(x[row * columns + i] - largest(row));
                   return found;
               });
    }
    double bytes() const { return 4.0 * rows * columns; }
};

int main() {
    for (int columns : {32, 5, 304})
        if (!exercise::passes<SoftmaxSums>(3, columns)) return 1;
    exercise::time<SoftmaxSums>(1 << 16, 1 << 11);
}

#include "exercise.cu"

inline std::vector<unsigned> words(size_t count) {
    std::vector<unsigned> found(count);
    unsigned seed = 7;
    for (unsigned &each : found) each = seed = seed * 1664525u + 1013904223u;
    return found;
}

struct Int4Gemv {
    int rows, columns;
    Array<unsigned> packed;
    Array<float> scales, x;
    Output<float> y;
    Int4Gemv(int rows, int columns)
        : rows(rows), columns(columns), packed("packed", words(size_t(rows) * columns / 8)),
          scales("scales", values(size_t(rows) * columns / 32)), x("x", values(columns, 2)), y("y", rows) {}
    std::string size() const { return named("rows", rows) + ", " + named("columns", columns); }
    void launch() { int4_gemv<<<(rows + 3) / 4, dim3(32, 4)>>>(packed, scales, x, y, rows, columns); }
    bool right() const {
        return same(size(), y, 1e-4, [&](size_t row) {
            double sum = 0;
            for (int k = 0; k < columns; ++k) {
                const size_t i = row * columns + k;
                sum += (static_cast<int>(packed.host[i / 8] >> (i % 8 * 4) & 15) - 8) * scales[i / 32] * x[k];
            }
            return sum;
        });
    }
    double bytes() const { return 0.625 * rows * columns; }
};

int main() {
    for (auto [rows, columns] : {std::pair{1, 32}, {5, 96}, {6, 512}})
        if (!exercise::passes<Int4Gemv>(rows, columns)) return 1;
    exercise::time<Int4Gemv>(16384, 4096);
}

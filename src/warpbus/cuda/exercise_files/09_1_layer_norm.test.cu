#include "exercise.cu"

inline std::vector<float> shifted(size_t count) {
    std::vector<float> found = values(count);
    for (float &each : found) each += 4000;  // mean(x * x) - mean * mean would cancel
    return found;
}

struct LayerNorm {
    int rows, columns;
    Array<float> x;
    Output<float> y;
    LayerNorm(int rows, int columns)
        : rows(rows), columns(columns), x("x", shifted(size_t{1} * rows * columns)), y("y", rows, columns) {}
    std::string size() const { return named("rows", rows) + ", " + named("columns", columns); }
    void launch() { layer_norm<<<rows, 128>>>(x, y, columns); }
    bool right() const {
        std::vector<double> mean(rows), scale(rows);
        for (int row = 0; row < rows; ++row) {
            double squares = 0;
            for (int i = 0; i < columns; ++i) mean[row] += x[row * columns + i] / columns;
            for (int i = 0; i < columns; ++i) squares += std::pow(x[row * columns + i] - mean[row], 2);
            scale[row] = 1 / std::sqrt(squares / columns + 1e-5);
        }
        return same(size(), y, 1e-3, [&](size_t i) { return (x[i] - mean[i / columns]) * scale[i / columns]; });
    }
    double bytes() const { return 8.0 * rows * columns; }
};

int main() {
    for (int columns : {128, 100, 1000})
        if (!exercise::passes<LayerNorm>(3, columns)) return 1;
    exercise::time<LayerNorm>(1 << 14, 1 << 12);
}

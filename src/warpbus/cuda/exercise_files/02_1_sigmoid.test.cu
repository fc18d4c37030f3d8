#include "exercise.cu"

struct Sigmoid {
    int rows, columns;
    Array<float> x;
    Output<float> y;
    Sigmoid(int rows, int columns)
        : rows(rows), columns(columns), x("x", values(size_t(rows) * columns)), y("y", rows, columns) {}
    std::string size() const { return named("rows", rows) + ", " + named("columns", columns); }
    void launch() {
        sigmoid_matrix<<<dim3((columns + 31) / 32, (rows + 7) / 8), dim3(32, 8)>>>(x, y, rows, columns);
    }
    bool right() const {
        return same(size(), y, 1e-5, [&](size_t i) { return 1 / (1 + std::exp(-x[i])); });
    }
    double bytes() const { return 8.0 * rows * columns; }
};

int main() {
    for (auto [rows, columns] : {std::pair{1, 1}, {9, 33}, {100, 7}, {8, 64}})
        if (!exercise::passes<Sigmoid>(rows, columns)) return 1;
    exercise::time<Sigmoid>(8192, 8192);
}

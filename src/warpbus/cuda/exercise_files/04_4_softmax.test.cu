#include "exercise.cu"

struct Softmax {
    int rows, columns;
    Array<float> x;
    Output<float> y;
    Softmax(int rows, int columns)
        : rows(rows), columns(columns), x("x", large(size_t(rows) * columns)), y("y", rows, columns) {}
    static std::vector<float> large(size_t count) {
        auto found = exercise::values(count);
        for (float &each : found) each += 100;
        if (count < 400) return found;
        for (size_t i = 0; i < count / 2; ++i) found[i] -= 300;  // the first row: its maximum is below zero
        return found;
    }
    std::string size() const { return named("rows", rows) + ", " + named("columns", columns); }
    void launch() { softmax<<<rows, 128>>>(x, y, columns); }
    bool right() const {
        return same(size(), y, 1e-5, [&](size_t i) {
            const size_t row = i / columns * columns;
            double sum = 0;
            for (int k = 0; k < columns; ++k) sum += std::exp(x[row + k] - x[i]);
            return 1 / sum;
        });
    }
    double bytes() const { return 8.0 * rows * columns; }
};

int main() {
    for (auto [rows, columns] : {std::pair{1, 1}, {3, 100}, {2, 300}, {3, 256}})
        if (!exercise::passes<Softmax>(rows, columns)) return 1;
    exercise::time<Softmax>(8192, 4096);
}

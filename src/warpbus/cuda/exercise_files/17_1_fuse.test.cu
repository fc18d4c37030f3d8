#include "exercise.cu"

struct Fuse {
    int n;
    Array<float> x;
    Output<float> t, y;
    explicit Fuse(int n) : n(n), x("x", values(n)), t("t", n), y("y", n) {}
    std::string size() const { return named("n", n); }
    void launch() { run(x, t, y, n); }
    bool right() const { return same(size(), y, 1e-6, [&](size_t i) { return std::fmax(x[i] * 3 + 5, 0.0); }); }
    double bytes() const { return 8.0 * n; }
};

int main() {
    for (int n : {1, 256, 1000})
        if (!exercise::passes<Fuse>(n)) return 1;
    exercise::time<Fuse>(1 << 27);
}

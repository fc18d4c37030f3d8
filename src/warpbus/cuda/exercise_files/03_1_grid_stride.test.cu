#include "exercise.cu"

struct Scale {
    int n, blocks;
    Array<float> x;
    explicit Scale(int n, int blocks = 4) : n(n), blocks(blocks), x("x", values(n)) {}
    std::string size() const { return named("n", n); }
    void launch() { scale<<<blocks, 64>>>(x, 3, n); }
    bool right() const { return same(size(), "x", x.device, n, 0, 0, [&](size_t i) { return 3 * x[i]; }); }
    double bytes() const { return 8.0 * n; }
};

int main() {
    for (int n : {1, 100, 257, 4096})
        if (!exercise::passes<Scale>(n)) return 1;
    exercise::time<Scale>(1 << 27, 4096);
}

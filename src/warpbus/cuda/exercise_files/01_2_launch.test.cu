#include "exercise.cu"

struct LaunchAdd {
    int n, threads;
    Array<float> a, b;
    Output<float> c;
    LaunchAdd(int n, int threads)
        : n(n), threads(threads), a("a", values(n)), b("b", values(n, 2)), c("c", n + (n + threads - 1) / threads) {}
    std::string size() const { return named("n", n) + ", " + named("threads", threads); }
    void launch() { add_on_device(a, b, c, n, threads); }
    bool right() const {
        return same(size(), c, 0, [&](size_t i) { return i < static_cast<size_t>(n) ? a[i] + b[i] : 1; });
    }
    double bytes() const { return 12.0 * n; }
};

int main() {
    for (int threads : {128, 256, 1024})
        for (int n : {1, 256, 1000, 4096})
            if (!exercise::passes<LaunchAdd>(n, threads)) return 1;
    exercise::time<LaunchAdd>(1 << 26, 256);
}

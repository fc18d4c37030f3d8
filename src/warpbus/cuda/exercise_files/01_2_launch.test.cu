#include "exercise.cu"

constexpr int kMostBlocks = 1 << 16;  // more are a mistake anyway

struct LaunchAdd {
    int n, threads;
    Array<float> a, b;
    Output<float> c;
    LaunchAdd(int n, int threads)
        : n(n), threads(threads), a("a", values(n)), b("b", values(n, 2)), c("c", n + kMostBlocks) {}
    std::string size() const { return named("n", n) + ", " + named("threads", threads); }
    void launch() { add_on_device(a, b, c, n, threads); }
    bool right() const {
        std::vector<float> found(c.size());
        cudaMemcpy(found.data(), c.device, c.size() * sizeof(float), cudaMemcpyDeviceToHost);
        int blocks = 0;
        for (int i = 0; i < kMostBlocks; ++i) blocks += found[n + i] == 1;
        const int needed = (n + threads - 1) / threads;
        if (blocks && blocks != needed) {
            exercise::write_finding("blocks", exercise::text("size", size()) +
                                    exercise::field("found", std::to_string(blocks)) +
                                    exercise::field("needed", std::to_string(needed)));
            return false;
        }
        found.resize(n + needed);
        return same(size(), "c", found, 0, 0, [&](size_t i) { return i < static_cast<size_t>(n) ? a[i] + b[i] : 1; });
    }
    double bytes() const { return 12.0 * n; }
};

int main() {
    for (int threads : {128, 256, 1024})
        for (int n : {1, 256, 1000, 4096})
            if (!exercise::passes<LaunchAdd>(n, threads)) return 1;
    exercise::time<LaunchAdd>(1 << 26, 256);
}

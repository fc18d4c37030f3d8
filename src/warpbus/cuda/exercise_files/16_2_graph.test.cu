#include "exercise.cu"

struct Steps {
    int n, steps;
    Array<float> x;
    cudaStream_t stream;
    Steps(int n, int steps) : n(n), steps(steps), x("x", values(n)) { cudaStreamCreate(&stream); }
    ~Steps() { cudaStreamDestroy(stream); }
    std::string size() const { return named("n", n) + ", " + named("steps", steps); }
    void launch() { run_steps(x, n, steps, stream); }
    bool right() const {
        return same(size(), "x", x.device, n, 0, 1e-5, [&](size_t i) {
            double found = x.host[i];
            for (int step = 0; step < steps; ++step) found = found / 2 + 1;
            return found;
        });
    }
    double bytes() const { return 16.0 * n * steps; }
};

int main() {
    for (int steps : {1, 4})
        if (!exercise::passes<Steps>(300, steps)) return 1;
}

#include "exercise.cu"

struct Overlap {
    int n, pieces;
    exercise::Pinned<float> in, out;
    Output<float> device;
    cudaStream_t streams[2];
    std::vector<float> found;  // what is in `out` when the function returns
    Overlap(int n, int pieces) : n(n), pieces(pieces), in(n * pieces), out(n * pieces), device("device", 2 * n) {
        const std::vector<float> start = values(n * pieces);
        std::copy(start.begin(), start.end(), in.host);
        for (cudaStream_t &stream : streams) cudaStreamCreate(&stream);
    }
    ~Overlap() {
        for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
    }
    std::string size() const { return named("n", n) + ", " + named("pieces", pieces); }
    void launch() {
        process(in, out, device, n, pieces, streams);
        found = out.now();
    }
    bool right() const { return same(size(), "out", found, 0, 1e-6, [&](size_t i) { return in[i] * in[i] + 1.0; }); }
    double bytes() const { return 8.0 * n * pieces; }
};

int main() {
    for (int pieces : {1, 2, 5})
        if (!exercise::passes<Overlap>(300, pieces)) return 1;
}

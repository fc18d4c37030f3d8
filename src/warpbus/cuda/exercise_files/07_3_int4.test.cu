#include "exercise.cu"

inline std::vector<unsigned> words(size_t count) {
    std::vector<unsigned> found(count);
    unsigned seed = 7;
    for (unsigned &each : found) each = seed = seed * 1664525u + 1013904223u;
    return found;
}

struct Dequantize {
    int n;
    Array<unsigned> packed;
    Array<float> scales;
    Output<float> weights;
    explicit Dequantize(int n)
        : n(n), packed("packed", words(n / 8)), scales("scales", values(n / 32)), weights("weights", n) {}
    std::string size() const { return named("n", n); }
    void launch() { dequantize<<<(n + 127) / 128, 128>>>(packed, scales, weights, n); }
    bool right() const {
        return same(size(), weights, 1e-6, [&](size_t i) {
            return (static_cast<int>(packed.host[i / 8] >> (i % 8 * 4) & 15) - 8) * scales[i / 32];
        });
    }
    double bytes() const { return 4.625 * n; }
};

int main() {
    for (int n : {32, 160, 2048})
        if (!exercise::passes<Dequantize>(n)) return 1;
    exercise::time<Dequantize>(1 << 27);
}

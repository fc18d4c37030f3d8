#include "exercise.cu"

struct Merge {
    int heads, splits;
    Array<float> m, l, o;
    Output<float> out;
    Merge(int heads, int splits)
        : heads(heads), splits(splits), m("m", maxima(heads, splits)), l("l", sums(heads, splits)),
          o("o", weighted(heads, splits)), out("out", heads, 64) {}
    static bool empty(int i, int splits) { return splits > 1 && i % splits == 0; }
    static std::vector<float> maxima(int heads, int splits) {
        std::vector<float> found(heads * splits);
        for (int i = 0; i < heads * splits; ++i) found[i] = empty(i, splits) ? -INFINITY : 90 + i * 5 % 7;
        return found;
    }
    static std::vector<float> sums(int heads, int splits) {
        std::vector<float> found(heads * splits);
        for (int i = 0; i < heads * splits; ++i) found[i] = empty(i, splits) ? 0 : 1 + i % 3;
        return found;
    }
    static std::vector<float> weighted(int heads, int splits) {
        std::vector<float> found = values(size_t{64} * heads * splits);
        for (int i = 0; i < 64 * heads * splits; ++i)
            if (empty(i / 64, splits)) found[i] = 0;
        return found;
    }
    std::string size() const { return named("heads", heads) + ", " + named("splits", splits); }
    void launch() { merge<<<heads, 64>>>(m, l, o, out, splits); }
    bool right() const {
        return same(size(), out, 1e-5, [&](size_t i) {
            double sum = 0, value = 0;  // relative to 90: nothing overflows in double
            for (int s = 0; s < splits; ++s) {
                const size_t at = i / 64 * splits + s;
                const double scale = std::exp(m[at] - 90);
                sum += l[at] * scale;
                value += o[at * 64 + i % 64] * scale;
            }
            return value / sum;
        });
    }
    double bytes() const { return 4.0 * heads * (66 * splits + 64); }
};

int main() {
    for (int splits : {1, 2, 5})
        if (!exercise::passes<Merge>(3, splits)) return 1;
    exercise::time<Merge>(1 << 15, 8);
}

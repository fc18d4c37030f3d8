#include "exercise.cu"

struct AllReduce {
    int n, ranks;
    Array<float> data, x;
    Array<float *> parts;
    Output<float> sums;
    AllReduce(int n, int ranks)
        : n(n), ranks(ranks), data("parts", uneven(n * ranks)), x("x", values(n, 2)), parts("pointers", pointers()),
          sums("sum", ranks, n) {}
    static std::vector<float> uneven(int count) {  // another order of the sum gives other bits
        std::vector<float> found = values(count);
        for (int i = 0; i < count; ++i) found[i] = (found[i] + 0.1f) * (i % 5 ? 1.0f : 1e6f);
        return found;
    }
    std::vector<float *> pointers() const {
        std::vector<float *> found(ranks);
        for (int rank = 0; rank < ranks; ++rank) found[rank] = data.device + rank * n;
        return found;
    }
    std::string size() const { return named("n", n) + ", " + named("ranks", ranks); }
    void launch() {
        for (int rank = 0; rank < ranks; ++rank)
            all_reduce<<<(n + 127) / 128, 128>>>(parts, x, sums.device + rank * n, rank, ranks, n);
    }
    bool right() const {  // the same bits on every rank
        return same(size(), sums, 0, [&](size_t i) {
            float found = x.host[i % n];
            for (int rank = 0; rank < ranks; ++rank) found += data.host[rank * n + i % n];
            return found;
        });
    }
    double bytes() const { return 4.0 * n * ranks * (ranks + 2); }
};

int main() {
    for (int ranks : {1, 2, 4})
        if (!exercise::passes<AllReduce>(200, ranks)) return 1;
}

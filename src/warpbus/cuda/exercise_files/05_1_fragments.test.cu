#include "exercise.cu"

struct Product {
    int n;
    Array<half> a, b;
    Output<float> c;
    explicit Product(int n)
        : n(n), a("a", values<half>(size_t{1} * n * n)), b("b", values<half>(size_t{1} * n * n, 2)), c("c", n, n) {}
    std::string size() const { return named("n", n); }
    void launch() { product<<<dim3(n / 8, n / 16), 32>>>(a, b, c, n); }
    bool right() const {
        return same(size(), c, 1e-5, [&](size_t i) {
            double found = 0;
            for (int k = 0; k < n; ++k) found += a[i / n * n + k] * b[size_t{1} * k * n + i % n];
            return found;
        });
    }
    double bytes() const { return 8.0 * n * n; }
};

int main() {
    for (int n : {16, 48})
        if (!exercise::passes<Product>(n)) return 1;
    exercise::time<Product>(2048);
}

#include "exercise.cu"

struct ReadMapped {
    int n;
    Array<float> memory;
    Array<int> table, faults;
    Output<float> y;
    explicit ReadMapped(int n)
        : n(n), memory("memory", values(16 * 64)), table("table", pages(n)), faults("faults", {0}), y("y", n) {}
    // Pages in a mixed order; each third is not mapped.
    static std::vector<int> pages(int n) {
        std::vector<int> found((n + 63) / 64);
        for (size_t p = 0; p < found.size(); ++p) found[p] = p % 3 == 1 ? -1 : static_cast<int>(p * 7 % 16);
        return found;
    }
    std::string size() const { return named("n", n); }
    void launch() { read_mapped<<<(n + 127) / 128, 128>>>(memory, table, y, faults, n); }
    bool right() const {
        int missing = 0;
        for (int i = 0; i < n; ++i) missing += table.host[i / 64] < 0;
        return same(size(), y, 0, [&](size_t i) {
                   return table.host[i / 64] < 0 ? 0.0 : memory[table.host[i / 64] * 64 + i % 64];
               }) &&
               same(size(), "faults", faults.device, 1, 0, 0, [&](size_t) { return missing; });
    }
    double bytes() const { return 8.0 * n; }
};

int main() {
    for (int n : {64, 100, 900})
        if (!exercise::passes<ReadMapped>(n)) return 1;
}

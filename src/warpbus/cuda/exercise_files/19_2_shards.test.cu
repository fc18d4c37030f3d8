#include "exercise.cu"

struct Shards {
    int columns, group, ranks;
    Array<float> w, x;
    Output<float> parts;
    Shards(int columns, int group, int ranks)
        : columns(columns), group(group), ranks(ranks), w("w", values(2 * columns)), x("x", values(columns, 2)),
          parts("y", ranks, 2) {}
    std::string size() const {
        return named("columns", columns) + ", " + named("group", group) + ", " + named("ranks", ranks);
    }
    void launch() {
        for (int rank = 0; rank < ranks; ++rank)
            partial<<<2, 32>>>(w, x, parts.device + rank * 2, columns, group, ranks, rank);
    }
    int first(int rank) const {  // of the columns of a rank
        const int groups = columns / group;
        return (groups / ranks * rank + std::min(rank, groups % ranks)) * group;
    }
    bool right() const {
        std::vector<int> begins(ranks), ends(ranks);
        for (int rank = 0; rank < ranks; ++rank) shard(columns, group, ranks, rank, &begins[rank], &ends[rank]);
        return same(size(), "begin", begins, 0, 0, [&](size_t rank) { return first(rank); }) &&
               same(size(), "end", ends, 0, 0, [&](size_t rank) { return first(rank + 1); }) &&
               same(size(), parts, 1e-5, [&](size_t i) {
                   double found = 0;
                   for (int k = first(i / 2); k < first(i / 2 + 1); ++k) found += w[i % 2 * columns + k] * x[k];
                   return found;
               });
    }
    double bytes() const { return 8.0 * columns; }
};

int main() {
    if (!exercise::passes<Shards>(512, 128, 2)) return 1;
    if (!exercise::passes<Shards>(1152, 128, 4)) return 1;
    return !exercise::passes<Shards>(13696, 128, 2);
}

// The path through a bit-shift trellis that is nearest to a tile of weights (Viterbi; warpbus/qtensor/trellis.py).
//
// A tile has kSteps pairs of numbers. State t of its path is the kWindow bits of a cyclic stream that begin at symbol t
// of kBits bits, so state t = (state t + 1) << kBits | symbol t, modulo 2^kWindow. Steps are taken from the last one to
// the first: then a state's predecessors are those with its upper bits at their lower end, s >> kBits = p mod kGroups.
// least[g] is the least cost of all paths whose last state is g modulo kGroups.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/threads.h"

constexpr int kWindow = 14;
constexpr int kSteps = 128;
constexpr int kSeam = 24;  // steps on either side of the stream's ends that decide about the bits that pass over them

struct TrellisSearch {
    const float* x;      // [tiles, kSteps, 2]
    const float* first;  // [2^kWindow], the first numbers of all states; `second` the second ones
    const float* second;
    uint8_t* symbols;  // [tiles, kSteps]
    int64_t tiles, bits, threads;
};

template <int kBits>
class TrellisPath {
  public:
    static constexpr int kStates = 1 << kWindow;
    static constexpr int kGroups = kStates >> kBits;
    static constexpr int kChoices = 1 << kBits;
    static constexpr int kLanes = 16;

    explicit TrellisPath(const TrellisSearch& task)
        : task_(task), least_(kGroups), next_(kGroups), chosen_(kSteps * kGroups) {}

    void find(int64_t tile) {
        const float* x = task_.x + tile * kSteps * 2;
        // The bits that pass over the ends of the stream: those that are best for the steps around them.
        int states[kSteps];
        search(x, kSeam - 1, 2 * kSeam, -1, states);
        const int passing = states[kSeam] >> kBits;
        search(x, kSteps - 1, kSteps, passing, states);
        uint8_t* symbols = task_.symbols + tile * kSteps;
        for (int t = 0; t < kSteps; ++t) symbols[kSteps - 1 - t] = states[t] & (kChoices - 1);
    }

  private:
    typedef float Floats __attribute__((vector_size(4 * kLanes)));
    typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

    // Vectors go by reference: returned as values they would have another ABI on CPUs without AVX-512.
    static void load(const float* from, Floats& into) { __builtin_memcpy(&into, from, sizeof(into)); }

    // The states of `count` steps, of which step `from` of the tile is the first and those before it follow. With
    // passing >= 0 these are the upper bits before the first state, and the lower bits of the last one.
    void search(const float* x, int from, int count, int passing, int* states) {
        const float unreachable = std::numeric_limits<float>::max() / 4;
        for (int g = 0; g < kGroups; ++g) least_[g] = passing < 0 || g == passing ? 0.0f : unreachable;
        for (int step = 0; step < count; ++step) {
            const float* pair = x + 2 * ((from - step + kSteps) % kSteps);
            advance(pair[0], pair[1], chosen_.data() + step * kGroups);
            least_.swap(next_);
        }
        int group = passing;
        if (passing < 0) {
            group = 0;
            for (int g = 1; g < kGroups; ++g) group = least_[g] < least_[group] ? g : group;
        }
        for (int step = count - 1; step >= 0; --step) {
            states[step] = chosen_[step * kGroups + group] * kGroups + group;
            group = states[step] >> kBits;
        }
    }

    void advance(float x0, float x1, uint8_t* chosen) {
        for (int g = 0; g < kGroups; g += kLanes) {
            Floats best, other;
            cost(x0, x1, g, best);
            Ints index = {};
            for (int j = 1; j < kChoices; ++j) {
                cost(x0, x1, j * kGroups + g, other);
                const Ints less = other < best;
                best = less ? other : best;
                index = less ? Ints{} + j : index;
            }
            __builtin_memcpy(next_.data() + g, &best, sizeof(best));
            for (int i = 0; i < kLanes; ++i) chosen[g + i] = static_cast<uint8_t>(index[i]);
        }
    }

    // Of the states s to s + kLanes - 1, which have the same predecessors.
    void cost(float x0, float x1, int s, Floats& into) const {
        Floats first, second;
        load(task_.first + s, first);
        load(task_.second + s, second);
        const Floats d0 = x0 - first, d1 = x1 - second;
        into = least_[s >> kBits] + d0 * d0 + d1 * d1;
    }

    const TrellisSearch& task_;
    std::vector<float> least_, next_;
    std::vector<uint8_t> chosen_;
};

template <int kBits>
void trellis_tiles(const TrellisSearch& task, Team& team) {
    TrellisPath<kBits> path(task);
    team.share(0, task.tiles, [&](int64_t tile) { path.find(tile); });
    team.wait();
}

inline void trellis_search(const TrellisSearch& task) {
    Team team(static_cast<int>(task.threads));
    team.run([&](Team& own) { task.bits == 2 ? trellis_tiles<4>(task, own) : trellis_tiles<6>(task, own); });
}

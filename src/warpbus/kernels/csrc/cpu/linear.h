// residual + activation(norm(x) @ weight.T + bias)
#pragma once

#include <vector>

#include "cpu/panels.h"
#include "cpu/threads.h"

// Shared with Python: warpbus/kernels/ops/cpu_codes.py.
struct Linear {
    Matrix weight;
    const float* x;         // [m, k]
    const float* norm;      // [k], the weight of an RMSNorm, or null
    const float* bias;      // [n], or null
    const float* residual;  // in the shape of `out`, or null
    float* out;             // [m, n], or [m, n / 2] with gates
    int64_t m;
    int64_t gates;  // 1: the first half of the rows gives gates; n / 2 is then a multiple of 16, and there is no bias
    int64_t threads;
    double eps;
};

inline void linear(const Linear& task) {
    const Matrix& w = task.weight;
    const bool gates = task.gates != 0;
    const int64_t columns = gates ? w.n / 2 : w.n;
    Team team(static_cast<int>(task.threads));
    QuantizedRows quantized(w, task.m);
    const Activations& x = quantized.view();
    const auto quantize = [&](int64_t row) {
        const float* from = task.x + row * w.k;
        std::vector<float> normed;
        if (task.norm) {
            normed.resize(w.k);
            normalize(from, task.norm, static_cast<float>(task.eps), w.k, normed.data());
            from = normed.data();
        }
        quantize_in_strip(w, from, x, 0, task.m, row);
    };
    const auto write = [&](int64_t row, int64_t column, const float* values, int64_t count) {
        const int64_t at = row * columns + column;
        for (int64_t i = 0; i < count; ++i) {
            float value = values[i];
            if (task.bias) value += task.bias[column + i];
            if (task.residual) value += task.residual[at + i];
            task.out[at + i] = value;
        }
    };
    const int tiles = panel_tiles(w.tiles, task.m, team.threads(), gates);
    const bool one = task.m == 1;  // to wait for other threads takes longer than to quantize a row
    if (one) quantize(0);
    team.run([&](Team& shared) {
        if (!one) {
            shared.share(0, task.m, quantize);
            shared.wait();
        }
        shared.share(1, panels(w, tiles, gates), [&](int64_t panel) {
            multiply_panel(w, panel, tiles, gates, x, 0, task.m, write);
        });
    });
}

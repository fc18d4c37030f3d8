// residual + sum of weights * down(silu(gate(x)) * up(x)) over each token's experts. Only experts of some token are read.
#pragma once

#include <vector>

#include "cpu/panels.h"
#include "cpu/threads.h"

// Shared with Python: warpbus/kernels/ops/cpu_experts.py.
struct Experts {
    Matrix gate_up, down;    // of expert 0; the others lie behind
    const float* x;          // [tokens, hidden]
    const int32_t* experts;  // [tokens, slots]; a negative one is skipped
    const float* weights;    // [tokens, slots]
    const float* residual;   // [tokens, hidden], or null
    float* out;              // [tokens, hidden]
    int64_t tokens, slots, count;  // count: experts
    int64_t threads;
};

inline void experts(const Experts& task) {
    const int64_t hidden = task.gate_up.k, ffn = task.down.k, all = task.tokens * task.slots;
    // Slots sorted by expert: each expert's run of rows.
    std::vector<int64_t> begins(task.count + 1), place(all, -1), slot_of;
    for (int64_t slot = 0; slot < all; ++slot) {
        if (task.experts[slot] >= 0) ++begins[task.experts[slot] + 1];
    }
    for (int64_t e = 0; e < task.count; ++e) begins[e + 1] += begins[e];
    const int64_t rows = begins[task.count];
    slot_of.resize(rows);
    std::vector<int64_t> next(begins.begin(), begins.end() - 1), expert_of(rows), active;
    for (int64_t slot = 0; slot < all; ++slot) {
        if (task.experts[slot] < 0) continue;
        place[slot] = next[task.experts[slot]]++;
        slot_of[place[slot]] = slot;
        expert_of[place[slot]] = task.experts[slot];
    }
    for (int64_t e = 0; e < task.count; ++e) {
        if (begins[e] < begins[e + 1]) active.push_back(e);
    }
    Team team(static_cast<int>(task.threads));
    QuantizedRows entering(task.gate_up, rows), between(task.down, rows);
    std::unique_ptr<float[]> inner(new float[rows * ffn]), outputs(new float[rows * hidden]);
    const auto quantize = [&](const Matrix& w, const float* from, const Activations& to, int64_t row) {
        quantize_in_strip(w, from, to, begins[expert_of[row]], begins[expert_of[row] + 1], row);
    };
    const int64_t per_expert = active.empty() ? 0 : rows / static_cast<int64_t>(active.size());
    const int64_t in_all = static_cast<int64_t>(active.size());
    const int wide = panel_tiles(task.gate_up.tiles * in_all, per_expert, team.threads(), true);
    const int back = panel_tiles(task.down.tiles * in_all, per_expert, team.threads(), false);
    const int64_t wide_panels = panels(task.gate_up, wide, true), back_panels = panels(task.down, back, false);
    team.run([&](Team& shared) {
        shared.share(0, rows, [&](int64_t row) {
            quantize(task.gate_up, task.x + slot_of[row] / task.slots * hidden, entering.view(), row);
        });
        shared.wait();
        shared.share(1, in_all * wide_panels, [&](int64_t item) {
            const int64_t e = active[item / wide_panels];
            const auto write = [&](int64_t row, int64_t column, const float* values, int64_t count) {
                std::memcpy(inner.get() + row * ffn + column, values, count * sizeof(float));
            };
            multiply_panel(
                task.gate_up.expert(e), item % wide_panels, wide, true, entering.view(), begins[e], begins[e + 1], write
            );
        });
        shared.wait();
        shared.share(2, rows, [&](int64_t row) {
            quantize(task.down, inner.get() + row * ffn, between.view(), row);
        });
        shared.wait();
        shared.share(3, in_all * back_panels, [&](int64_t item) {
            const int64_t e = active[item / back_panels];
            const auto write = [&](int64_t row, int64_t column, const float* values, int64_t count) {
                std::memcpy(outputs.get() + row * hidden + column, values, count * sizeof(float));
            };
            multiply_panel(
                task.down.expert(e), item % back_panels, back, false, between.view(), begins[e], begins[e + 1], write
            );
        });
        shared.wait();
        shared.share(4, task.tokens, [&](int64_t token) {
            float* out = task.out + token * hidden;
            for (int64_t i = 0; i < hidden; ++i) out[i] = task.residual ? task.residual[token * hidden + i] : 0.0f;
            for (int64_t slot = token * task.slots; slot < (token + 1) * task.slots; ++slot) {
                if (place[slot] < 0) continue;
                const float* from = outputs.get() + place[slot] * hidden;
                for (int64_t i = 0; i < hidden; ++i) out[i] += task.weights[slot] * from[i];
            }
        });
    });
}

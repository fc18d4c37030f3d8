// Products of quantized rows and quantized matrices.
//
// In each block of columns the products are summed exactly, in int32; the blocks' sums times both scales are summed in
// float32, in the order of the blocks. So an element has the same bits whatever is computed beside it.
#pragma once

#include "cpu/lanes.h"
#include "cpu/matrix.h"
#include "cpu/scales.h"
#include "cpu/tiles.h"

constexpr int kParts = kTile / kLanes;  // vectors of a tile

template <int kBits, int kRows, int kTiles>
inline void multiply_block(const uint8_t* const* codes, const int8_t* x, int64_t vectors, Ints (&sums)[kRows][kTiles]) {
    constexpr int kFields = 8 / kBits;
    for (int64_t v = 0; v < vectors; ++v) {
        Ints loaded[kTiles];
        for (int t = 0; t < kTiles; ++t) loaded[t] = load(codes[t] + v * kVector);
        for (int f = 0; f < kFields; ++f) {
            Ints own[kTiles];
            for (int t = 0; t < kTiles; ++t) own[t] = field<kBits>(loaded[t], f);
            for (int r = 0; r < kRows; ++r) {
                int32_t four;
                std::memcpy(&four, x + ((v * kFields + f) * kRows + r) * 4, 4);
                const Ints spread_x = spread(four);
                for (int t = 0; t < kTiles; ++t) sums[r][t] = dot<kBits>(sums[r][t], own[t], spread_x);
            }
        }
    }
}

// The products of a strip and vectors of some tiles: out[row][vector][lane].
//
// vectors: of each, its tile * kParts + its part of the tile.
template <int kBits, int kRows, int kTiles>
void multiply_strip(const Matrix& w, const int64_t* vectors, const Activations& x, int64_t first, float* out) {
    const int64_t per_group = w.blocks_of_group(), padded = w.padded_group(), groups = w.groups();
    const int8_t* x_codes = x.codes + first * x.columns;
    const float* x_scales = x.scales + first * x.blocks;
    const int32_t* x_sums = x.sums + first * x.blocks;
    const uint8_t* codes[kTiles];
    int64_t of_scales[kTiles];
    for (int t = 0; t < kTiles; ++t) {
        const int64_t tile = vectors[t] / kParts, lane = vectors[t] % kParts * kLanes;
        codes[t] = w.codes + tile * w.bytes_of_tile() + lane * 4;
        of_scales[t] = tile * groups * kTile + lane;
    }
    Floats totals[kRows][kTiles];
    for (auto& row : totals) {
        for (Floats& total : row) total = zero_floats();
    }
    for (int64_t group = 0; group < groups; ++group) {
        Floats scales[kTiles];
        Ints zeros[kTiles];
        for (int t = 0; t < kTiles; ++t) {
            const int64_t at = of_scales[t] + group * kTile;
            scales[t] = load_scales(w, at);
            zeros[t] = w.zeros ? widen(w.zeros + at) : spread(static_cast<int32_t>(w.middle));
        }
        for (int64_t in_group = 0; in_group < per_group; ++in_group) {
            const int64_t begin = in_group * kBlock, width = padded - begin < kBlock ? padded - begin : kBlock;
            const int64_t count = width * kBits / (4 * 8);
            Ints sums[kRows][kTiles];
            for (int r = 0; r < kRows; ++r) {
                for (int t = 0; t < kTiles; ++t) {
                    sums[r][t] = subtract(zero_ints(), multiply(zeros[t], spread(x_sums[r])));
                }
            }
            multiply_block<kBits, kRows, kTiles>(codes, x_codes, count, sums);
            for (int r = 0; r < kRows; ++r) {
                const Floats scale = spread(x_scales[r]);
                for (int t = 0; t < kTiles; ++t) {
                    totals[r][t] = multiply_add(to_floats(sums[r][t]), multiply(scales[t], scale), totals[r][t]);
                }
            }
            for (int t = 0; t < kTiles; ++t) codes[t] += count * kVector;
            x_codes += width * kRows;
            x_scales += kRows;
            x_sums += kRows;
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int t = 0; t < kTiles; ++t) store(out + (r * kTiles + t) * kLanes, totals[r][t]);
    }
}

// How many vectors of a matrix are multiplied at once: as many as registers hold sums for.
constexpr int kFewVectors = 4;                       // times one or two rows
constexpr int kManyVectors = kLanes == 16 ? 2 : 1;   // times more

template <int kBits, int kRows>
void multiply_rows(const Matrix& w, const int64_t* vectors, int count, const Activations& x, int64_t first, float* out) {
    constexpr int kAtOnce = kRows <= 2 ? kFewVectors : kManyVectors;
    float part[kRows * kAtOnce * kLanes];
    int done = 0;
    const auto keep = [&](int tiles) {
        for (int r = 0; r < kRows; ++r) {
            std::memcpy(out + (r * count + done) * kLanes, part + r * tiles * kLanes, tiles * kLanes * sizeof(float));
        }
        done += tiles;
    };
    while (count - done >= kAtOnce) {
        multiply_strip<kBits, kRows, kAtOnce>(w, vectors + done, x, first, part);
        keep(kAtOnce);
    }
    while (done < count) {
        multiply_strip<kBits, kRows, 1>(w, vectors + done, x, first, part);
        keep(1);
    }
}

template <int kBits>
void multiply_bits(
    const Matrix& w, const int64_t* vectors, int count, const Activations& x, int64_t first, Strip strip, float* out
) {
#if defined(LANES_AMX)
    if (strip.run != kRun) return multiply_by_tiles<kBits>(w, vectors, count, x, first, strip, out);
#endif
    switch (strip.rows) {
        case 1: return multiply_rows<kBits, 1>(w, vectors, count, x, first, out);
        case 2: return multiply_rows<kBits, 2>(w, vectors, count, x, first, out);
        case 4: return multiply_rows<kBits, 4>(w, vectors, count, x, first, out);
        default: return multiply_rows<kBits, 8>(w, vectors, count, x, first, out);
    }
}

// Strips of rows times a list of vectors: out[row of the strip][vector][lane].
inline void multiply(
    const Matrix& w, const int64_t* vectors, int count, const Activations& x, int64_t first, Strip strip, float* out
) {
    if (w.bits == 2) return multiply_bits<2>(w, vectors, count, x, first, strip, out);
    if (w.bits == 4) return multiply_bits<4>(w, vectors, count, x, first, strip, out);
    return multiply_bits<8>(w, vectors, count, x, first, strip, out);
}

// silu(gate) * up, for whole vectors
inline void gated(const float* gate, const float* up, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += kLanes) {
        const Floats g = load(gate + i), one = spread(1.0f);
        const Floats activated = divide(g, add(one, exponential(multiply(g, spread(-1.0f)))));
        store(out + i, multiply(activated, load(up + i)));
    }
}

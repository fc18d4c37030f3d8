// Panels: some tiles of a matrix times all rows of a run, which share the matrix.
#pragma once

#include <memory>

#include "cpu/product.h"
#include "cpu/quantize.h"

constexpr int kMostTiles = 4;  // of a panel, half of them gates where there are gates

// Memory for quantized rows of a matrix's columns.
class QuantizedRows {
  public:
    QuantizedRows(const Matrix& w, int64_t rows)
        : codes_(new int8_t[rows * w.padded_columns()]),
          scales_(new float[rows * w.blocks()]),
          sums_(new int32_t[rows * w.blocks()]),
          view_{codes_.get(), scales_.get(), sums_.get(), w.padded_columns(), w.blocks()} {}

    const Activations& view() const { return view_; }

  private:
    std::unique_ptr<int8_t[]> codes_;
    std::unique_ptr<float[]> scales_;
    std::unique_ptr<int32_t[]> sums_;
    Activations view_;
};

// Tiles of a panel: fewer where that leaves each thread several panels.
inline int panel_tiles(int64_t tiles, int64_t rows, int threads, bool gates) {
    if (rows > 2) return 2;
    return tiles / kMostTiles >= 4 * threads ? kMostTiles : gates ? 2 : 1;
}

// Multiply panel `number` of a matrix with the rows begin .. end of x.
//
// With gates the first half of the matrix's rows are gates, and the second half is multiplied by their silu.
// write(row, column, values, count): `count` results of a row, of consecutive columns.
template <typename Write>
void multiply_panel(
    const Matrix& w, int64_t number, int tiles, bool gates, const Activations& x, int64_t begin, int64_t end,
    const Write& write
) {
    const int wide = gates ? tiles / 2 : tiles;  // tiles of the result
    const int64_t columns = gates ? w.n / 2 : w.n, all = (columns + kTile - 1) / kTile, first_tile = number * wide;
    const int own = static_cast<int>(all - first_tile < wide ? all - first_tile : wide);
    int64_t vectors[kMostTiles * kParts];
    int count = 0;
    for (int i = 0; i < own * kParts; ++i) vectors[count++] = first_tile * kParts + i;
    for (int i = 0; gates && i < own * kParts; ++i) vectors[count++] = (all + first_tile) * kParts + i;
    const int64_t column = first_tile * kTile;
    const int64_t results = columns - column < own * kTile ? columns - column : own * kTile;
    alignas(64) float products[kStrip * kMostTiles * kTile];
    for (int64_t first = begin; first < end;) {
        const Strip strip = w.strip(first, end);
        multiply(w, vectors, count, x, first, strip, products);
        for (int r = 0; r < strip.rows; ++r) {
            float* of_row = products + r * count * kLanes;
            if (gates) gated(of_row, of_row + own * kTile, own * kTile, of_row);
            write(first + r, column, of_row, results);
        }
        first += strip.rows;
    }
}

inline int64_t panels(const Matrix& w, int tiles, bool gates) {
    const int64_t all = ((gates ? w.n / 2 : w.n) + kTile - 1) / kTile, wide = gates ? tiles / 2 : tiles;
    return (all + wide - 1) / wide;
}

// Quantize row `row` of the rows begin .. end, which are multiplied together.
inline void quantize_in_strip(
    const Matrix& w, const float* x, const Activations& to, int64_t begin, int64_t end, int64_t row
) {
    int64_t first = begin;
    Strip strip = w.strip(first, end);
    while (first + strip.rows <= row) {
        first += strip.rows;
        strip = w.strip(first, end);
    }
    quantize_row(w, x, to, first, strip, static_cast<int>(row - first));
}

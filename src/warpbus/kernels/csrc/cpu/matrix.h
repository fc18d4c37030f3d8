// A quantized matrix [n, k] as the kernels read it, and rows of activations in 8 bits.
//
// Rows of the matrix come in tiles of 16. The columns of a group are padded to a multiple of 16; a vector of 64 bytes
// holds, for each row of a tile, four consecutive columns in four consecutive bytes. With codes of 4 (2) bits, the low
// bits of these bytes are one such vector, the bits above them the vector of the next four columns, and so on.
//
// Activations are cut at the same places, into blocks of at most 128 columns of one group: each block of a row has a
// scale (largest magnitude / 127), int8 codes, and the codes' sum. Rows come in strips of 8, 4, 2 or 1; in a strip, each
// row's four columns follow the row's before: [columns / 4][rows of the strip][4].
#pragma once

#include <cstdint>

constexpr int kTile = 16;    // rows of the matrix
constexpr int kVector = 64;  // bytes of a tile's vector
constexpr int kBlock = 128;  // columns of a block of activations
constexpr int kPadding = 16;
constexpr int kStrip = 8;  // rows of activations, at most

// Shared with Python: warpbus/kernels/ops/cpu_codes.py.
struct Matrix {
    const uint8_t* codes;  // [tiles, bytes_of_tile]
    const void* scales;    // [tiles, groups, 16]
    const uint8_t* zeros;  // [tiles, groups, 16], or null: the middle code
    int64_t n, k, group;   // group: columns
    int64_t bits;          // 2, 4 or 8: those that a code is stored in
    int64_t middle;        // the code that stands for 0 without zero points
    int64_t scale_type;    // 0: float32, 1: bfloat16, 2: float16
    int64_t tiles;

    int64_t groups() const { return k / group; }
    int64_t padded_group() const { return (group + kPadding - 1) / kPadding * kPadding; }
    int64_t padded_columns() const { return groups() * padded_group(); }
    int64_t blocks_of_group() const { return (padded_group() + kBlock - 1) / kBlock; }
    int64_t blocks() const { return groups() * blocks_of_group(); }
    int64_t bytes_of_tile() const { return padded_columns() * kTile * bits / 8; }

    // The matrix of one of several experts, which lie one behind the other.
    Matrix expert(int64_t number) const {
        Matrix own = *this;
        const int64_t per_expert = tiles * groups() * kTile;
        own.codes += number * tiles * bytes_of_tile();
        own.scales = static_cast<const uint8_t*>(scales) + number * per_expert * (scale_type == 0 ? 4 : 2);
        own.zeros = zeros ? zeros + number * per_expert : nullptr;
        return own;
    }
};

// Quantized rows; `Activations::at` finds a strip.
struct Activations {
    int8_t* codes;   // [rows * padded columns]
    float* scales;   // [rows * blocks], in a strip [blocks][rows]
    int32_t* sums;   // the same
    int64_t columns;  // padded
    int64_t blocks;
};

// The rows of the strip that begins at row `first` of `rows`.
inline int64_t strip_rows(int64_t first, int64_t rows) {
    const int64_t left = rows - first;
    return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

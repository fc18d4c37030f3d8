// A quantized matrix [n, k] as the kernels read it, and rows of activations in 8 bits.
//
// Rows of the matrix come in tiles of 16. The columns of a group are padded to a multiple of 16; a vector of 64 bytes
// holds, for each row of a tile, four consecutive columns in four consecutive bytes. With codes of 4 (2) bits, the low
// bits of these bytes are one such vector, the bits above them the vector of the next four columns, and so on.
//
// Activations are cut at the same places, into blocks of at most 128 columns of one group: each block of a row has a
// scale (largest magnitude / 127), int8 codes, and the codes' sum. Rows come in strips, which are multiplied at once. In a
// strip, each row's run of columns follows the row's before: [columns / run][rows of the strip][run]. A run is 4 columns,
// or a row of an AMX tile.
#pragma once

#include <cstdint>

#include "cpu/amx.h"

constexpr int kTile = 16;    // rows of the matrix
constexpr int kVector = 64;  // bytes of a tile's vector
constexpr int kBlock = 128;  // columns of a block of activations
constexpr int kPadding = 16;
constexpr int kRun = 4;  // columns of a run, without AMX
#if defined(LANES_AMX)
constexpr int kTileRows = 16;
constexpr int kFewestTileRows = 12;  // fewer are as fast without
constexpr int kStrip = 64;          // rows of activations, at most
#else
constexpr int kStrip = 8;
#endif

// Rows that are multiplied at once, and the columns of their runs.
struct Strip {
    int rows, run;
};

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

    // The strip that begins at row `first` of the rows up to `end`.
    Strip strip(int64_t first, int64_t end) const {
        const int64_t left = end - first;
#if defined(LANES_AMX)
        if (left >= kFewestTileRows && has_tiles()) {
            const int run = padded_group() % 64 == 0 ? 64 : padded_group() % 32 == 0 ? 32 : kPadding;
            const int64_t whole = left / kTileRows * kTileRows;
            return {static_cast<int>(whole == 0 ? left : whole < kStrip ? whole : kStrip), run};
        }
#endif
        return {left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1, kRun};
    }
};

// Quantized rows. A strip whose first row is `first` begins at codes + first * columns.
struct Activations {
    int8_t* codes;   // [rows * padded columns]
    float* scales;   // [rows * blocks], in a strip [blocks][rows]
    int32_t* sums;   // the same
    int64_t columns;  // padded
    int64_t blocks;
};

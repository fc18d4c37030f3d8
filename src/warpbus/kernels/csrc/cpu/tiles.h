// Products of strips of 12 and more quantized rows by the tile registers of AMX.
//
// A tile of activations has 16 rows (or as many as the strip) of one run of columns; a tile of codes has a vector of codes
// for each four of these columns, which is the order of `Matrix` once the codes are bytes. Products of a block are exact,
// and are scaled and summed as in product.h: so the results have the same bits.
#pragma once

#include "cpu/lanes.h"
#include "cpu/matrix.h"
#include "cpu/scales.h"

#if defined(LANES_AMX)

// The numbers of tile registers: sums and codes of two tiles of the matrix, and activations.
#define SUMS_0 0
#define SUMS_1 1
#define CODES_0 2
#define CODES_1 3
#define ROWS 4

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes_of_row[16] = {};
    uint8_t rows[16] = {};

    TileConfig(int rows_of_x, int run) {
        const auto set = [this](int number, int height, int width) {
            rows[number] = static_cast<uint8_t>(height);
            bytes_of_row[number] = static_cast<uint16_t>(width);
        };
        set(SUMS_0, rows_of_x, kVector);
        set(SUMS_1, rows_of_x, kVector);
        set(CODES_0, run / 4, kVector);
        set(CODES_1, run / 4, kVector);
        set(ROWS, rows_of_x, run);
    }
};

// Codes of `columns` columns of a tile of the matrix, one per byte.
template <int kBits>
inline void to_bytes(const uint8_t* codes, int64_t columns, uint8_t* bytes) {
    constexpr int kFields = 8 / kBits;
    for (int64_t v = 0; v < columns / (4 * kFields); ++v) {
        const Ints loaded = load(codes + v * kVector);
        for (int f = 0; f < kFields; ++f) store(bytes + (v * kFields + f) * kVector, field<kBits>(loaded, f));
    }
}

// The sums of one block: rows of x times one or two tiles of the matrix.
template <int kTiles>
USES_TILES inline void sum_block(
    const int8_t* x, int64_t x_step, int64_t run, int64_t runs, const uint8_t* const* codes,
    int32_t (*sums)[kTileRows * kTile]
) {
    _tile_zero(SUMS_0);
    if (kTiles == 2) _tile_zero(SUMS_1);
    for (int64_t i = 0; i < runs; ++i) {
        _tile_loadd(ROWS, x + i * x_step, run);
        _tile_loadd(CODES_0, codes[0] + i * run * kTile, kVector);
        _tile_dpbsud(SUMS_0, ROWS, CODES_0);
        if (kTiles == 2) {
            _tile_loadd(CODES_1, codes[1] + i * run * kTile, kVector);
            _tile_dpbsud(SUMS_1, ROWS, CODES_1);
        }
    }
    _tile_stored(SUMS_0, sums[0], kVector);
    if (kTiles == 2) _tile_stored(SUMS_1, sums[1], kVector);
}

// The products of a strip and one or two tiles: out[row][tile][lane], `step` floats from one row to the next.
template <int kBits, int kTiles>
USES_TILES void multiply_tiles(
    const Matrix& w, const int64_t* tiles, const Activations& x, int64_t first, Strip strip, float* out, int64_t step
) {
    const int64_t padded = w.padded_group(), groups = w.groups(), rows = strip.rows, run = strip.run;
    const int at_once = strip.rows < kTileRows ? strip.rows : kTileRows;
    const TileConfig config(at_once, strip.run);
    _tile_loadconfig(&config);
    const int8_t* x_codes = x.codes + first * x.columns;
    const float* x_scales = x.scales + first * x.blocks;
    const int32_t* x_sums = x.sums + first * x.blocks;
    [[maybe_unused]] alignas(64) uint8_t bytes[kTiles][kBlock * kTile];
    alignas(64) int32_t sums[kStrip / kTileRows][kTiles][kTileRows * kTile];
    const uint8_t* codes[kTiles];
    for (int t = 0; t < kTiles; ++t) codes[t] = w.codes + tiles[t] * w.bytes_of_tile();
    for (int64_t r = 0; r < rows; ++r) {
        for (int t = 0; t < kTiles; ++t) store(out + r * step + t * kTile, zero_floats());
    }
    for (int64_t group = 0; group < groups; ++group) {
        Floats scales[kTiles], minus_zeros[kTiles];
        for (int t = 0; t < kTiles; ++t) {
            const int64_t at = (tiles[t] * groups + group) * kTile;
            scales[t] = load_scales(w, at);
            const Ints zeros = w.zeros ? widen(w.zeros + at) : spread(static_cast<int32_t>(w.middle));
            minus_zeros[t] = to_floats(subtract(zero_ints(), zeros));
        }
        for (int64_t begin = 0; begin < padded; begin += kBlock) {
            const int64_t width = padded - begin < kBlock ? padded - begin : kBlock;
            const uint8_t* of_block[kTiles];
            for (int t = 0; t < kTiles; ++t) {
                of_block[t] = codes[t];
                if constexpr (kBits < 8) {
                    to_bytes<kBits>(codes[t], width, bytes[t]);
                    of_block[t] = bytes[t];
                }
                codes[t] += width * kTile * kBits / 8;
            }
            // All sums of the block first: a load right after a tile was stored waits for the store.
            for (int64_t r = 0; r < rows; r += at_once) {
                sum_block<kTiles>(x_codes + r * run, rows * run, run, width / run, of_block, sums[r / kTileRows]);
            }
            for (int64_t r = 0; r < rows; ++r) {
                const Floats x_scale = spread(x_scales[r]), x_sum = spread(static_cast<float>(x_sums[r]));
                for (int t = 0; t < kTiles; ++t) {
                    const int32_t* sum = sums[r / kTileRows][t] + r % kTileRows * kTile;
                    // Exact: integers below 2^24.
                    const Floats products = multiply_add(minus_zeros[t], x_sum, to_floats(load(sum)));
                    float* total = out + r * step + t * kTile;
                    store(total, multiply_add(products, multiply(scales[t], x_scale), load(total)));
                }
            }
            x_codes += width * rows;
            x_scales += rows;
            x_sums += rows;
        }
    }
    _tile_release();
}

// The products of a strip and some tiles: out[row][tile][lane].
template <int kBits>
void multiply_by_tiles(
    const Matrix& w, const int64_t* tiles, int count, const Activations& x, int64_t first, Strip strip, float* out
) {
    static_assert(kLanes == kTile, "a vector of sums is a row of a tile");
    for (int done = 0; done < count; done += 2) {
        float* of_pair = out + done * kTile;
        if (count - done > 1) multiply_tiles<kBits, 2>(w, tiles + done, x, first, strip, of_pair, count * kTile);
        else multiply_tiles<kBits, 1>(w, tiles + done, x, first, strip, of_pair, count * kTile);
    }
}

#undef SUMS_0
#undef SUMS_1
#undef CODES_0
#undef CODES_1
#undef ROWS

#endif

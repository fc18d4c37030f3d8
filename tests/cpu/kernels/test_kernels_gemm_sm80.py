"""The mma.sync kernels without a GPU: a model of how they place elements; which tiling is chosen; spills."""

import itertools

import numpy as np
import pytest
import torch

from warpbus.kernels.ops import gemm_sm80

TILINGS = {
    "wide": gemm_sm80.WIDE,
    "square": gemm_sm80.SQUARE,
    "small": gemm_sm80.SMALL,
    "unaligned": gemm_sm80.UNALIGNED,
}
RUNG_TILINGS = {f"{rung} {t.align}": t for rung, pair in gemm_sm80.RUNGS.items() for t in pair}
ALL_TILINGS = {**TILINGS, **RUNG_TILINGS}
# Tiles as they lie in shared memory: rows, and contiguous columns.
SHAPES = sorted(
    {
        shape
        for t in ALL_TILINGS.values()
        for tile in (t.tile_m, t.tile_n)
        for shape in ((tile, t.tile_k), (t.tile_k, tile))
    }
)
LANES = np.arange(32)


def chunk_key(columns, row):
    """As in common/tile.cuh."""
    return row // 2 % 4 if columns == 32 else row % 8


def chunk_offset(columns, row, chunk):
    return row * columns + (chunk ^ chunk_key(columns, row)) * 8


def block_offsets(columns, below, row0, column0):
    """Where each lane's row of a 16 x 16 block begins: `load_block`."""
    down = LANES % 16 if below else LANES % 8 + LANES // 16 * 8
    along = LANES // 16 if below else LANES // 8 % 2
    place = (column0 // 8) ^ along ^ chunk_key(columns, down)
    return (row0 + down) * columns + place * 8


def ldmatrix(tile, offsets, transposed):
    """`[4 matrices, 32 lanes, 2]`: what the instruction gives to each lane (PTX ISA)."""
    matrices = tile[offsets[:, None] + np.arange(8)].reshape(4, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    return np.stack([matrices[:, LANES // 4, LANES % 4 * 2], matrices[:, LANES // 4, LANES % 4 * 2 + 1]], axis=-1)


def banks_apart(addresses, bytes_each):
    """Whether accesses that are served together, given in bytes, touch no bank at two places."""
    words = {address // 4 + word for address in addresses for word in range(bytes_each // 4)}
    return len({word % 32 for word in words}) == len(words)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_element_has_its_own_place(rows, columns):
    places = {chunk_offset(columns, row, chunk) for row in range(rows) for chunk in range(columns // 8)}
    assert places == set(range(0, rows * columns, 8))


@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_fragments_are_read_where_copies_put_them_without_bank_conflicts(rows, columns, below):
    for row0, column0 in itertools.product(range(0, rows, 16), range(0, columns, 16)):
        offsets = block_offsets(columns, below, row0, column0)
        down = LANES % 16 if below else LANES % 8 + LANES // 16 * 8
        along = LANES // 16 if below else LANES // 8 % 2
        expected = [
            chunk_offset(columns, row0 + d, column0 // 8 + a)
            for d, a in zip(down.tolist(), along.tolist(), strict=True)
        ]
        assert offsets.tolist() == expected
        for matrix in range(4):
            assert banks_apart((offsets[matrix * 8 : matrix * 8 + 8] * 2).tolist(), 16)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_copies_have_no_bank_conflicts(rows, columns):
    chunks = columns // 8
    for first in range(0, rows * chunks, 8):  # eight neighbouring threads store 128 bytes at a time
        together = [chunk_offset(columns, *divmod(thread, chunks)) * 2 for thread in range(first, first + 8)]
        assert banks_apart(together, 16)


@pytest.mark.parametrize("along_k_a", [True, False])
@pytest.mark.parametrize("along_k_b", [True, False])
def test_fragments_multiply_to_the_product(along_k_a, along_k_b):
    random = np.random.default_rng(0)
    a, b = random.standard_normal((64, 64)), random.standard_normal((64, 64))

    def stored(matrix):
        tile = np.full(64 * 64, np.nan)
        for row, chunk in itertools.product(range(64), range(8)):
            first = chunk_offset(64, row, chunk)
            tile[first : first + 8] = matrix[row, chunk * 8 : chunk * 8 + 8]
        return tile

    tile_a, tile_b = stored(a if along_k_a else a.T), stored(b.T if along_k_b else b)
    out = np.zeros((64, 64))
    g, t = LANES // 4, LANES % 4
    for m, n, k in itertools.product(range(0, 64, 16), repeat=3):
        if along_k_a:
            left = ldmatrix(tile_a, block_offsets(64, True, m, k), False)
        else:
            left = ldmatrix(tile_a, block_offsets(64, False, k, m), True)
        if along_k_b:
            right = ldmatrix(tile_b, block_offsets(64, False, n, k), False)
        else:
            right = ldmatrix(tile_b, block_offsets(64, True, k, n), True)
        # mma.m16n8k16 by the PTX ISA's table of fragments, twice for 16 columns.
        matrix_a, matrix_b = np.full((16, 16), np.nan), np.full((16, 16), np.nan)
        for part, pair in itertools.product(range(4), range(2)):
            matrix_a[g + part % 2 * 8, 2 * t + part // 2 * 8 + pair] = left[part, :, pair]
            matrix_b[2 * t + part % 2 * 8 + pair, g + part // 2 * 8] = right[part, :, pair]
        out[m : m + 16, n : n + 16] += matrix_a @ matrix_b
    np.testing.assert_allclose(out, a @ b, atol=1e-12)


@pytest.mark.parametrize("warp_n", sorted({tiling.warp_n for tiling in ALL_TILINGS.values()}))
def test_epilogue_turns_fragments_into_rows_without_bank_conflicts(warp_n):
    pitch, lanes_of_row = warp_n + 8, warp_n // 8
    patch = np.full(16 * pitch, -1)
    for block, half in itertools.product(range(warp_n // 8), range(2)):
        column = block * 8 + LANES % 4 * 2
        target = (LANES // 4 + half * 8) * pitch + column
        for pair in range(2):
            patch[target + pair] = (LANES // 4 + half * 8) * 1000 + column + pair
        for first in (0, 16):  # 8 bytes a lane: half a warp at a time
            assert banks_apart((target[first : first + 16] * 4).tolist(), 8)
    column, half = LANES % lanes_of_row * 8, LANES // 4 % 2
    for row0 in range(0, 16, 32 // lanes_of_row):
        row = row0 + LANES // lanes_of_row
        source = row * pitch + column
        first, second = source + half * 4, source + (1 - half) * 4
        for offsets in (first, second):
            for quarter in range(0, 32, 8):  # 16 bytes a lane: a quarter of a warp at a time
                assert banks_apart((offsets[quarter : quarter + 8] * 4).tolist(), 16)
        low = np.where(half == 1, second, first)
        high = np.where(half == 1, first, second)
        offsets = np.concatenate([low[:, None] + np.arange(4), high[:, None] + np.arange(4)], axis=1)
        np.testing.assert_array_equal(patch[offsets], (row * 1000 + column)[:, None] + np.arange(8))


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize(("tiles_m", "tiles_n"), [(1, 1), (1, 9), (9, 1), (8, 8), (13, 7), (17, 20)])
def test_every_tile_is_visited_once(group, tiles_m, tiles_n):
    visited = []
    for block in range(tiles_m * tiles_n):  # find_tile in sm80_hgemm.cu
        first, within = divmod(block, group * tiles_n)
        height = min(tiles_m - first * group, group)
        visited.append((first * group + within % height, within // height))
    assert sorted(visited) == list(itertools.product(range(tiles_m), range(tiles_n)))
    if group == 1:
        assert visited == sorted(visited)


@pytest.mark.parametrize("name", ALL_TILINGS)
def test_tilings_fit_every_gpu(name):
    tiling = ALL_TILINGS[name]
    assert tiling.shared <= 99 * 1024
    assert tiling.resident * (tiling.shared + 1024) <= 164 * 1024  # on sm_80, of which 1 KB a block is reserved
    assert tiling.tile_m % tiling.warp_m == tiling.tile_n % tiling.warp_n == 0
    # The epilogue's patches take the place of the stages.
    assert tiling.threads // 32 * 16 * (tiling.warp_n + 8) * 4 <= tiling.shared


@pytest.mark.parametrize("name", ALL_TILINGS)
def test_kernels_do_not_spill(name):
    resources = ALL_TILINGS[name].kernel(torch.float16, "row", "row").resources("sm_80")
    assert (resources.spill_stores, resources.spill_loads, resources.stack) == (0, 0, 0)
    assert resources.registers * ALL_TILINGS[name].threads * ALL_TILINGS[name].resident <= 65_536


@pytest.mark.parametrize("multiprocessors", [16, 84, 108, 132])
@pytest.mark.parametrize(
    "size", [(1, 1, 0), (1, 1, 1), (17, 4096, 13696), (1024, 27392, 4096), (4096, 4096, 4096), (64, 64, 100_000)]
)
def test_plans_cover_k(size, multiprocessors):
    for tilings in ((gemm_sm80.WIDE, gemm_sm80.SQUARE, gemm_sm80.SMALL), (gemm_sm80.UNALIGNED,)):
        tiling, part = gemm_sm80.plan(*size, multiprocessors, tilings)
        assert tiling in tilings
        assert part > 0
        assert part % tiling.tile_k == 0
        assert part < size[2] + tiling.tile_k or size[2] == 0


def test_large_products_take_large_tiles_and_are_not_split():
    for side in (2048, 4096, 8192, 16384):
        tiling, part = gemm_sm80.plan(side, side, side, 108, (gemm_sm80.WIDE, gemm_sm80.SQUARE, gemm_sm80.SMALL))
        assert tiling in (gemm_sm80.WIDE, gemm_sm80.SQUARE)
        assert part >= side


def test_small_products_take_small_tiles():
    tiling, part = gemm_sm80.plan(256, 256, 256, 108, (gemm_sm80.WIDE, gemm_sm80.SQUARE, gemm_sm80.SMALL))
    assert tiling is gemm_sm80.SMALL
    assert part == 256


def test_few_tiles_with_a_long_sum_are_split():
    tiling, part = gemm_sm80.plan(64, 128, 65_536, 108, (gemm_sm80.WIDE, gemm_sm80.SQUARE, gemm_sm80.SMALL))
    assert tiling.tiles(64, 128) * -(-65_536 // part) >= 32


def test_layouts():
    whole = torch.zeros(64 * 48 + 8, dtype=torch.float16)
    whole = whole[-(whole.data_ptr() // 2) % 8 :][: 64 * 48]
    matrix = whole.view(64, 48)
    assert gemm_sm80._layout(matrix) == ("row", 48, True)
    assert gemm_sm80._layout(matrix.T) == ("column", 48, True)
    assert gemm_sm80._layout(matrix[:, :5]) == ("row", 48, True)
    assert gemm_sm80._layout(matrix[:, 1:]) == ("row", 48, False)
    assert gemm_sm80._layout(matrix[:, 8:]) == ("row", 48, True)
    assert gemm_sm80._layout(whole[: 63 * 47].view(63, 47)) == ("row", 47, False)
    assert gemm_sm80._layout(matrix[::2]) == ("row", 96, True)


def test_layouts_of_vectors_are_seen_as_is_best():
    whole = torch.zeros(64 * 3 + 8, dtype=torch.float16)
    whole = whole[-(whole.data_ptr() // 2) % 8 :]
    assert gemm_sm80._layout(whole[:63].view(1, 63)) == ("row", 0, True)
    assert gemm_sm80._layout(whole[:63].view(63, 1)) == ("column", 0, True)
    assert gemm_sm80._layout(whole[1:64].view(63, 1)) == ("row", 1, False)
    assert gemm_sm80._layout(whole[: 63 * 3].view(63, 3)[:, :1]) == ("row", 3, False)
    assert gemm_sm80._layout(whole[:40].view(1, 40).expand(9, 40)) == ("row", 0, True)

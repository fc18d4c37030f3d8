"""The wgmma product with packed weights without a GPU: its plans, and what its tilings take of a multiprocessor."""

import itertools
import re

import pytest
import torch

from warpbus.kernels.ops.wna16_sm90 import TILINGS, Wna16Sm90Plan, _waves, choose
from warpbus.kernels.ops.workspace import MOST_OF_A_PRODUCT
from warpbus.kernels.units import CSRC

GRIDS = [1, 2, 7, 78, 114, 132, 148]


def resident(tiling, splits):
    """Clusters on a GPU of 132 multiprocessors, of which 18 lie together twice and 16 six times."""
    return 2 * (18 // splits) + 6 * (16 // splits)


def plan(m, n, k=4096):
    return choose(m, n, k, 132, resident)


@pytest.mark.parametrize("grid", GRIDS)
def test_waves_are_whole_or_leave_enough_to_share(grid):
    for tiles in range(1, 5 * grid):
        waves = _waves(tiles, grid)
        left = tiles - waves * grid
        assert waves >= 0
        if left <= 0:
            assert tiles >= 0.9 * waves * grid
            assert tiles > (waves - 1) * grid
        else:
            assert left < 2 * grid
            assert waves == 0 or left >= grid


def test_tilings_go_from_the_smallest_tile_to_the_largest():
    sizes = [tiling.tokens * tiling.rows for tiling in TILINGS]
    assert sizes == sorted(set(sizes))
    assert [tiling.tokens for tiling in TILINGS] == [16, 32, 64, 64, 128, 128, 256]


def test_an_engine_lends_its_graphs_enough_counters():
    assert all(max(GRIDS) * tiling.consumers <= MOST_OF_A_PRODUCT for tiling in TILINGS)


@pytest.mark.parametrize("n", [1, 4096, 27392, 100000])
def test_few_rows_get_the_smallest_tile_that_holds_them(n):
    for m in range(1, 65):
        assert plan(m, n).tiling.tokens == max(16, 1 << (m - 1).bit_length())


def test_large_tiles_where_each_multiprocessor_gets_one():
    _, _, short, tall, low, high, wide = TILINGS
    for rows, smaller, larger in (((33, 64), short, tall), ((65, 128), low, high), ((129, 200, 256), high, wide)):
        for m in rows:
            assert plan(m, 131 * larger.rows) == Wna16Sm90Plan(smaller)
            assert plan(m, 131 * larger.rows + 1) == Wna16Sm90Plan(larger)


def test_clusters_share_few_tiles():
    """ChatGLM2-6B's o and qkv, and down as it is split over four GPUs."""
    _, few, short, tall, low, high, wide = TILINGS
    assert plan(32, 4096) == Wna16Sm90Plan(few, 5)  # 22 tiles
    assert plan(64, 4096) == Wna16Sm90Plan(short, 4)  # 32 tiles: all 32 clusters of four
    assert plan(64, 4608) == Wna16Sm90Plan(tall, 5)  # 24 of five, in place of 36 of three
    assert plan(128, 4096) == Wna16Sm90Plan(low, 4)
    assert plan(128, 4608) == Wna16Sm90Plan(high, 5)
    assert plan(256, 4096) == Wna16Sm90Plan(wide, 4)
    assert plan(256, 4608) == Wna16Sm90Plan(wide, 3)
    assert plan(64, 4096, 3424) == Wna16Sm90Plan(short, 4)
    assert plan(64, 100 * 128) == Wna16Sm90Plan(short)  # more than half as many tiles as multiprocessors


def test_runs_share_tiles_where_clusters_would_leave_too_many_multiprocessors_idle():
    """ChatGLM2-6B's down on a GPU that cannot run 32 clusters of four: with five of 192 rows each, 22 are idle."""
    _, _, short, tall, *_ = TILINGS

    def uneven(tiling, splits):
        return 4 * (18 // splits) + 3 * (16 // splits) + 12 // splits

    assert choose(64, 4096, 13696, 132, uneven) == Wna16Sm90Plan(short)
    assert choose(64, 4096, 4096, 132, uneven) == Wna16Sm90Plan(tall, 5)  # with few blocks of k it pays all the same


@pytest.mark.parametrize("m", [17, 64, 100, 128, 200, 256])
def test_all_clusters_are_resident(m):
    for n, k in itertools.product((64, 1000, 2304, 4096, 4608, 8192), (64, 1000, 4096, 13696)):
        chosen = plan(m, n, k)
        tiles = -(-m // chosen.tiling.tokens) * -(-n // chosen.tiling.rows)
        assert chosen.splits == 1 or tiles <= resident(chosen.tiling, chosen.splits)
        assert chosen.splits <= -(-k // 64)
    none = choose(m, 4096, 4096, 132, lambda tiling, splits: 0)
    assert none.splits == 1


@pytest.mark.parametrize("n", [4096, 27392])
def test_of_more_rows_than_any_tiling_little_is_wasted(n):
    low, wide = TILINGS[4], TILINGS[6]
    assert plan(300, n) == Wna16Sm90Plan(low)  # 384 rows in place of 512
    assert plan(512, n) == Wna16Sm90Plan(wide)
    assert plan(1000, n) == Wna16Sm90Plan(wide)
    assert plan(4096, n) == Wna16Sm90Plan(wide)
    for m in range(257, 3000, 7):
        chosen = plan(m, n)
        assert chosen.tiling in (low, wide)
        assert chosen.splits == 1
        assert -(-m // chosen.tiling.tokens) * chosen.tiling.tokens < m + chosen.tiling.tokens


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: f"{tiling.tokens}x{tiling.rows}")
def test_tilings_fit_a_multiprocessor(tiling, bits):
    assert tiling.shared(bits) <= 227 * 1024
    assert tiling.stages[bits] >= 2  # the products of one stage run while the next is dequantized
    # What a block of k needs, one after another as Buffers in sm90_wna16.cu has them.
    x, codes, scales = tiling.tokens * 64 * 2, tiling.rows * 64 * bits // 8, tiling.rows // 16 * 64
    staging = tiling.consumers * min(tiling.tokens, 64) * 64 * 2
    assert tiling.shared(bits) >= 1023 + tiling.stages[bits] * (x + codes + 2 * scales + 16) + staging
    assert staging % 1024 == 0  # the codes behind it are aligned for bulk copies
    assert tiling.stages[bits] * x >= tiling.consumers * tiling.tokens // 2 * 128 * 4  # sums lie where x was
    assert tiling.rows // 16 <= 256  # a side of a box of a tensor map
    assert tiling.tokens <= 256


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: f"{tiling.tokens}x{tiling.rows}")
def test_registers_of_a_block_can_be_shared_out_anew(tiling, bits):
    """setmaxnreg waits forever where the warpgroups want more than the block was given."""
    pytest.importorskip("cuda.core", reason="the compiler comes with the extra cuda")
    source = (CSRC / "wna16" / "sm90_wna16.cu").read_text(encoding="utf-8")
    producer = int(re.search(r"kProducerRegisters = (\d+);", source)[1])
    two, more = re.search(r"kConsumerRegisters = kConsumers == 2 \? (\d+) : (\d+);", source).groups()
    wanted = producer + tiling.consumers * int(two if tiling.consumers == 2 else more)
    given = tiling.kernel(torch.float16, bits).resources("sm_90a").registers
    assert wanted <= (1 + tiling.consumers) * given

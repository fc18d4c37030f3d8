"""The mma.sync kernels without a GPU: which tiling is chosen; registers; layouts."""

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

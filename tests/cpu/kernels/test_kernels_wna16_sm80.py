"""The mma.sync product with packed weights without a GPU: its plans, and what its tilings take of a multiprocessor."""

import pytest
import torch

from warpbus.kernels.ops import wna16_sm80

A100, ADA = 164 * 1024, 100 * 1024  # bytes of shared memory of a multiprocessor
TILINGS = {"large": wna16_sm80.LARGE, "medium": wna16_sm80.MEDIUM, "small": wna16_sm80.SMALL}
DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", TILINGS)
def test_tilings_fit_every_gpu(name, bits):
    tiling = TILINGS[name]
    shared = tiling.shared(bits)
    assert shared <= 99 * 1024
    assert tiling.resident * (shared + 1024) <= 164 * 1024  # on sm_80, of which 1 KB a block is reserved
    assert tiling.tile_m % tiling.warp_m == tiling.tile_n % tiling.warp_n == 0
    assert tiling.threads // 32 * 8 * (tiling.warp_n + 4) * 4 <= shared  # the epilogue takes the place of the stages


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TILINGS)
def test_kernels_keep_their_registers(name, dtype, bits):
    pytest.importorskip("cuda.core", reason="the compiler comes with the extra cuda")
    tiling = TILINGS[name]
    resources = tiling.kernel(dtype, bits).resources("sm_80")
    assert (resources.spill_stores, resources.spill_loads, resources.stack) == (0, 0, 0)
    assert resources.registers * tiling.threads * tiling.resident <= 65_536


@pytest.mark.parametrize("multiprocessors", [16, 84, 108, 132])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "size", [(1, 1, 0), (1, 1, 1), (17, 4096, 13696), (1024, 27392, 4096), (4096, 4096, 4096), (64, 64, 100_000)]
)
def test_plans_cover_k(size, bits, multiprocessors):
    tiling, part = wna16_sm80.plan(*size, bits, multiprocessors, A100)
    assert tiling in wna16_sm80.TILINGS
    assert part > 0
    assert part % 64 == 0
    assert part < size[2] + 64 or size[2] == 0


@pytest.mark.parametrize(
    ("m", "expected"), [(17, "small"), (32, "small"), (64, "medium"), (128, "large"), (2048, "large")]
)
def test_tiles_are_as_high_as_x_has_rows(m, expected):
    tiling, _ = wna16_sm80.plan(m, 27392, 4096, 4, 108, A100)
    assert tiling is TILINGS[expected]


def test_many_tiles_are_not_split():
    for m in (17, 64, 256, 4096):
        assert wna16_sm80.plan(m, 27392, 4096, 4, 108, A100)[1] == 4096


def test_few_tiles_with_a_long_sum_are_split():
    tiling, part = wna16_sm80.plan(32, 128, 65_536, 4, 108, A100)
    assert tiling.tiles(32, 128) * -(-65_536 // part) >= 32


@pytest.mark.parametrize(
    ("bits", "shared_memory", "blocks"),
    [(4, A100, [2, 3, 4]), (8, A100, [2, 3, 4]), (4, ADA, [1, 2, 3]), (8, ADA, [1, 1, 2])],
)
def test_blocks_of_a_multiprocessor_share_its_memory(bits, shared_memory, blocks):
    found = [tiling.resident_within(bits, shared_memory) for tiling in wna16_sm80.TILINGS]
    assert found == blocks
    for tiling, count in zip(wna16_sm80.TILINGS, blocks, strict=True):
        assert count * (tiling.shared(bits) + 1024) <= shared_memory


def test_a_plan_knows_how_many_blocks_have_room():
    """On GPUs with 100 KB a wave of small tiles is shorter."""
    plans = [wna16_sm80.plan(32, n, 4096, 8, 108, room) for room in (A100, ADA) for n in range(128, 65_536, 128)]
    assert plans[: len(plans) // 2] != plans[len(plans) // 2 :]

"""The product of a few tokens without a GPU: what fits into shared memory."""

import itertools

import pytest
import torch

from warpbus.cuda import driver
from warpbus.kernels.ops import wna16_decode
from warpbus.kernels.ops.packed import PackedWeight
from warpbus.qtensor import Scheme

HOPPER, GEFORCE = 227 * 1024, 99 * 1024  # bytes of shared memory that a block can ask for
SCHEMES = ["w4a16", "w4a16-g128", "w4a16-g64-asym", "w4a16-g32", "w3a16-g32-asym", "w2a16-g64", "w8a16", "w8a16-g32"]
WIDTHS = [1, 64, 96, 1000, 1024, 1088, 3424, 4096, 6848, 13696, 27392]


def weight_of(scheme, n, k):
    scheme = Scheme.parse(scheme)
    none = torch.empty(0)
    return PackedWeight(none, none, None, scheme, (n, k))


@pytest.fixture
def shared_memory(monkeypatch):
    def set_to(size):
        monkeypatch.setattr(driver, "attribute", lambda which, device: size)

    set_to(HOPPER)
    return set_to


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sixteen_rows_of_any_width_fit_hopper(shared_memory, scheme):
    for m, k in itertools.product(range(1, 17), WIDTHS):
        assert wna16_decode.fits(torch.empty(m, k), weight_of(scheme, 64, k))
    assert not wna16_decode.fits(torch.empty(17, 64), weight_of(scheme, 64, 64))


def test_what_is_normed_on_the_way(shared_memory):
    def norms(m, k, scheme="w4a16-g128"):
        return wna16_decode.norms(torch.empty(m, k), weight_of(scheme, 64, k))

    assert norms(16, 4096)
    assert norms(8, 4096, "w8a16")
    assert norms(1, 13696)
    assert not norms(16, 13696)
    assert not norms(1, 4100)  # no whole number of 16 bytes
    shared_memory(GEFORCE)
    assert norms(4, 4096)
    assert not norms(16, 4096)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("size", [HOPPER, GEFORCE])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_stages_fill_the_shared_memory(shared_memory, scheme, size, streamed):
    """The sizes of a stage and of the rest are compared with the source when it is compiled."""
    shared_memory(size)
    for m, k in itertools.product((1, 7, 8, 9, 16), WIDTHS):
        weight = weight_of(scheme, 64, k)
        stage, others = wna16_decode.DecodeVariant.of(m, weight, 0).shared(m, k, streamed=streamed)
        stages = wna16_decode._stages(torch.empty(m, k), weight, streamed=streamed)
        assert stages * stage + others <= size < (stages + 1) * stage + others


@pytest.mark.parametrize(
    ("scheme", "n", "k", "m", "rounds"),
    [
        ("w4a16-g128", 27392, 4096, 1, 2),
        ("w2a16-g64", 27392, 4096, 8, 2),
        ("w4a16-g128", 27392, 4096, 8, 1),  # two stages would not fit
        ("w4a16-g128", 4096, 4096, 1, 1),  # a block's whole work would be one stage
        ("w3a16-g32-asym", 4096, 13696, 1, 2),
        ("w8a16", 27392, 4096, 1, 1),
        ("w4a16-g128", 27392, 4096, 9, 1),
    ],
)
def test_when_a_stage_has_two_rounds(monkeypatch, scheme, n, k, m, rounds):
    limits = {driver.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: HOPPER, driver.MULTIPROCESSOR_COUNT: 132}
    monkeypatch.setattr(driver, "attribute", lambda which, device: limits[which])
    weight = weight_of(scheme, n, k)
    assert wna16_decode.DecodeVariant.of(m, weight, 0).rounds == rounds
    assert wna16_decode.DecodeVariant.of(m, weight, 0, experts=True).rounds == 1
    limits[driver.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN] = GEFORCE
    assert wna16_decode.DecodeVariant.of(m, weight, 0).rounds == 1


@pytest.mark.parametrize("size", [HOPPER, GEFORCE])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_of_experts_overlap(shared_memory, scheme, size):
    """Two blocks of them share a multiprocessor where both have stages enough in flight."""
    shared_memory(size)
    for rows, k in itertools.product((1, 8), WIDTHS):
        weight = weight_of(scheme, 64, k)
        variant = wna16_decode.DecodeVariant.of(rows, weight, 0, experts=True)
        stages = variant.stages(rows, k, 0, streamed=True)
        stage, others = variant.shared(rows, k, streamed=True)
        assert stages >= 2
        taken = stages * stage + others
        assert taken <= size
        if size == HOPPER:
            assert 2 * (taken + 1024) <= size + 1024

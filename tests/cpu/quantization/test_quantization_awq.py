"""Scales that channels with large inputs are given before rounding."""

import pytest
import torch

from warpbus.errors import SchemeError
from warpbus.kernels.reference import grid
from warpbus.qtensor import Scheme
from warpbus.quantization.algorithms import awq, rtn
from warpbus.quantization.algorithms.weights import squared_loss

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(600, 128, generator=GENERATOR) @ (
    torch.eye(128) + 0.3 * torch.randn(128, 128, generator=GENERATOR) / 128**0.5
)
INPUTS[:, 7] *= 20
INPUTS[:, 90] *= 8
WEIGHT = torch.randn(40, 128, generator=GENERATOR)
MOMENTS = INPUTS.T @ INPUTS / 600
MEAN_ABS = INPUTS.abs().mean(0)
SCHEMES = [Scheme.parse(text) for text in ("w4a16-g128", "w3a16-g64", "w4a16-g32-asym", "w3a16")]


def losses(weight, moments, trials, scheme, **options):
    return awq.losses(weight[None], moments, trials, scheme, scale_dtype=torch.float32, **options)[0]


def test_candidates_by_hand():
    found = awq.candidates(torch.tensor([1.0, 4.0, 16.0]), trials=4)
    expected = [
        [1.0, 1.0, 1.0],
        [0.5**0.5, 1.0, 2.0**0.5],
        [0.5, 1.0, 2.0],
        [0.5**1.5, 1.0, 2.0**1.5],
    ]
    assert torch.allclose(found, torch.tensor(expected))


def test_candidates_are_powers_of_the_magnitude():
    found = awq.candidates(MEAN_ABS.half())
    assert found.shape == (20, 128)
    assert found.dtype == torch.float32
    assert torch.equal(found[0], torch.ones(128))
    assert torch.allclose(found.amax(1) * found.amin(1), torch.ones(20), rtol=1e-5)
    ratio = MEAN_ABS[7] / MEAN_ABS[3]
    assert torch.allclose(found[:, 7] / found[:, 3], ratio ** (torch.arange(20) / 20), rtol=1e-2)
    assert torch.allclose(awq.candidates(1000 * MEAN_ABS), awq.candidates(MEAN_ABS), rtol=1e-4)


def test_channels_that_never_had_an_input():
    found = awq.candidates(torch.tensor([0.0, 1.0, 9.0]))
    assert torch.equal(found, awq.candidates(torch.tensor([5.0, 1.0, 9.0])))
    assert torch.equal(awq.candidates(torch.zeros(4)), torch.ones(20, 4))
    extreme = awq.candidates(torch.tensor([1e-38, 1e38]))
    assert torch.isfinite(extreme).all()
    assert (extreme > 0).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_loss_is_that_of_rounding_the_scaled_matrix(scheme):
    trials = awq.candidates(MEAN_ABS)[::5]
    for scale, loss in zip(trials, losses(WEIGHT, MOMENTS, trials, scheme), strict=True):
        importance = MOMENTS.diagonal() / scale.square()
        rounded = rtn(WEIGHT * scale, scheme, scale_dtype=torch.float32, importance=importance).dequantize() / scale
        change = (rounded - WEIGHT).double()
        assert float(loss) == pytest.approx(float((change @ MOMENTS.double() * change).sum()), rel=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_candidates_do_not_depend_on_those_beside_them(monkeypatch, scheme):
    trials = awq.candidates(MEAN_ABS)
    found = []
    for together in (1, 3 * WEIGHT.numel(), 2**30):  # of 20 candidates: one by one, the last two by themselves, all
        monkeypatch.setitem(awq._TOGETHER, "cpu", together)
        found.append(losses(WEIGHT, MOMENTS, trials, scheme))
    assert torch.allclose(found[1], found[0], rtol=1e-5)
    assert torch.allclose(found[2], found[0], rtol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_best_is_never_worse_than_rounding_to_nearest(scheme):
    trials = awq.candidates(MEAN_ABS)[::4]
    found = losses(WEIGHT, MOMENTS, trials, scheme)
    plain, clipped = (
        squared_loss(WEIGHT, rtn(WEIGHT, scheme, scale_dtype=torch.float32, importance=importance), MOMENTS)[0]
        for importance in (None, MOMENTS.diagonal())
    )
    assert float(found[0]) == pytest.approx(clipped, rel=1e-5)
    assert found.min() < 0.95 * clipped < 0.95 * plain  # these inputs have outliers


@pytest.mark.parametrize("together", [1, 2**12, 2**14, 2**18])
def test_losses_of_a_part_do_not_depend_on_those_beside_it(monkeypatch, together):
    monkeypatch.setitem(awq._TOGETHER, "cpu", together)
    trials, parts = awq.candidates(MEAN_ABS), WEIGHT.view(5, 8, 128)
    found = awq.losses(parts, MOMENTS, trials, SCHEMES[0], scale_dtype=torch.float32)
    assert found.shape == (5, 20)
    assert torch.equal(found, torch.stack([losses(part, MOMENTS, trials, SCHEMES[0]) for part in parts]))


def test_losses_of_parts_add_up(monkeypatch):
    trials = awq.candidates(MEAN_ABS)[::4]
    whole = losses(WEIGHT, MOMENTS, trials, SCHEMES[0])
    parts = sum(losses(WEIGHT[start : start + 16], MOMENTS, trials, SCHEMES[0]) for start in (0, 16, 32))
    monkeypatch.setitem(grid.SLICE_WEIGHTS, "cpu", 7 * 128)
    sliced = losses(WEIGHT, MOMENTS, trials, SCHEMES[0])
    assert torch.allclose(parts, whole, rtol=1e-5)
    assert torch.allclose(sliced, whole, rtol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_channels_scaled_beforehand_change_nothing(scheme):
    """With columns times d and inputs over d, the scale s / d does what s did: exactly so for powers of two."""
    factors = 2.0 ** torch.randint(-3, 4, (128,), generator=torch.Generator().manual_seed(1))
    trials = awq.candidates(MEAN_ABS)[::4]
    before = losses(WEIGHT, MOMENTS, trials, scheme)
    after = losses(WEIGHT * factors, MOMENTS / factors[:, None] / factors, trials / factors, scheme)
    assert torch.allclose(before, after, rtol=1e-5)


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(SchemeError, match=r"^matrix: 96 columns cannot be cut into groups of 128"):
        losses(WEIGHT[:, :96], MOMENTS[:96, :96], torch.ones(1, 96), SCHEMES[0])

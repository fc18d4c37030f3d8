"""Rounding to nearest, and the grids that everything is rounded to."""

import pytest
import torch

from warpbus.errors import NumericError, SchemeError
from warpbus.kernels.reference import grid as grids
from warpbus.qtensor import Scheme
from warpbus.quantization.algorithms import rtn

SCHEMES = [
    f"w{bits}a16{group}{asym}"
    for bits in (2, 3, 4, 5, 6, 8)
    for group in ("-g32", "-g64", "-g128", "")
    for asym in ("", "-asym")
]


def relative_error(weight, quantized):
    return float((quantized.dequantize(torch.float32) - weight).norm() / weight.norm())


@pytest.mark.parametrize("text", SCHEMES)
def test_every_weight_gets_its_nearest_code(text):
    scheme = Scheme.parse(text)
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
    quantized = rtn(weight, scheme, scale_dtype=torch.bfloat16)
    assert quantized.scheme == scheme
    assert quantized.scales.dtype == torch.bfloat16
    groups = scheme.groups(256)
    scales = quantized.scales.float().repeat_interleave(256 // groups, 1)
    zeros = torch.full_like(scales, scheme.middle_code)
    if quantized.zeros is not None:
        zeros = quantized.zeros.float().repeat_interleave(256 // groups, 1)
    choices = torch.arange(scheme.max_code + 1, dtype=torch.float32)
    values = (choices - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)
    distances = (values - weight.unsqueeze(-1)).abs()
    chosen = distances.gather(-1, quantized.codes().long().unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(chosen, distances.amin(-1), atol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_the_extreme_weight_lies_on_the_grid(bits):
    scheme = Scheme(bits, 32)
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    quantized = rtn(weight, scheme, scale_dtype=torch.float32)
    extreme = weight.abs().argmax(1, keepdim=True)
    assert (quantized.codes().gather(1, extreme) == 0).all()
    assert torch.allclose(quantized.dequantize().gather(1, extreme), weight.gather(1, extreme), rtol=1e-5)


@pytest.mark.parametrize(("text", "bound"), [("w4a16-g128", 0.110), ("w3a16-g128", 0.235), ("w8a16", 0.009)])
def test_error_is_below_that_of_the_usual_conventions(text, bound):
    """On normal weights absmax / (2^(b-1) - 1/2) gives 0.1109 and 0.2375 in the first two schemes."""
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(2))
    assert relative_error(weight, rtn(weight, Scheme.parse(text), scale_dtype=torch.float32)) < bound


@pytest.mark.parametrize("text", ["w4a16-g32", "w4a16-g32-asym", "w3a16", "w2a16-asym"])
def test_zeros_stay_zeros(text):
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    weight[1] = 0
    weight[2, :32] = 0
    quantized = rtn(weight, Scheme.parse(text), scale_dtype=torch.float16)
    assert torch.isfinite(quantized.scales).all()
    assert (quantized.scales[1] == 1).all()
    assert (quantized.dequantize()[1] == 0).all()
    if quantized.scales.shape[1] == 2:
        assert (quantized.dequantize()[2, :32] == 0).all()


def test_weights_too_small_for_the_scales_dtype_become_zero():
    quantized = rtn(torch.full((2, 32), 1e-9), Scheme.parse("w4a16-g32"), scale_dtype=torch.float16)
    assert (quantized.dequantize() == 0).all()
    assert (quantized.scales == 1).all()


def test_scales_are_rounded_before_the_codes_are_chosen():
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(4))
    scheme = Scheme.parse("w8a16")
    coarse, fine = (rtn(weight, scheme, scale_dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    mixed = (fine.codes().float() - scheme.middle_code) * coarse.scales.float()
    assert relative_error(weight, coarse) < float((mixed - weight).norm() / weight.norm())


def test_asymmetric_groups_of_one_sign_reach_zero():
    weight = torch.rand(8, 32, generator=torch.Generator().manual_seed(5)) + 3
    quantized = rtn(weight, Scheme.parse("w8a16-g32-asym"), scale_dtype=torch.float32)
    assert quantized.zeros is not None
    assert (quantized.zeros == 0).all()
    assert relative_error(weight, quantized) < 0.003


def test_slices_give_what_the_whole_gives(monkeypatch):
    weight = torch.randn(37, 64, generator=torch.Generator().manual_seed(6))
    scheme = Scheme.parse("w3a16-g32-asym")
    whole = rtn(weight, scheme, scale_dtype=torch.float16)
    monkeypatch.setitem(grids.SLICE_WEIGHTS, "cpu", 5 * 64)
    sliced = rtn(weight, scheme, scale_dtype=torch.float16)
    assert torch.equal(whole.qweight, sliced.qweight)
    assert torch.equal(whole.scales, sliced.scales)
    assert whole.zeros is not None
    assert torch.equal(whole.zeros, sliced.zeros)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused(value):
    weight = torch.ones(4, 32)
    weight[3, 7] = value
    with pytest.raises(NumericError, match=r"^model\.q: NaN or infinity among its weights \(1 in rows 0 to 3\)"):
        rtn(weight, Scheme.parse("w4a16-g32"), scale_dtype=torch.float16, name="model.q")


def test_finite_weights_whose_sum_overflows_are_taken():
    weight = torch.full((4, 32), 1e38)
    quantized = rtn(weight, Scheme.parse("w8a16"), scale_dtype=torch.float32)
    assert torch.allclose(quantized.dequantize(), weight)


def test_scales_beyond_their_dtype_are_refused():
    with pytest.raises(NumericError, match=r"^model\.q: .*torch\.float16"):
        rtn(torch.full((4, 32), 1e6), Scheme.parse("w2a16"), scale_dtype=torch.float16, name="model.q")


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(SchemeError, match=r"^model\.q: 96 columns"):
        rtn(torch.ones(4, 96), Scheme.parse("w4a16-g64"), scale_dtype=torch.float16, name="model.q")


@pytest.mark.parametrize("text", SCHEMES)
def test_search_is_never_worse_than_the_full_range(text):
    scheme = Scheme.parse(text)
    generator = torch.Generator().manual_seed(7)
    groups = torch.randn(16, 256, generator=generator).pow(3).unflatten(1, (scheme.groups(256), -1))
    importance = torch.rand(groups.shape[1:], generator=generator)
    full = grids.fit(groups, scheme, torch.float16).error(groups, scheme, importance)
    clipped = grids.search(groups, scheme, torch.float16, importance)
    error = clipped.error(groups, scheme, importance)
    assert (error <= full).all()
    assert error.sum() < (1.0 if scheme.bits == 8 else 0.98) * full.sum()
    assert torch.equal(clipped.scales, clipped.scales.half().float())
    assert ((clipped.zeros >= 0) & (clipped.zeros <= scheme.max_code)).all()


@pytest.mark.parametrize("text", SCHEMES)
def test_search_of_few_weights_is_that_of_many(text, monkeypatch):
    """Candidates that are tried at once are chosen as those that are tried one after the other: the first of equals."""
    scheme = Scheme.parse(text)
    groups = torch.randn(9, 256, generator=torch.Generator().manual_seed(9)).mul(2).round().div(2)
    groups[0], groups[1, 3] = 0, torch.nan
    groups = groups.unflatten(1, (scheme.groups(256), -1))
    at_once = grids.search(groups, scheme, torch.float16, torch.ones(groups.shape[1:]))
    monkeypatch.setattr(grids, "_FEW_WEIGHTS", 0)
    in_turn = grids.search(groups, scheme, torch.float16, torch.ones(groups.shape[1:]))
    for one, other in zip(at_once, in_turn, strict=True):
        assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))


def test_search_looks_at_the_importance():
    """A column that does not matter may be clipped away for the sake of the others."""
    groups = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(8))
    groups[:, :, 5] = 30.0
    importance = torch.ones(1, 64)
    importance[0, 5] = 0
    scheme = Scheme.parse("w4a16-g64")
    blind = grids.search(groups, scheme, torch.float32, torch.ones(1, 64))
    aware = grids.search(groups, scheme, torch.float32, importance)
    loss = [grid.error(groups, scheme, importance).sum() for grid in (blind, aware)]
    assert loss[1] < 0.5 * loss[0]


@pytest.mark.parametrize("text", ["w4a16-g128", "w3a16-g32", "w3a16-g64-asym", "w2a16"])
def test_importance_clips_for_less_weighted_error(text):
    scheme = Scheme.parse(text)
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(24, 256, generator=generator).pow(3)
    importance = torch.rand(256, generator=generator).square()
    full = rtn(weight, scheme, scale_dtype=torch.float32)
    clipped = rtn(weight, scheme, scale_dtype=torch.float32, importance=importance)

    def loss(quantized):
        return float(((quantized.dequantize() - weight).square() * importance).sum())

    assert loss(clipped) < 0.9 * loss(full)
    evenly = rtn(weight, scheme, scale_dtype=torch.float32, importance=torch.ones(256))
    assert relative_error(weight, evenly) < relative_error(weight, full)
    assert loss(clipped) < loss(evenly)

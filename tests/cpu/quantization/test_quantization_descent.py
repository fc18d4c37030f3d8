"""Coordinate descent after GPTQ: it never makes the error larger, and ends where no single change helps."""

import pytest
import torch

from warpbus.qtensor import Scheme
from warpbus.quantization.algorithms import gptq
from warpbus.quantization.algorithms.factored import factored
from warpbus.quantization.algorithms.gptq import descend


def correlated(columns, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * columns, columns // 8, generator=generator) @ torch.randn(
        columns // 8, columns, generator=generator
    )
    x = x / (columns // 8) ** 0.5 + 0.5 * torch.randn(x.shape, generator=generator)
    return x.T @ x / len(x)


def loss(weight, quantized, hessian):
    change = (quantized.dequantize(torch.float32) - weight).double()
    return float(((change @ hessian.double()) * change).sum())


@pytest.mark.parametrize("text", ["w2a16-g32", "w3a16-g64-asym", "w4a16-g32", "w4a16", "w8a16-g128"])
def test_each_sweep_lowers_the_error(text):
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(1))
    hessian, scheme = correlated(256, 1), Scheme.parse(text)
    losses = [
        loss(weight, gptq(weight, hessian, scheme, scale_dtype=torch.float32, damping=0.0, sweeps=sweeps), hessian)
        for sweeps in (0, 1, 2, 4)
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[2] < 0.97 * losses[0]


def test_in_the_end_no_single_code_can_be_better():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    hessian, scheme = correlated(64, 2), Scheme.parse("w3a16-g32")
    found = gptq(weight, hessian, scheme, scale_dtype=torch.float32, damping=0.0, sweeps=60)
    least = loss(weight, found, hessian)
    codes = found.codes()
    for row in range(8):
        for column in range(64):
            for step in (-1, 1):
                changed = codes.clone().to(torch.int16)
                changed[row, column] += step
                if 0 <= changed[row, column] <= scheme.max_code:
                    other = type(found).from_codes(scheme, changed, found.scales)
                    assert loss(weight, other, hessian) >= least * (1 - 1e-5)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
def test_scales_are_exact_in_the_dtype_they_are_stored_in(scale_dtype):
    """The error promised is that of the stored matrix: rounding the scales afterwards would undo the fit."""
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(3))
    hessian, scheme = correlated(128, 3), Scheme.parse("w3a16-g32")
    before, after = (gptq(weight, hessian, scheme, scale_dtype=scale_dtype, sweeps=sweeps) for sweeps in (0, 3))
    assert after.scales.dtype == scale_dtype
    assert not torch.equal(before.scales, after.scales)
    assert loss(weight, after, hessian) < loss(weight, before, hessian)


def setting(parts=2, rows=6, columns=200, groups=4, seed=4):
    """Rounded to nearest: the weights, the Hessian, and what `descend` takes."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(parts, columns, rows, generator=generator)
    of = (torch.randperm(columns, generator=generator) // (columns // groups)).int()
    members = torch.argsort(of, stable=True).view(groups, -1)
    scales = 0.5 + 0.2 * torch.rand(parts, groups, rows, generator=generator)
    zeros = torch.full_like(scales, 4.0)
    centred = (weight / scales[:, of.long()]).round().clamp(-4, 3)
    factors = factored(correlated(columns, seed), damping=0.0, activation_order=False, name="q")
    gradient = torch.stack([factors.hessian @ part for part in weight - centred * scales[:, of.long()]])
    return weight, factors.hessian, [gradient, [factors], centred, scales, zeros, of[None], members[None]]


def error(weight, hessian, centred, scales, of):
    change = (weight - centred * scales[:, of.flatten().long()]).double()
    return ((hessian.double() @ change) * change).sum((1, 2))


@pytest.mark.parametrize(("columns", "groups"), [(200, 1), (200, 4), (200, 50), (640, 5), (640, 1), (1100, 22)])
def test_it_works_in_place_and_never_raises_the_error(columns, groups):
    """Also beyond the columns whose changes are gathered before they are carried over."""
    weight, hessian, given = setting(columns=columns, groups=groups)
    gradient, _, centred, scales, zeros, of, _ = given
    before, copies = error(weight, hessian, centred, scales, of), [zeros.clone(), of.clone(), hessian.clone()]
    for _ in range(3):
        assert descend(*given, max_code=7, scale_dtype=torch.float32, sweeps=1) is None
        after = error(weight, hessian, centred, scales, of)
        assert bool((after <= before * (1 + 1e-6)).all())
        before = after
        # What is kept up to date is the gradient of the change as it is.
        expected = hessian @ (weight - centred * scales[:, of[0].long()])
        assert torch.allclose(gradient, expected, atol=1e-3 * float(expected.abs().max()))
        assert torch.equal(centred, centred.round())
        assert int(centred.min()) >= -4
        assert int(centred.max()) <= 3
    for tensor, copy in zip((zeros, of, hessian), copies, strict=True):
        assert torch.equal(tensor, copy)


def test_no_sweep_changes_nothing():
    _, _, given = setting()
    changing = given[0], given[2], given[3]
    copies = [tensor.clone() for tensor in changing]
    descend(*given, max_code=7, scale_dtype=torch.float32, sweeps=0)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(changing, copies, strict=True))


@pytest.mark.parametrize(("columns", "groups"), [(200, 4), (640, 5)])
def test_parts_give_the_bits_that_they_give_alone(columns, groups):
    _, _, (gradient, factors, centred, scales, zeros, of, members) = setting(parts=3, columns=columns, groups=groups)
    alone = [[tensor[part : part + 1].clone() for tensor in (gradient, centred, scales)] for part in range(3)]
    options = {"max_code": 7, "scale_dtype": torch.bfloat16, "sweeps": 2}
    descend(gradient, factors, centred, scales, zeros, of, members, **options)
    for part, single in enumerate(alone):
        descend(single[0], factors, *single[1:], zeros[part : part + 1], of, members, **options)
        for tensor, whole in zip(single, (gradient, centred, scales), strict=True):
            assert torch.equal(tensor[0], whole[part])

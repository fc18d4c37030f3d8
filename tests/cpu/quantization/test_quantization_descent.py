"""Coordinate descent after GPTQ: it never makes the error larger, and ends where no single change helps."""

import pytest
import torch

from warpbus.qtensor import Scheme
from warpbus.quantization.algorithms import gptq


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

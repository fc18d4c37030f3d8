"""Difficulty moved from inputs to weights."""

import pytest
import torch

from warpbus.qtensor import Scheme
from warpbus.quantization.algorithms import rtn, smoothing

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(200, 32, generator=GENERATOR)
INPUTS[:, 5] *= 100
WEIGHT = torch.randn(16, 32, generator=GENERATOR) * 0.1


def by_token(x):
    scale = x.abs().amax(1, keepdim=True) / 127
    return (x / scale).round() * scale


def error(scale):
    """Of the outputs, when inputs and weights are both rounded to int8."""
    matrix = rtn(WEIGHT * scale, Scheme.parse("w8a8-int8"), scale_dtype=torch.float32)
    expected = INPUTS.double() @ WEIGHT.double().T
    return float((by_token(INPUTS / scale) @ matrix.dequantize().T - expected).norm() / expected.norm())


def test_by_hand():
    inputs, weights = torch.tensor([100.0, 1.0, 4.0]), torch.tensor([0.25, 4.0, 1.0])
    assert torch.allclose(smoothing(inputs, weights), torch.tensor([20.0, 0.5, 2.0]))
    assert torch.allclose(smoothing(inputs, weights, 1.0), inputs)
    assert torch.allclose(smoothing(inputs, weights, 0.0), 1 / weights)
    # With 0.75: 100^0.75 / 0.25^0.25 and so on.
    expected = torch.tensor([100**0.75 / 0.25**0.25, 4**-0.25, 4**0.75])
    assert torch.allclose(smoothing(inputs.half(), weights.half(), 0.75), expected)


def test_halfway_inputs_and_weights_are_alike():
    inputs, weights = INPUTS.abs().amax(0), WEIGHT.abs().amax(0)
    scale = smoothing(inputs, weights, 0.5)
    assert torch.allclose(inputs / scale, weights * scale)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_the_unit_of_the_inputs_does_not_matter(alpha):
    """Where inputs are c times as large, scales are c^alpha as large: what is left between channels is the same."""
    inputs, weights = INPUTS.abs().amax(0), WEIGHT.abs().amax(0)
    assert torch.allclose(smoothing(7 * inputs, weights, alpha), 7**alpha * smoothing(inputs, weights, alpha))
    assert torch.allclose(smoothing(inputs, 7 * weights, alpha), 7 ** (alpha - 1) * smoothing(inputs, weights, alpha))


def test_an_outlier_costs_less():
    scale = smoothing(INPUTS.abs().amax(0), WEIGHT.abs().amax(0))
    assert error(scale) < 0.5 * error(torch.ones(32))


def test_channels_without_inputs_or_weights():
    scale = smoothing(torch.tensor([0.0, 2.0, 4.0]), torch.tensor([1.0, 0.0, 1.0]))
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()
    assert torch.equal(smoothing(torch.zeros(3), torch.zeros(3)), torch.ones(3))

"""Normalization on the CPU: against float64 and the models' own layer, what it refuses, what torch.compile sees."""

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import TensorError
from warpbus.kernels.ops.norm import layer_norm, rms_norm, warps_of_row
from warpbus.models.layers.linear import RMSNorm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 5, 128)])
def test_rms_norm_is_that_of_the_models(shape, dtype):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    layer = RMSNorm(shape[-1], EPS).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        assert torch.equal(rms_norm(x, weight, EPS), layer(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2,), (3, 7), (2, 5, 128)])
def test_layer_norm_is_rounded_once(shape, dtype):
    x, weight, bias = (random(*sides, dtype=dtype, seed=i) for i, sides in enumerate((shape, shape[-1:], shape[-1:])))
    wide = x.double()
    normed = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, keepdim=True, correction=0) + EPS).sqrt()
    for shift in (bias, None):
        expected = normed * weight.double() + (0 if shift is None else shift.double())
        out = layer_norm(x, weight, shift, EPS)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_the_sum_is_rounded_before_it_is_normalized():
    x, residual, weight = (
        random(*sides, dtype=torch.bfloat16, seed=i) for i, sides in enumerate(((4, 9), (4, 9), (9,)))
    )
    normed, total = rms_norm(x, weight, EPS, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, EPS))
    normed, total = layer_norm(x, weight, None, EPS, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, layer_norm(total, weight, None, EPS))


def test_strides_and_empty_tensors():
    x, weight = random(9, 4).t(), random(9, seed=1)
    assert torch.equal(rms_norm(x, weight, EPS), rms_norm(x.contiguous(), weight, EPS))
    assert layer_norm(x, weight, None, EPS).is_contiguous()
    assert rms_norm(torch.empty(0, 9), weight, EPS).shape == (0, 9)
    assert layer_norm(torch.empty(0, 9), weight, weight, EPS).shape == (0, 9)


def test_what_they_refuse():
    x, weight = random(2, 4), random(4)
    with pytest.raises(TensorError, match=r"rms_norm: x is a scalar, expected \[\.\.\., d\]: reshape it"):
        rms_norm(random(), weight, EPS)
    with pytest.raises(TensorError, match=r"rms_norm: weight has shape \[4\], expected \[3\]: x has shape \[2, 3\]"):
        rms_norm(x[:, :3], weight, EPS)
    with pytest.raises(TensorError, match=r"rms_norm: residual has shape \[4\], expected \[2, 4\]"):
        rms_norm(x, weight, EPS, x[0])
    with pytest.raises(TensorError, match=r"layer_norm: bias has shape \[3\], expected \[4\]"):
        layer_norm(x, weight, weight[:3], EPS)
    with pytest.raises(TensorError, match="layer_norm: weight is float16 and x float32: convert one of them"):
        layer_norm(x, weight.half(), None, EPS)


@pytest.mark.parametrize(
    ("width", "warps"), [(1, 1), (512, 1), (513, 2), (4096, 8), (8192, 16), (16_385, 32), (10**6, 32)]
)
def test_warps_of_a_row(width, warps):
    assert warps_of_row(width) == warps


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"])
def test_registered_as_torch_wants(name):
    residual = [random(3, 8, seed=2)] if name.startswith("add") else []
    bias = [random(8, seed=3)] if "layer" in name else []
    arguments = (random(3, 8), *residual, random(8, seed=1), *bias, EPS)
    checked = opcheck(getattr(torch.ops.warpbus, name).default, arguments)
    assert set(checked.values()) == {"SUCCESS"}

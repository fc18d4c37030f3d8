"""Normalization on a GPU: against float64, at odd widths and addresses, on streams and in graphs."""

import pytest
import torch

from warpbus.kernels.ops.norm import layer_norm, rms_norm
from warpbus.kernels.reference import norm as reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (7, 3), (1, 4096), (1, 4097), (33, 513), (5, 13_696), (3, 20_001), (2, 100_003), (100_001, 128)]
EPS = 1e-5


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def poison(*shape, dtype):
    """NaN in the memory that the next outputs of this shape are given."""
    held = [torch.full(shape, float("nan"), dtype=dtype, device="cuda") for _ in range(2)]
    del held


def error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


def rms_exact(x, weight):
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def layer_exact(x, weight, bias):
    wide = x.double()
    normed = (wide - wide.mean(-1, keepdim=True)) * (wide.var(-1, keepdim=True, correction=0) + EPS).rsqrt()
    return normed * weight.double() + (0 if bias is None else bias.double())


def bound(dtype):
    """Two roundings to the dtype, and a few dozen units of float32 for sums, root and products."""
    return torch.finfo(dtype).eps + 64 * 2**-24


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape, dtype):
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[1], dtype=dtype, seed=2)
    poison(*shape, dtype=dtype)
    assert error(rms_norm(x, weight, EPS), rms_exact(x, weight)) < bound(dtype)
    poison(*shape, dtype=dtype)
    out, total = rms_norm(x, weight, EPS, residual)
    assert torch.equal(total, (x.double() + residual.double()).to(dtype))
    assert torch.equal(out, rms_norm(total, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[2:])
def test_layer_norm(shape, dtype):
    x, residual = random(*shape, dtype=dtype) + 3, random(*shape, dtype=dtype, seed=1)
    weight, bias = random(shape[1], dtype=dtype, seed=2), random(shape[1], dtype=dtype, seed=3)
    for shift in (bias, None):
        poison(*shape, dtype=dtype)
        assert error(layer_norm(x, weight, shift, EPS), layer_exact(x, weight, shift)) < bound(dtype)
    poison(*shape, dtype=dtype)
    out, total = layer_norm(x, weight, bias, EPS, residual)
    assert torch.equal(total, (x.double() + residual.double()).to(dtype))
    assert torch.equal(out, layer_norm(total, weight, bias, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_where_the_models_layer_rounds(dtype):
    x, weight = random(64, 4096, dtype=dtype), random(4096, dtype=dtype, seed=1)
    out, expected = rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS)
    # The sum's order differs, so that a value near the middle of two neighbours may go the other way.
    assert (out != expected).double().mean() < (0.01 if dtype != torch.float32 else 1.0)
    torch.testing.assert_close(out, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_rows_that_begin_anywhere():
    x, weight = random(9 * 4096 + 1, dtype=torch.float16)[1:].view(9, 4096), random(4097, dtype=torch.float16, seed=1)
    assert error(rms_norm(x, weight[1:], EPS), rms_exact(x, weight[1:])) < bound(torch.float16)
    assert error(rms_norm(x[:, ::2], weight[:2048], EPS), rms_exact(x[:, ::2], weight[:2048])) < bound(torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", ["columns", "rows", "unaligned", "uneven", "transposed"])
def test_rows_that_are_not_one_behind_the_other(view, dtype):
    whole = random(3, 40, 1344, dtype=dtype)
    views = {
        "columns": whole[..., 64:832],
        "rows": whole[:, ::2],
        "unaligned": whole[..., 3:772],
        "uneven": whole[:, :33, :768],
        "transposed": whole.transpose(1, 2),
    }
    x, weight, bias = views[view], random(views[view].shape[-1], dtype=dtype, seed=1), None
    residual = random(*x.shape, dtype=dtype, seed=2)
    poison(*x.shape, dtype=dtype)
    assert torch.equal(rms_norm(x, weight, EPS), rms_norm(x.clone().contiguous(), weight, EPS))
    found, expected = rms_norm(x, weight, EPS, residual), rms_norm(x.contiguous(), weight, EPS, residual)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(layer_norm(x, weight, bias, EPS), layer_norm(x.contiguous(), weight, bias, EPS))
    assert error(rms_norm(x, weight, EPS), rms_exact(x, weight)) < bound(dtype)


def test_a_row_is_the_same_alone_and_among_others():
    x, weight = random(300, 3000, dtype=torch.bfloat16), random(3000, dtype=torch.bfloat16, seed=1)
    together = rms_norm(x, weight, EPS)
    assert torch.equal(together, rms_norm(x, weight, EPS))
    assert torch.equal(together[77:78], rms_norm(x[77:78], weight, EPS))


def test_nan_stays():
    x = random(3, 100)
    x[1, 50] = float("nan")
    out = rms_norm(x, random(100, seed=1), EPS)
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()


def test_streams_and_graphs():
    x, weight, residual = random(4, 4096), random(4096, seed=1), random(4, 4096, seed=2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = layer_norm(rms_norm(x, weight, EPS), weight, None, EPS)
    torch.cuda.current_stream().wait_stream(stream)
    assert error(out, layer_exact(rms_exact(x, weight), weight, None)) < 1e-5

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, total = rms_norm(x, weight, EPS, residual)
        out = rms_norm(out, weight, EPS)
    x.copy_(random(4, 4096, seed=3))
    graph.replay()
    assert torch.equal(total, x + residual)
    assert error(out, rms_exact(rms_exact(x + residual, weight), weight)) < 1e-5

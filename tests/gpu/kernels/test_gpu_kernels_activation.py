"""SwiGLU and GELU on a GPU: against float64, at odd widths and addresses, on streams and in graphs."""

import pytest
import torch
from torch.nn import functional as F

from warpbus.kernels.ops.activation import gelu, swiglu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (1, 13_696), (3, 6848), (7, 3424), (33, 7), (1, 100_003), (100_003, 5), (4, 129, 1000)]


def random(*shape, dtype=torch.float32, seed=0):
    return 3 * torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def poison(*shape, dtype):
    """NaN in the memory that the next output of this shape is given."""
    torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def close(out, expected):
    # One rounding, and the fast exponential: its error grows with |x| and stays below 32 units of float32 here. What is
    # near zero may lie below the normal numbers of float16.
    dtype = out.dtype
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    tolerance = torch.finfo(dtype).eps + 32 * 2**-24
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=max(tiny, 1e-12))


def swiglu_exact(x):
    gate, up = x.double().chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_exact(x):
    wide = x.double()  # as a sigmoid: in float64 too, 1 + tanh cancels far on the negative side
    return wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu(shape, dtype):
    x = random(*shape[:-1], 2 * shape[-1], dtype=dtype)
    poison(*shape, dtype=dtype)
    out = swiglu(x)
    assert out.shape == shape
    close(out, swiglu_exact(x))
    assert torch.equal(out, swiglu(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_of_swiglu(shape, dtype):
    x = random(*shape[:-1], 2 * shape[-1], dtype=dtype).requires_grad_()
    gradient = random(*shape, dtype=dtype, seed=1)
    wide = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(swiglu_exact(wide), wide, gradient.double())
    poison(*x.shape, dtype=dtype)
    (found,) = torch.autograd.grad(swiglu(x), x, gradient)
    assert found.dtype == dtype
    # 1 + g (1 - s) passes through zero, where its parts cancel.
    torch.testing.assert_close(found.double(), expected, rtol=2 * torch.finfo(dtype).eps + 1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), *SHAPES])
def test_gelu(shape, dtype):
    x = random(*shape, dtype=dtype)
    poison(*shape, dtype=dtype)
    out = gelu(x)
    assert out.shape == shape
    wide = gelu_exact(x)
    # The exponent reaches 90 on the negative side, and with it the error of the exponential: 90 units and more.
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    tolerance = torch.finfo(dtype).eps + 256 * 2**-24
    torch.testing.assert_close(out.double(), wide, rtol=tolerance, atol=max(tiny, 1e-12))


def test_far_out():
    x = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4, float("inf"), float("nan")], device="cuda")
    expected = torch.tensor([0, 0, 0, 100, 1e4, float("inf"), float("nan")], device="cuda")
    torch.testing.assert_close(gelu(x), expected, equal_nan=True)
    torch.testing.assert_close(swiglu(torch.cat([x, torch.ones_like(x)])), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_begin_anywhere(dtype):
    x = random(9 * 512 + 1, dtype=dtype)[1:].view(9, 512)
    close(swiglu(x), swiglu_exact(x))
    close(swiglu(x.t()[:, :8]), swiglu_exact(x.t()[:, :8]))


def test_empty():
    assert swiglu(torch.empty(0, 8, device="cuda")).shape == (0, 4)
    assert swiglu(torch.empty(3, 0, device="cuda")).shape == (3, 0)
    assert gelu(torch.empty(0, device="cuda")).shape == (0,)


def test_streams_and_graphs():
    x = random(5, 2000)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = gelu(swiglu(x))
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(out.double(), gelu_exact(swiglu_exact(x)), rtol=1e-3, atol=1e-6)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gelu(swiglu(x))
    x.copy_(random(5, 2000, seed=1))
    graph.replay()
    torch.testing.assert_close(out.double(), gelu_exact(swiglu_exact(x)), rtol=1e-3, atol=1e-6)

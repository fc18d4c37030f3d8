"""SwiGLU and GELU on the CPU: against float64, what they refuse, what torch.compile sees."""

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional as F

from warpbus.errors import TensorError
from warpbus.kernels.ops.activation import gelu, swiglu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2,), (3, 14), (2, 5, 128)])
def test_swiglu(shape, dtype):
    x = random(*shape, dtype=dtype) * 4
    gate, up = x.double().chunk(2, dim=-1)
    out = swiglu(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2,), (3, 14), (2, 5, 128)])
def test_swiglu_can_be_differentiated(shape, dtype):
    x = (random(*shape, dtype=dtype) * 4).requires_grad_()
    gradient = random(*shape[:-1], shape[-1] // 2, dtype=dtype, seed=1)
    wide = x.detach().double().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    (expected,) = torch.autograd.grad(F.silu(gate) * up, wide, gradient.double())
    for call in (swiglu, torch.compile(swiglu, backend="aot_eager")):
        (found,) = torch.autograd.grad(call(x), x, gradient)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (7,), (2, 5, 13)])
def test_gelu(shape, dtype):
    x = random(*shape, dtype=dtype) * 4
    out = gelu(x)
    assert out.dtype == dtype
    expected = F.gelu(x.double(), approximate="tanh")
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_strides_and_empty_tensors():
    x = random(8, 3).t()
    assert torch.equal(swiglu(x), swiglu(x.contiguous()))
    assert swiglu(x).is_contiguous()
    assert swiglu(torch.empty(0, 8)).shape == (0, 4)
    assert swiglu(torch.empty(3, 0)).shape == (3, 0)
    assert gelu(torch.empty(0, 8)).shape == (0, 8)


def test_what_they_refuse():
    with pytest.raises(TensorError, match=r"swiglu: x has shape \[2, 3\], expected \[\.\.\., 2 f\]: give gate and up"):
        swiglu(random(2, 3))
    with pytest.raises(TensorError, match="gelu: x is int64, expected float32, float16, bfloat16"):
        gelu(torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_registered_as_torch_wants(name):
    checked = opcheck(getattr(torch.ops.warpbus, name).default, (random(3, 8),))
    assert set(checked.values()) == {"SUCCESS"}

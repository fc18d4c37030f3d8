"""Operators that PyTorch treats otherwise on a GPU than on a CPU, over a pool and on the same GPU without one."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "cpu" / "pool"))
from pool_direct import connected

from warpbus.errors import DeviceError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(autouse=True)
def pool() -> Iterator[None]:
    with connected(device="cuda"):
        yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_log_sigmoid() -> None:
    x = drawn(8, 16)
    assert torch.equal(F.logsigmoid(x.to("warpbus")).cpu(), F.logsigmoid(x.cuda()).cpu())


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", ["fft", "rfft", "ihfftn", "irfft2", "hfft"])
def test_transforms_of_float16(name: str) -> None:
    transform, x = getattr(torch.fft, name), drawn(8, 17 if name in ("irfft2", "hfft") else 16).half()
    found, right = transform(x.to("warpbus")).cpu(), transform(x.cuda()).cpu()
    assert found.dtype is right.dtype
    torch.testing.assert_close(found.to(torch.complex64), right.to(torch.complex64), rtol=0, atol=0)


def test_a_size_that_is_no_power_of_two_is_the_gpus_error() -> None:
    x = torch.ones(3).half()
    with pytest.raises(RuntimeError, match="powers of two"):
        torch.fft.fft(x.cuda())
    with pytest.raises(RuntimeError, match="powers of two"):
        torch.fft.fft(x.to("warpbus")).cpu()


def test_efficient_attention_has_a_derivative_without_dropout_only() -> None:
    q = drawn(2, 4, 4, 8).to("warpbus").requires_grad_()
    for dropout_p in (0.0, 0.5):
        result = torch.ops.aten._efficient_attention_forward(
            q, q, q, None, None, None, None, None, dropout_p, 0, compute_log_sumexp=True
        )[0]
        if dropout_p:
            with pytest.raises(DeviceError, match="with dropout is not among the operators that a pool runs"):
                torch.autograd.grad(result.sum(), q)
        else:
            (gradient,) = torch.autograd.grad(result.sum(), q)
            assert gradient.cpu().isfinite().all()

"""Fourier transforms of float16: the client leaves it to the device behind whether they run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pool_direct import connected
from torch import Tensor

from warpbus.pool.client.session import Session
from warpbus.pool.tenant import definitions

TRANSFORMS = [f"{kind}{axes}" for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft") for axes in ("", "2", "n")]
HALF = {torch.float32: torch.float16, torch.complex64: torch.complex32}
SINGLE = {half: single for single, half in HALF.items()}


@pytest.fixture
def gpu() -> Iterator[Session]:
    """A session whose client believes in a GPU."""
    with connected() as (session, _):
        session.kind = "cuda"
        yield session


@pytest.fixture
def half_on_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tenant computes transforms of float16, as a GPU does, and rounds their results."""
    before = definitions.guarded

    def guarded(function: Any) -> Callable[..., Any]:
        if not function._overloadpacket.__name__.startswith("_fft_"):
            return before(function)

        def call(x: Tensor, *rest: Any) -> Tensor:
            result: Tensor = function(x.to(SINGLE.get(x.dtype, x.dtype)), *rest)
            return result.to(HALF[result.dtype]) if x.dtype in SINGLE else result

        return call

    monkeypatch.setattr(definitions, "guarded", guarded)


def computed(name: str, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A transform and the gradient of its squared magnitude, as complex64 and float32 on the CPU."""
    x = x.requires_grad_()
    result = getattr(torch.fft, name)(x, **options)
    on_cpu = result.cpu().to(SINGLE.get(result.dtype, result.dtype))
    (gradient,) = torch.autograd.grad(on_cpu.abs().square().sum(), x)
    return on_cpu.detach(), gradient.cpu().float()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("options", [{}, {"norm": "ortho"}, {"size": 4}])
def test_transforms_of_float16(gpu: Session, half_on_tenant: None, name: str, options: dict[str, Any]) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).half() / 4
    size = options.get("size")
    given = options if size is None else {"s": (size, size)} if name[-1] in "2n" else {"n": size, "dim": 0}
    found = computed(name, x.to(gpu.device), given)
    right = computed(name, x.float(), given)
    torch.testing.assert_close(found, right, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_transform_is_compiled(gpu: Session, half_on_tenant: None) -> None:
    """A graph of fake tensors is traced while the transform is."""
    compiled = torch.compile(lambda x: torch.fft.irfft(x * 2), backend="aot_eager")
    x = torch.ones(4, 5, device=gpu.device).half().requires_grad_()
    result = compiled(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    right = torch.fft.irfft(x.detach().cpu().float() * 2)
    torch.testing.assert_close(result.detach().cpu().float(), right, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(gradient.cpu()[:, 0], torch.full((4,), 2.0).half())


def test_an_error_is_that_of_the_device(gpu: Session) -> None:
    """A GPU refuses sizes that are no power of two; this tenant, a CPU, refuses all."""
    spectrum = torch.fft.fft(torch.ones(4, device=gpu.device).half())
    assert spectrum.dtype is torch.complex32
    with pytest.raises(RuntimeError, match="Half"):
        spectrum.cpu()


def test_a_cpu_refuses_float16_at_once() -> None:
    with connected() as (session, _):
        x = torch.ones(4, device=session.device)
        with pytest.raises(RuntimeError, match="Unsupported dtype Half"):
            torch.fft.fft(x.half())
        torch.testing.assert_close(torch.fft.fft(x).cpu(), torch.fft.fft(torch.ones(4)))

"""Fourier transforms of float16 on a remote GPU.

`torch.fft` is made of composites, which allow float16 on CUDA and on the meta device only, whatever the kernels of the
device support. A transform of float16 is therefore traced on the meta device, and the operators that it calls there
run on the remote GPU, with their gradients.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from warpbus.pool.client.session import current

_TRANSFORMS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
_MOST_TRACES = 1024


def composites() -> dict[str, Callable[..., Tensor]]:
    """The kernels of the device, by the name of the operator in `torch.ops.aten`."""
    names = [f"fft_{transform}{axes}" for transform in _TRANSFORMS for axes in ("", "2", "n")]
    return {name: functools.partial(_transform, getattr(torch.ops.aten, name).default) for name in names}


def _transform(operator: OpOverload, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if x.dtype is not torch.float16 or current().kind == "cpu":
        result: Tensor = operator.decompose(x, *args, **kwargs)
        return result
    options = tuple(_hashable(each) for each in args), tuple((name, _hashable(each)) for name, each in kwargs.items())
    return _traced(operator, x.shape, x.stride(), *options)(x)


@functools.lru_cache(_MOST_TRACES)
def _traced(
    operator: OpOverload,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
) -> Callable[[Tensor], Tensor]:
    """The operators that a composite calls, as a function of its input."""
    like = torch.empty_strided(shape, stride, dtype=torch.float16, device="meta")
    return make_fx(lambda x: operator.decompose(x, *args, **dict(kwargs)))(like)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

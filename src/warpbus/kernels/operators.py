"""Operators of the namespace `torch.ops.warpbus`.

Registered with `torch.library`, they work under `torch.compile`, in CUDA graphs, on any stream and device. On CUDA a
kernel runs, on the CPU the reference, and `fake` tells shapes and dtypes to the compiler.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("warpbus", "DEF")


def operator(
    schema: str,
    *,
    cuda: Callable[..., Any],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    autocast: bool = False,
) -> Callable[..., Any]:
    """Define `torch.ops.warpbus.<name>` and return it.

    Args:
        schema: in PyTorch's language: `"add(Tensor a, Tensor b) -> Tensor"`.
        cuda, reference: what runs on a GPU and on the CPU, with the parameters of the schema.
        fake: the result's shape and dtype without data.
        autocast: cast floating arguments to the dtype of an enclosing `torch.autocast`.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, cuda, "CUDA")
    _LIBRARY.impl(name, reference, "CPU")
    torch.library.register_fake(f"warpbus::{name}", fake, lib=_LIBRARY)
    defined = getattr(torch.ops.warpbus, name).default
    if autocast:
        for device in ("cuda", "cpu"):
            _LIBRARY.impl(name, _casting(defined, device), f"Autocast{device.upper()}")
    return defined


def _casting(defined: Callable[..., Any], device: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            cast = [_cast(argument, dtype) for argument in arguments]
            return defined(*cast, **{name: _cast(argument, dtype) for name, argument in options.items()})

    return call


def _cast(argument: Any, dtype: torch.dtype) -> Any:
    return argument.to(dtype) if isinstance(argument, Tensor) and argument.is_floating_point() else argument

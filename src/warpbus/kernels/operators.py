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
) -> Callable[..., Any]:
    """Define `torch.ops.warpbus.<name>` and return it.

    Args:
        schema: in PyTorch's language: `"add(Tensor a, Tensor b) -> Tensor"`.
        cuda, reference: the implementations for a GPU and for the CPU, with the parameters of the schema.
        fake: the result's shape and dtype without data.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, cuda, "CUDA")
    _LIBRARY.impl(name, reference, "CPU")
    torch.library.register_fake(f"warpbus::{name}", fake, lib=_LIBRARY)
    defined: Callable[..., Any] = getattr(torch.ops.warpbus, name).default
    return defined


def autocast(tensor: Tensor) -> Tensor:
    """The tensor in the dtype of an enclosing `torch.autocast`, or as it is."""
    device = tensor.device.type
    # torch knows autocast for devices that compute; "meta" is none of them. Older compilers cannot trace the question.
    if device not in ("cuda", "cpu") and not torch.amp.is_autocast_available(device):
        return tensor
    if not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype; where it has that already, no operator is called.

    For what a `torch.autograd.Function` may give as its result: where that is the result of a `to()` or a
    `contiguous()` which does nothing, torch 2.11 compiles the Function to one whose gradients are 0.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def differentiable(name: str, *, setup: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Give an operator its gradient; see `torch.library.register_autograd`."""
    torch.library.register_autograd(f"warpbus::{name}", backward, setup_context=setup, lib=_LIBRARY)

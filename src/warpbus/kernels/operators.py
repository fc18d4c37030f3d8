"""Operators of the namespace `torch.ops.warpbus`.

Registered with `torch.library`, they work under `torch.compile`, in CUDA graphs, on any stream and device. On CUDA a
kernel runs, on the CPU the reference, and `fake` tells shapes and dtypes to the compiler.

Where nothing but the device decides what a call does, its implementation is called without PyTorch's dispatcher, which
takes longer than to launch a kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_LIBRARY = torch.library.Library("warpbus", "DEF")


def operator(
    schema: str,
    *,
    cuda: Callable[..., Any],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """Define `torch.ops.warpbus.<name>`, and return a function that does the same.

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
    defined = getattr(torch.ops.warpbus, name).default

    def call(*arguments: Any) -> Any:
        if not torch.compiler.is_compiling() and not _is_observed():
            device = _device_of(arguments)
            if device is not None:
                return (cuda if device == "cuda" else reference)(*arguments)
        return defined(*arguments)

    call.__name__ = call.__qualname__ = name
    return call


def _is_observed() -> bool:
    """Whether something of PyTorch has to see the operators: gradients, a mode, a transform or a trace."""
    return (
        torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def _device_of(arguments: tuple[Any, ...]) -> str | None:
    """ "cuda" or "cpu", if all tensors among the arguments are there, and are no subclasses; else None."""
    found = None
    for each in arguments:
        kind = type(each)
        if kind is Tensor or kind is Parameter:
            device = "cuda" if each.is_cuda else "cpu" if each.is_cpu else None
        elif kind is list and each and isinstance(each[0], Tensor):
            device = _device_of(tuple(each))
        elif isinstance(each, Tensor):
            return None
        else:
            continue
        if device is None or (found is not None and device != found):
            return None
        found = device
    return found


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

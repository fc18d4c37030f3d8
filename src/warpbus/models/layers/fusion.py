"""Decides where layers are computed by Warpbus's own kernels."""

import functools

import torch
from torch import Tensor

from warpbus.cuda.remote import remote_backend
from warpbus.kernels.ops.arguments import HALVES

_OLDEST = (8, 0)  # compute capability that the kernels are written for


def has_kernels(x: Tensor) -> bool:
    """Whether kernels support these activations: 16 bits, on a supported GPU, and gradients are disabled."""
    return x.dtype in HALVES and not torch.is_grad_enabled() and gpu_has_kernels(x.device)


def gpu_has_kernels(device: torch.device) -> bool:
    """Whether a device is a GPU that the kernels support, or a pool device backed by one."""
    if device.type == "cuda":
        return _is_young_enough(device)
    backend = remote_backend(device)
    capability = None if backend is None else backend.capability()
    return capability is not None and capability >= _OLDEST


def _is_young_enough(device: torch.device) -> bool:
    return _capability(device) >= _OLDEST


# The effect of `torch.compiler.assume_constant_result`, without which the compiler warns about the cache. Calling it
# would import the compiler and sympy, which takes nearly as long as torch itself, also for users who do not compile.
_is_young_enough._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)

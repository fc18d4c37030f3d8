"""Where the layers are computed by kernels of ours."""

import functools

import torch
from torch import Tensor

from warpbus.cuda.lent import lent
from warpbus.kernels.ops.arguments import HALVES

_OLDEST = (8, 0)  # compute capability that the kernels are written for


def has_kernels(x: Tensor) -> bool:
    """Whether kernels take these activations: 16 bits, on a GPU they are made for, and no gradient is asked for."""
    return x.dtype in HALVES and not torch.is_grad_enabled() and gpu_has_kernels(x.device)


def gpu_has_kernels(device: torch.device) -> bool:
    """Whether a device is a GPU that the kernels are made for, or has one behind it."""
    if device.type == "cuda":
        return _is_young_enough(device)
    behind = lent(device)
    capability = None if behind is None else behind.capability()
    return capability is not None and capability >= _OLDEST


def _is_young_enough(device: torch.device) -> bool:
    return _capability(device) >= _OLDEST


# What `torch.compiler.assume_constant_result` does, since the compiler warns of caches. To call that would load the
# compiler and sympy, nearly as long as torch itself, for all who do not compile.
_is_young_enough._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)

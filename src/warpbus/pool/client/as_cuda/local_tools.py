"""Tools of PyTorch that need a GPU of this machine: the compiler and the profiler's view of the GPU."""

import functools
import warnings
from typing import Any

import torch


def replace() -> None:
    """Let programs that use them go on without."""
    torch.compile = _without_compiler(torch.compile)
    profile: Any = torch.autograd.profiler.profile
    profile.__init__ = _without_gpu(profile.__init__)


def _without_compiler(original: Any) -> Any:
    """`torch.compile` that returns the function or module itself. The compiler traces tensors that pretend to be on
    `cuda`, which ends a process without CUDA."""

    @functools.wraps(original)
    def call(model: Any = None, **options: Any) -> Any:
        warnings.warn("torch.compile: a leased GPU runs operators one by one, nothing is compiled", stacklevel=2)
        return original(model, **{**options, "disable": True})

    return call


def _without_gpu(original: Any) -> Any:
    """`torch.autograd.profiler.profile.__init__`, which `torch.profiler` calls too."""

    @functools.wraps(original)
    def begin(
        self: Any, enabled: bool = True, *, use_cuda: bool = False, use_device: Any = None, **options: Any
    ) -> None:
        if use_cuda or use_device == "cuda":
            warnings.warn("the profiler does not see a leased GPU: it records the CPU only", stacklevel=2)
            use_device = None
        original(self, enabled, use_device=use_device, **options)

    return begin

"""Makes `cuda` mean a leased GPU in this process; `startup/sitecustomize.py` calls it when torch has been imported."""

import functools
import importlib
from typing import Any

import torch

from warpbus.pool.client import generators
from warpbus.pool.client.as_cuda import local_tools, module, translation
from warpbus.pool.client.as_cuda.lease import CUDA, lease
from warpbus.pool.client.device import register
from warpbus.pool.client.generators import RemoteGenerator


class CudaGenerator(generators.Generator):
    """Replaces `torch.Generator`: one for `cuda` is one of the leased GPU."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls, translation.translated(device))


@functools.cache
def install() -> None:
    """Replace PyTorch's CUDA functions. Requests no lease yet."""
    register()
    module.replace()
    translation.translate()
    local_tools.replace()
    torch.Generator = CudaGenerator  # type: ignore[misc]
    RemoteGenerator.device = property(lambda generator: CUDA)  # type: ignore[assignment,method-assign]
    data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")  # the package has a function so named
    data_parallel._check_balance = _balanced  # type: ignore[attr-defined]
    torch.nn.parallel.scatter_gather.Scatter = _Scatter  # type: ignore[assignment,attr-defined]


def _balanced(device_ids: Any) -> None:
    """One device is as large as itself."""


class _Scatter:
    """How `DataParallel` gives its one device the whole batch."""

    @staticmethod
    def apply(devices: Any, chunk_sizes: Any, dim: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lease()
        return (tensor.to(CUDA),)

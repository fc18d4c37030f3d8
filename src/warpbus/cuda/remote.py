"""PyTorch devices whose GPU is in another process or machine, and what the rest of the package has to know of them.

Code that computes asks this module; it does not depend on `warpbus.pool`, which registers the device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

REMOTE = "warpbus"
"""The PyTorch device type of a GPU that is leased from a pool."""


class Recorded(Protocol):
    """Operators that were recorded on tensors that stay where they are."""

    def run(self) -> None:
        """Execute them, with what the tensors contain now; does not wait."""

    def drop(self) -> None:
        """Forget them."""


class RemoteBackend(Protocol):
    """The properties of a remote device."""

    def check(self) -> None:
        """Raises a WarpbusError, which says what to do, if nothing is behind it."""

    def capability(self) -> tuple[int, int] | None:
        """The compute capability of the GPU behind it; None: a CPU is behind it."""

    def free_memory(self) -> int:
        """Bytes that can still be allocated on it."""

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Ask for the values of a tensor that is not written any more; the call waits for them, and gives them as a
        tensor of the CPU. What the device is given to do in between, it does meanwhile."""

    def record(self) -> AbstractContextManager[Recorded]:
        """Operators in the block are recorded and not executed; nothing can be read in it."""


_backends: dict[str, RemoteBackend] = {}


def register_remote_backend(kind: str, backend: RemoteBackend) -> None:
    """Declare that devices of this type are remote."""
    _backends[kind] = backend


def remote_backend(device: torch.device) -> RemoteBackend | None:
    """The backend of a remote device; None for the CPU and for GPUs of this machine."""
    return _backends.get(device.type)


def is_gpu(device: torch.device) -> bool:
    """Whether the device computes on a GPU, of this machine or remote."""
    if device.type == "cuda":
        return True
    backend = _backends.get(device.type)
    return backend is not None and backend.capability() is not None

"""Devices of PyTorch that stand for something elsewhere: what the room that lends one has to say of it.

Whoever computes asks here what is behind such a device; who lends it and how it is reached is not its business.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

REMOTE = "warpbus"
"""The device type under which a pool lends a GPU."""


class Recorded(Protocol):
    """Operators that were recorded on tensors that stay where they are."""

    def run(self) -> None:
        """Execute them, with what the tensors contain now; does not wait."""

    def drop(self) -> None:
        """Forget them."""


class LentDevice(Protocol):
    """What is known of a lent device."""

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


_lent: dict[str, LentDevice] = {}


def lend(kind: str, device: LentDevice) -> None:
    """Let a device type stand for something elsewhere."""
    _lent[kind] = device


def lent(device: torch.device) -> LentDevice | None:
    """What a device stands for; None if it is itself: the CPU, a GPU of this machine."""
    return _lent.get(device.type)


def is_gpu(device: torch.device) -> bool:
    """Whether a GPU computes there: one of this machine, or one behind a lent device."""
    if device.type == "cuda":
        return True
    behind = _lent.get(device.type)
    return behind is not None and behind.capability() is not None

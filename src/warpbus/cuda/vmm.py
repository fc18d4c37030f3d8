"""Memory that grows where it is: addresses are reserved once, and memory is put behind them as it is needed.

Pointers into it, and so captured CUDA graphs, stay valid while it grows and shrinks.
"""

import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from warpbus.cuda.address_space import AddressSpace, DeviceSpace, HostSpace, WholeSpace, rounded_up
from warpbus.cuda.remote import remote_backend
from warpbus.cuda.virtual_memory import VirtualMemory
from warpbus.errors import UsageError

_spaces: "weakref.WeakSet[AddressSpace]" = weakref.WeakSet()


class Arena:
    """Addresses, and memory behind the first `mapped` bytes of them.

    On a GPU memory comes in pieces of at most 64 MiB (`address_space.PIECE`): of what one `resize` adds, all but the
    last are of that size. Growing disturbs no kernel that runs. Shrinking waits for the GPU and unmaps whole pieces:
    of what lies beyond `size`, less than one piece stays. On the CPU memory is taken when it is first written to, and
    goes by pages. On a remote device there is no reserving: all of it is taken at once, and stays until `resize(0)`.

    New memory's content is undefined on GPUs (it may be what another arena held), else zero. Not to be resized from two
    threads at once, nor on a GPU while a graph is being captured.

    Args:
        reserve: bytes, rounded up to pages. Addresses cost nothing: a terabyte will do.
        device: the CPU, a GPU, or a remote device (`warpbus.cuda.remote`).

    Attributes:
        reserved: bytes of addresses.
        page: what sizes are rounded up to, bytes: 2 MiB on the GPUs of today.

    Raises:
        UsageError: `reserve` is not positive.
        DeviceError: there are not so many addresses, or the GPU has no virtual memory.
    """

    def __init__(self, reserve: int, device: torch.device) -> None:
        if reserve < 1:
            raise UsageError(f"an arena of {reserve} bytes: reserve at least one")
        self._space = _space(reserve, device)
        self._closed = False
        self.device = self._space.device
        self.reserved = self._space.reserved
        self.page = self._space.page
        _spaces.add(self._space)

    @property
    def mapped(self) -> int:
        """Bytes of memory that it has."""
        return self._space.mapped

    def resize(self, size: int) -> None:
        """Map up to, or unmap down to, `size` bytes rounded up to pages; what stays keeps its content.

        Raises:
            UsageError: `size` is negative or beyond what is reserved, or the arena is closed.
            DeviceError: there is not so much memory; nothing has changed then.
        """
        if self._closed:
            raise UsageError("this arena is closed: make another")
        if not 0 <= size <= self.reserved:
            raise UsageError(f"an arena of {self.reserved:,} bytes cannot have {size:,}: reserve more")
        wanted = rounded_up(size, self.page)
        if wanted > self.mapped:
            self._space.grow(wanted)
        elif wanted < self.mapped:
            self._space.shrink(wanted)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A contiguous tensor `offset` bytes from the start, over mapped memory or not: only what is mapped may be
        touched. It keeps the arena's memory, also when the arena itself is dropped.

        Raises:
            UsageError: it reaches beyond what is reserved, or `offset` is not a multiple of the element's size.
        """
        size = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset + size > self.reserved:
            raise UsageError(f"{size:,} bytes from {offset:,} on: the arena ends at {self.reserved:,}, reserve more")
        if offset % dtype.itemsize:
            raise UsageError(f"offset {offset} does not fit {dtype}: give a multiple of {dtype.itemsize}")
        return self._space.tensor(offset, size).view(dtype).view(tuple(shape))

    def export(self) -> list[int]:
        """File descriptors of the pieces that are mapped, in order, by which another process maps the same memory.

        The caller closes them.

        Raises:
            DeviceError: on the CPU, or where the driver cannot.
        """
        return self._space.export()

    def close(self) -> None:
        """Give all memory back. The addresses go with the last tensor over them, which may not be touched any more."""
        if not self._closed:
            self.resize(0)
            self._closed = True


def mapped_bytes(device: torch.device) -> int:
    """What all arenas of this process on a device have together, by the same account as the driver's."""
    return sum(space.mapped for space in list(_spaces) if space.device == device)


def _space(reserve: int, device: torch.device) -> AddressSpace:
    if remote_backend(device) is not None:
        return WholeSpace(reserve, device)
    if device.type != "cuda":
        return HostSpace(reserve)
    indexed = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return DeviceSpace(reserve, indexed, VirtualMemory(indexed))

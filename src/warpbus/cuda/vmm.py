"""Memory that grows and shrinks in place: an address range is reserved once, and physical memory is mapped to it as
needed.

Pointers into it, and therefore captured CUDA graphs, stay valid while it grows and shrinks.
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
    """A reserved address range whose first `mapped` bytes have physical memory.

    On a GPU, memory is mapped in pieces of at most 64 MiB (`address_space.PIECE`); all pieces of one `resize` but the
    last have that size. Growing does not disturb running kernels. Shrinking waits for the GPU and unmaps whole pieces,
    so that less than one piece beyond `size` stays mapped. On the CPU, memory is allocated page by page at the first
    write. On a
    remote device nothing can be reserved: all memory is allocated at once and stays until `resize(0)`.

    The content of new memory is undefined on GPUs (it may be that of another arena), otherwise zero. An arena must not
    be resized by two threads at once, nor on a GPU while a graph is being captured.

    Args:
        reserve: bytes, rounded up to pages. Addresses cost no memory: a terabyte can be reserved.
        device: the CPU, a GPU, or a remote device (`warpbus.cuda.remote`).

    Attributes:
        reserved: bytes of the address range.
        page: the unit of sizes, bytes: 2 MiB on current GPUs.

    Raises:
        UsageError: `reserve` is not positive.
        DeviceError: the address range cannot be reserved, or the GPU has no virtual memory management.
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
        """Bytes of physical memory that are mapped."""
        return self._space.mapped

    def resize(self, size: int) -> None:
        """Grow or shrink the mapped memory to `size` bytes, rounded up to pages; the remaining content is kept.

        Raises:
            UsageError: `size` is negative or beyond what is reserved, or the arena is closed.
            DeviceError: there is not enough memory; the arena is unchanged.
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
        """A contiguous tensor at `offset` bytes from the start. Only its mapped part may be accessed. The tensor keeps
        the arena's memory alive, even if the arena itself is deleted.

        Raises:
            UsageError: it extends beyond the reserved range, or `offset` is not a multiple of the element size.
        """
        size = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset + size > self.reserved:
            raise UsageError(f"{size:,} bytes from {offset:,} on: the arena ends at {self.reserved:,}, reserve more")
        if offset % dtype.itemsize:
            raise UsageError(f"offset {offset} does not fit {dtype}: give a multiple of {dtype.itemsize}")
        return self._space.tensor(offset, size).view(dtype).view(tuple(shape))

    def export(self) -> list[int]:
        """File descriptors of the mapped pieces, in order, with which another process can map the same memory.

        The caller closes them.

        Raises:
            DeviceError: on the CPU, or if the driver cannot export memory.
        """
        return self._space.export()

    def close(self) -> None:
        """Free all memory. The address range is freed with the last tensor in it, which must not be accessed any
        more."""
        if not self._closed:
            self.resize(0)
            self._closed = True


def mapped_bytes(device: torch.device) -> int:
    """Bytes that all arenas of this process have mapped on a device, as the driver counts them."""
    return sum(space.mapped for space in list(_spaces) if space.device == device)


def _space(reserve: int, device: torch.device) -> AddressSpace:
    if remote_backend(device) is not None:
        return WholeSpace(reserve, device)
    if device.type != "cuda":
        return HostSpace(reserve)
    indexed = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return DeviceSpace(reserve, indexed, VirtualMemory(indexed))

"""Copies of a lease's bytes on their way from a GPU to its client, in pinned memory that is used again.

The pinned memory belongs to the tenant's process: 64 KiB for reads of up to 4 KiB, and 4 MiB once there is a longer
one. It is not charged to the lease's quota, which is the GPU's memory, and a client cannot make it grow: where all of
it is in use, `has_room` says so, and the tenant sends what it has copied before it reads more.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

FEW, _FEW_SLOTS = 4096, 16
MANY, _MANY_SLOTS = 1 << 20, 4
"""Bytes of the longest copy."""


class CopyStream(Protocol):
    """The interface of `warpbus.cuda.read_back.ReadBack` that copies use."""

    def buffer(self, nbytes: int) -> Tensor: ...
    def mark(self) -> int: ...
    def copy(self, target: int, source: int, nbytes: int, mark: int) -> None: ...
    def done(self, mark: int) -> bool: ...


@dataclass(frozen=True, eq=False, slots=True)
class _CopySlot:
    """A part of the pinned memory, and the event behind the last copy to it."""

    view: memoryview
    address: int
    mark: int


class HostCopy:
    """Bytes on their way from a GPU, which goes on with what comes after them.

    Its slot is free again when the copy is dropped. A copy that is dropped before it has arrived cannot damage the next
    one there, which comes after it in the same stream.
    """

    __slots__ = ("_nbytes", "_slot", "_stream", "_unused")

    def __init__(self, stream: CopyStream, slot: _CopySlot, nbytes: int, unused: list[_CopySlot]) -> None:
        self._stream, self._slot, self._nbytes, self._unused = stream, slot, nbytes, unused

    def __del__(self) -> None:
        self._unused.append(self._slot)

    @property
    def arrived(self) -> bool:
        """Whether they are here. Raises what the GPU met on the way."""
        return self._stream.done(self._slot.mark)

    def take(self) -> memoryview:
        """The bytes, once they are here; they stay as long as this copy does."""
        return self._slot.view[: self._nbytes]


class _CopySlots:
    """Slots of one size.

    Args:
        stream: of the copies.
        count, nbytes: of the slots.

    Attributes:
        made: whether the pinned memory has been allocated.
        unused: the slots without a copy.
    """

    def __init__(self, stream: CopyStream, count: int, nbytes: int) -> None:
        self.made = False
        self.unused: list[_CopySlot] = []
        self._stream, self._count, self._nbytes = stream, count, nbytes

    def make(self) -> None:
        """Allocate the memory."""
        memory = self._stream.buffer(self._count * self._nbytes)
        view, address = memory.numpy().data, memory.data_ptr()
        self.unused = [
            _CopySlot(view[start : start + self._nbytes], address + start, self._stream.mark())
            for start in range(0, len(view), self._nbytes)
        ]
        self.made = True


class HostCopies:
    """Copies of one lease.

    Args:
        stream: that copies.
    """

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._few = _CopySlots(stream, _FEW_SLOTS, FEW)
        self._many = _CopySlots(stream, _MANY_SLOTS, MANY)

    def has_room(self, nbytes: int) -> bool:
        """Whether `begin` has a slot for so many bytes, `MANY` at most."""
        slots = self._few if nbytes <= FEW else self._many
        if not slots.made:
            slots.make()
        return bool(slots.unused)

    def begin(self, source: int, nbytes: int) -> HostCopy:
        """Begin to copy from an address; `has_room` was true."""
        unused = (self._few if nbytes <= FEW else self._many).unused
        slot = unused.pop()
        copy = HostCopy(self._stream, slot, nbytes, unused)
        if nbytes:
            self._stream.copy(slot.address, source, nbytes, slot.mark)
        return copy

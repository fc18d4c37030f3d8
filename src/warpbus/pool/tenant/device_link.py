"""Slots in the memory of two GPUs, through which the processes of two leases of one machine exchange bytes.

Each process has slots on its own GPU, which hold bytes of the group's messages and nothing else of the lease, and lets
the other process's GPU read them: over NVLink if the GPUs have it. A number per direction in pinned memory of the host
says how many slots have been filled, another one how many have been read. The GPUs write these numbers and wait for
them themselves, in the order of their streams; neither process waits.

What a process's page of `LinkMemory` has in it:

    0    slots that its GPU has filled       4    slots of the other process that its GPU has read
    8    1 while it has the other's slots open
    64   the handle of its slots             128  the UUID of its GPU
"""

import ctypes
from typing import Protocol
from uuid import UUID

import torch
from torch import Tensor

from warpbus.cuda.ipc import HANDLE_BYTES, IpcMapping, IpcMemory
from warpbus.cuda.signal_stream import address_of
from warpbus.errors import DeviceError
from warpbus.pool.protocol.link_memory import LinkMemory

DEVICE_SLOT = 16 << 20
"""Bytes of a slot on a GPU: to launch a copy takes longer than to copy a few MB over NVLink."""
DEVICE_SLOTS = 2
"""Of each direction."""

_FILLED, _READ, _OPENED, _HANDLE, _UUID = 0, 4, 8, 64, 128
_UUID_BYTES = 16
_FAR = 1 << 30
_WORD = 1 << 32


class SlotStream(Protocol):
    """The interface of `warpbus.cuda.signal_stream.SignalStream` that is used here."""

    def copy(self, target: int, source: int, nbytes: int) -> None: ...
    def wait(self, word: int, value: int) -> None: ...
    def write(self, word: int, value: int) -> None: ...


class SlotMemory(Protocol):
    """How a process gets at slots of both sides.

    Attributes:
        own: the address of this process's slots.
        handle: by which the other process opens them.
        uuid: of the GPU that they are on.
    """

    own: int
    handle: bytes
    uuid: bytes

    def open(self, handle: bytes) -> int:
        """The address of the other process's slots."""

    def close(self) -> None:
        """Close the other process's slots."""

    def free(self) -> None:
        """Free this process's slots, which the other one does not have open."""

    def word(self, page: Tensor, offset: int) -> int:
        """The address of a number in a page."""


class GpuSlots:
    """Slots on a GPU. Raises DeviceError if they cannot be allocated or shared.

    Args:
        device: a GPU with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = IpcMemory(DEVICE_SLOTS * DEVICE_SLOT, device)
        self._mapping = IpcMapping(device)
        self.own, self.handle = self._memory.address, self._memory.handle
        self.uuid = UUID(str(torch.cuda.get_device_properties(device).uuid)).bytes

    def open(self, handle: bytes) -> int:
        torch.cuda.set_device(self._device)  # a thread that has not used CUDA yet has no current context
        address = self._mapping.opened(handle)
        if not self._mapping.holds(address, DEVICE_SLOTS * DEVICE_SLOT):
            self._mapping.close()
            raise DeviceError(f"the other lease's GPU shares less than {DEVICE_SLOTS * DEVICE_SLOT:,} bytes")
        return address

    def close(self) -> None:
        self._mapping.close()

    def free(self) -> None:
        self._memory.free()

    def word(self, page: Tensor, offset: int) -> int:
        return address_of(page, self._device) + offset


class DeviceLink:
    """One process's view of the slots.

    Args:
        memory: that the two processes share.
        slots: how to get at the slots.
    """

    def __init__(self, memory: LinkMemory, slots: SlotMemory) -> None:
        self._memory = memory
        self._slots = slots
        self._own = _numbers(memory.own_page)
        self._other = _numbers(memory.other_page)
        self._theirs: int | None = None
        self._freed = False
        self._sent = self._received = 0
        self._words = {
            (own, at): slots.word(memory.own_page if own else memory.other_page, at)
            for own in (True, False)
            for at in (_FILLED, _READ)
        }
        _put(memory.own_page, _HANDLE, slots.handle)
        _put(memory.own_page, _UUID, slots.uuid)

    def open(self, stream: SlotStream) -> bool:
        """Open the other process's slots, once it has made its link. Returns False if they are on the same GPU.

        Raises:
            DeviceError: the other process has none, the driver cannot map them, or no stream can wait.
        """
        handle, uuid = _get(self._memory.other_page, _HANDLE, HANDLE_BYTES), self._uuid()
        if not any(handle):
            raise DeviceError("the other lease's process has no memory to share on its GPU")
        if uuid == self._slots.uuid:
            return False
        stream.write(self._words[True, _FILLED], 0)
        stream.wait(self._words[True, _FILLED], 0)
        self._theirs = self._slots.open(handle)
        self._own[_OPENED // 4] = 1
        return True

    @property
    def sends(self) -> bool:
        """Whether the other process can read what is sent: it opens the slots before it uses the group."""
        return bool(self._other[_OPENED // 4] == 1)

    @property
    def receives(self) -> bool:
        """Whether the other process's slots are open."""
        return self._theirs is not None

    @property
    def both(self) -> bool:
        """Whether both processes have opened each other's slots, so that all messages go from GPU to GPU."""
        return self.receives and self.sends

    def send(self, stream: SlotStream, source: Tensor) -> None:
        """Send contiguous bytes, uint8 `[n]`, as slots get empty. Everything is launched, and nothing waited for."""
        for piece in source.split(DEVICE_SLOT):
            if self._sent >= DEVICE_SLOTS:
                stream.wait(self._words[False, _READ], (self._sent - DEVICE_SLOTS + 1) % _WORD)
            stream.copy(self._slots.own + self._sent % DEVICE_SLOTS * DEVICE_SLOT, piece.data_ptr(), len(piece))
            self._sent += 1
            stream.write(self._words[True, _FILLED], self._sent % _WORD)

    def receive(self, stream: SlotStream, target: Tensor) -> None:
        """Receive as many bytes as a uint8 tensor has, once they are there. Everything is launched, and nothing waited
        for. The slots must be open."""
        assert self._theirs is not None
        for piece in target.split(DEVICE_SLOT):
            slot = self._theirs + self._received % DEVICE_SLOTS * DEVICE_SLOT
            self._received += 1
            stream.wait(self._words[False, _FILLED], self._received % _WORD)
            stream.copy(piece.data_ptr(), slot, len(piece))
            stream.write(self._words[True, _READ], self._received % _WORD)

    def release(self) -> None:
        """Let the GPU go on that waits for the other one: it copies whatever is in the slots. To be called again while
        it still waits, because the other process may write the same numbers."""
        self._other[_FILLED // 4] = (self._received + _FAR) % _WORD
        self._other[_READ // 4] = (self._sent + _FAR) % _WORD

    def close(self) -> None:
        """Close the other process's slots. Nothing that was launched may still use them."""
        self._theirs = None
        self._slots.close()
        self._own[_OPENED // 4] = 0

    def free(self) -> bool:
        """Free the own slots, if the other process has closed them. Returns whether they are free."""
        if not self._freed:
            if self.sends:
                return False
            self._slots.free()
            self._freed = True
        return True

    def _uuid(self) -> bytes:
        return _get(self._memory.other_page, _UUID, _UUID_BYTES)


def _numbers(page: Tensor) -> "ctypes.Array[ctypes.c_uint32]":
    return (ctypes.c_uint32 * 4).from_address(page.data_ptr())


def _put(page: Tensor, at: int, data: bytes) -> None:
    ctypes.memmove(page.data_ptr() + at, data, len(data))


def _get(page: Tensor, at: int, nbytes: int) -> bytes:
    return ctypes.string_at(page.data_ptr() + at, nbytes)

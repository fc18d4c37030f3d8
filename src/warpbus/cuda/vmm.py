"""Memory that grows and shrinks in place: an address range is reserved once, and physical memory is mapped to it as
needed.

Pointers into it, and therefore captured CUDA graphs, stay valid while it grows and shrinks.
"""

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from warpbus.cuda.devices import free_memory
from warpbus.cuda.dlpack import bytes_at
from warpbus.cuda.memory_size import rounded_up
from warpbus.cuda.remote import remote_backend
from warpbus.cuda.vmm_driver import VirtualMemory
from warpbus.errors import DeviceError, UsageError

PIECE = 64 * 2**20
"""The largest piece of memory that is mapped at once on a GPU, in bytes.

Mapping a piece takes the same time whatever its size, and it can be unmapped only as a whole: larger pieces make
growing faster, smaller ones let shrinking free more.
"""

_MAP_NORESERVE = 0x4000  # Linux; Python 3.11 has no name for it


class AddressSpace(Protocol):
    """The address range of an `Arena`.

    Attributes:
        device: the CPU, or a GPU with its index.
        reserved, mapped, page: bytes.
    """

    device: torch.device
    reserved: int
    page: int

    @property
    def mapped(self) -> int: ...

    def grow(self, size: int) -> None:
        """Map memory up to `size` bytes, a multiple of `page`. After a DeviceError nothing has changed."""

    def shrink(self, size: int) -> None:
        """Unmap memory beyond `size` bytes, as far as whole pieces allow."""

    def export(self) -> list[int]:
        """A file descriptor per mapped piece."""

    def tensor(self, offset: int, size: int) -> Tensor:
        """The bytes from `offset` on, uint8 `[size]`. The tensor keeps the memory alive."""


class VirtualMemoryDriver(Protocol):
    """The interface of `warpbus.cuda.vmm_driver.VirtualMemory` that `DeviceSpace` uses."""

    granularity: int

    def reserve(self, size: int) -> int: ...
    def free(self, address: int, size: int) -> None: ...
    def create(self, size: int) -> int: ...
    def release(self, handle: int) -> None: ...
    def map(self, address: int, size: int, handle: int) -> None: ...
    def allow(self, address: int, size: int) -> None: ...
    def unmap(self, address: int, size: int) -> None: ...
    def export(self, handle: int) -> int: ...
    def left(self) -> int: ...
    def trim(self) -> None: ...
    def synchronize(self) -> None: ...


class DeviceSpace:
    """An address range of a GPU. Addresses and memory are freed when the last reference to this object is gone."""

    def __init__(self, reserve: int, device: torch.device, driver: VirtualMemoryDriver) -> None:
        self.page = driver.granularity
        self.reserved = rounded_up(reserve, self.page)
        self.address = driver.reserve(self.reserved)
        self.pieces: list[tuple[int, int]] = []
        self.device = device
        self._driver = driver
        end = weakref.finalize(self, _give_back, driver, self.address, self.reserved, self.pieces)
        end.atexit = False  # the driver frees everything when the process ends

    @property
    def mapped(self) -> int:
        return sum(size for size, _ in self.pieces)

    def grow(self, size: int) -> None:
        start = self.mapped
        try:
            self._map(start, size)
        except DeviceError:
            # Memory that torch's allocator caches is available only after torch has freed it.
            self._driver.trim()
            try:
                self._map(start, size)
            except DeviceError as error:
                raise DeviceError(
                    f"{self.device}: {size - start:,} bytes more were asked for, {self._driver.left():,} are free, "
                    f"{start:,} are mapped here and stay so ({error}): free memory on this GPU, or ask for less"
                ) from error

    def shrink(self, size: int) -> None:
        mapped = self.mapped
        if self.pieces and mapped - self.pieces[-1][0] >= size:
            self._driver.synchronize()  # a kernel may still read the memory that is unmapped
        while self.pieces and mapped - self.pieces[-1][0] >= size:
            mapped -= self.pieces[-1][0]
            _drop_last(self._driver, self.address + mapped, self.pieces)

    def export(self) -> list[int]:
        descriptors: list[int] = []
        try:
            for _, handle in self.pieces:
                descriptors.append(self._driver.export(handle))
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return descriptors

    def tensor(self, offset: int, size: int) -> Tensor:
        return bytes_at(self.address + offset, size, self.device, self)

    def _map(self, start: int, end: int) -> None:
        before, place = len(self.pieces), start
        try:
            while place < end:
                piece = min(PIECE, end - place)
                handle = self._driver.create(piece)
                try:
                    self._driver.map(self.address + place, piece, handle)
                except BaseException:
                    self._driver.release(handle)
                    raise
                self.pieces.append((piece, handle))
                place += piece
            self._driver.allow(self.address + start, end - start)
        except BaseException:
            while len(self.pieces) > before:
                place -= self.pieces[-1][0]
                _drop_last(self._driver, self.address + place, self.pieces)
            raise


class HostSpace:
    """An address range of this process, whose pages are allocated at their first write."""

    def __init__(self, reserve: int) -> None:
        self.device = torch.device("cpu")
        self.page = mmap.PAGESIZE
        self.reserved = rounded_up(reserve, self.page)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._memory = mmap.mmap(-1, self.reserved, flags)
        except (OSError, OverflowError) as error:
            raise DeviceError(f"cpu: {self.reserved:,} bytes of addresses cannot be reserved ({error})") from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._mapped = 0

    @property
    def mapped(self) -> int:
        return self._mapped

    def grow(self, size: int) -> None:
        left = free_memory(self.device)
        if left is not None and size - self._mapped > left:
            raise DeviceError(
                f"cpu: {size - self._mapped:,} bytes more were asked for, {left:,} are free, {self._mapped:,} are "
                "mapped here and stay so: free memory on this machine, or ask for less"
            )
        self._mapped = size

    def shrink(self, size: int) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED, size, self._mapped - size)
        self._mapped = size

    def export(self) -> list[int]:
        raise DeviceError("cpu: memory of the CPU is not exported: only that of GPUs is")

    def tensor(self, offset: int, size: int) -> Tensor:
        return bytes_at(self.address + offset, size, self.device, self)


class WholeSpace:
    """Memory of a remote device, whose addresses are not known here: all of it is allocated and zeroed at the
    beginning."""

    page = 1

    def __init__(self, reserve: int, device: torch.device) -> None:
        self.device = device
        self.reserved = reserve
        try:
            self._memory = torch.zeros(reserve, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"{device}: {error}: ask for less, or lease more") from error

    @property
    def mapped(self) -> int:
        return len(self._memory)

    def grow(self, size: int) -> None:
        """Raises DeviceError: all memory is allocated already, or it was freed."""
        raise DeviceError(f"{self.device}: memory that was given back does not come again: make another arena")

    def shrink(self, size: int) -> None:
        """Only `size` 0 frees memory: all of it, with the last tensor in it."""
        if not size:
            self._memory = self._memory.new_empty(0)

    def export(self) -> list[int]:
        raise DeviceError(
            f"{self.device}: memory of a remote device is not exported: only that of this machine's GPUs is"
        )

    def tensor(self, offset: int, size: int) -> Tensor:
        return self._memory[offset : offset + size]


def _drop_last(driver: VirtualMemoryDriver, address: int, pieces: list[tuple[int, int]]) -> None:
    """Unmap and release the last piece, which begins at `address`."""
    size, handle = pieces[-1]
    driver.unmap(address, size)
    pieces.pop()
    driver.release(handle)


def _give_back(driver: VirtualMemoryDriver, address: int, reserved: int, pieces: list[tuple[int, int]]) -> None:
    if pieces:
        driver.synchronize()
    place = address + sum(size for size, _ in pieces)
    while pieces:
        place -= pieces[-1][0]
        _drop_last(driver, place, pieces)
    driver.free(address, reserved)


_spaces: "weakref.WeakSet[AddressSpace]" = weakref.WeakSet()


class Arena:
    """A reserved address range whose first `mapped` bytes have physical memory.

    On a GPU, memory is mapped in pieces of at most 64 MiB (`PIECE`); all pieces of one `resize` but the
    last have that size. Growing does not disturb running kernels. Shrinking waits for the GPU and unmaps whole pieces,
    so that less than one piece beyond `size` stays mapped. On the CPU, memory is allocated page by page at the first
    write. On a remote device nothing can be reserved: all memory is allocated at once and stays until `resize(0)`.

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

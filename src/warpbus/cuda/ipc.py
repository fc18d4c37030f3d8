"""Memory of a GPU that another process on the same host reads: as fast as the two GPUs are linked, without the host.

What the driver shares is a whole allocation, of which torch's allocator gives parts to tensors. The process that opens
it need not see the GPU that it is on: the driver maps it, and enables peer access between the GPUs. Memory that is
mapped piece by piece (`warpbus.cuda.vmm`, torch's expandable segments) cannot be shared so. Source: the CUDA driver API
reference, the chapters on memory management and interprocess communication.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.cuda import driver
from warpbus.errors import DeviceError

HANDLE_BYTES = 64

_LAZY_ENABLE_PEER_ACCESS = 1  # CUipcMem_flags


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class IpcLocation:
    """Where a tensor lies for another process: `offset` bytes into an allocation of `size` bytes, known by `handle`."""

    handle: bytes
    size: int
    offset: int


class IpcExport:
    """Memory of this process's GPU, for others to read. It must not be given back to the driver while they do.

    What torch's allocator keeps for later counts as not given back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = driver.library()

    def synchronize(self) -> None:
        """Wait for all that this thread has launched: only then others may read."""
        torch.cuda.current_stream(self._device).synchronize()

    def locations(self, tensors: list[Tensor]) -> list[IpcLocation]:
        """Where contiguous tensors lie. The handles of an allocation are the same as long as it lives.

        Raises:
            DeviceError: the driver cannot share the memory of one of them.
        """
        handles: dict[int, bytes] = {}
        locations = []
        with torch.cuda.device(self._device):
            for tensor in tensors:
                base, size = self._allocation(tensor.data_ptr())
                if base not in handles:
                    handles[base] = self._handle(base)
                locations.append(IpcLocation(handles[base], size, tensor.data_ptr() - base))
        return locations

    def _allocation(self, address: int) -> tuple[int, int]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        status = self._driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        driver.check(status, f"{self._device}: cuMemGetAddressRange")
        return base.value, size.value

    def _handle(self, base: int) -> bytes:
        handle = _Handle()
        status = self._driver.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(base))
        driver.check(status, f"{self._device}: cuIpcGetMemHandle")
        return ctypes.string_at(ctypes.addressof(handle), HANDLE_BYTES)


class IpcMemory:
    """An allocation of this process's GPU that is made to be shared, and that no tensor of torch's is in.

    Args:
        size: bytes.
        device: a GPU with its index.

    Attributes:
        address: of its first byte.
        handle: by which other processes open it, `HANDLE_BYTES` bytes.

    Raises:
        DeviceError: the GPU has not so much memory, or the driver does not share it.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._driver = driver.library()
        address = ctypes.c_uint64()
        with torch.cuda.device(device):
            torch.cuda.set_device(device)  # a thread that has not used CUDA yet has no current context
            status = self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
            driver.check(status, f"{device}: cuMemAlloc")
            self.address = address.value
            handle = _Handle()
            status = self._driver.cuIpcGetMemHandle(ctypes.byref(handle), address)
            if status:
                self.free()
            driver.check(status, f"{device}: cuIpcGetMemHandle")
        self.handle = ctypes.string_at(ctypes.addressof(handle), HANDLE_BYTES)

    def free(self) -> None:
        """Free it. No process may have it open."""
        with torch.cuda.device(self._device):
            torch.cuda.set_device(self._device)
            driver.check(self._driver.cuMemFree_v2(ctypes.c_uint64(self.address)), f"{self._device}: cuMemFree")


class IpcMapping:
    """Memory that other processes of this host share, opened for a GPU of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = driver.library()
        self._bases: dict[bytes, int] = {}

    def copy(self, parts: list[tuple[Tensor, IpcLocation]]) -> None:
        """Fill contiguous tensors with what lies at locations, as many bytes as each has, and wait until that is done.

        Raises:
            DeviceError: memory cannot be opened or copied; or a location reaches beyond its allocation.
        """
        stream = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            for tensor, location in parts:
                if len(location.handle) != HANDLE_BYTES or location.offset + tensor.nbytes > location.size:
                    raise DeviceError(
                        f"{tensor.nbytes:,} bytes from {location.offset:,} on of shared memory of {location.size:,}: "
                        "they have to lie inside"
                    )
                status = self._driver.cuMemcpyAsync(
                    ctypes.c_uint64(tensor.data_ptr()),
                    ctypes.c_uint64(self.opened(location.handle) + location.offset),
                    ctypes.c_size_t(tensor.nbytes),
                    ctypes.c_void_p(stream.cuda_stream),
                )
                driver.check(status, f"{self._device}: cuMemcpyAsync from another process's memory")
        stream.synchronize()

    def holds(self, address: int, size: int) -> bool:
        """Whether an allocation that was opened at an address has so many bytes, as far as the driver tells."""
        base, found = ctypes.c_uint64(), ctypes.c_size_t()
        with torch.cuda.device(self._device):
            status = self._driver.cuMemGetAddressRange_v2(
                ctypes.byref(base), ctypes.byref(found), ctypes.c_uint64(address)
            )
        return status != 0 or base.value + found.value >= address + size

    def close(self) -> None:
        """Unmap all of it."""
        with torch.cuda.device(self._device):
            for base in self._bases.values():
                status = self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(base))
                driver.check(status, f"{self._device}: cuIpcCloseMemHandle")
        self._bases.clear()

    def opened(self, handle: bytes) -> int:
        """The address of an allocation here. Raises DeviceError if it cannot be opened."""
        if handle not in self._bases:
            base = ctypes.c_uint64()
            given = _Handle.from_buffer_copy(handle)
            status = self._driver.cuIpcOpenMemHandle_v2(
                ctypes.byref(base), given, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
            )
            driver.check(status, f"{self._device}: cuIpcOpenMemHandle")
            self._bases[handle] = base.value
        return self._bases[handle]

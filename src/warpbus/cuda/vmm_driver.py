"""The driver's functions for virtual memory management: addresses and physical memory are allocated and freed
separately.

Source: the CUDA driver API reference, "virtual memory management".
"""

import ctypes

import torch

from warpbus.cuda import capture, driver
from warpbus.errors import DeviceError

# CUdevice_attribute
_SUPPORTED = 102
_FILE_DESCRIPTORS = 103

_PINNED = 1  # CUmemAllocationType
_FILE_DESCRIPTOR = 1  # CUmemAllocationHandleType
_DEVICE = 1  # CUmemLocationType
_READ_WRITE = 3  # CUmemAccess_flags


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp; its flags (compression, RDMA) stay zero."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class VirtualMemory:
    """Virtual memory of one GPU. Addresses, handles and sizes are integers; sizes are multiples of `granularity`.

    Raises:
        DeviceError: the GPU has none; and by every method whose call the driver rejects.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        self._index = device.index or 0
        self._driver = driver.library()
        self.synchronize()  # creates torch's context, in which all of this exists
        if not driver.attribute(_SUPPORTED, self._index):
            raise DeviceError(f"{device}: this GPU and its driver have no virtual memory management")
        self._shared = bool(driver.attribute(_FILE_DESCRIPTORS, self._index))
        location = _Location(_DEVICE, self._index)
        self._properties = _Properties(_PINNED, _FILE_DESCRIPTOR if self._shared else 0, location)
        self._access = _Access(location, _READ_WRITE)
        self.granularity = self._granularity()

    def reserve(self, size: int) -> int:
        """Reserve an address range without memory; returns its first address."""
        address = ctypes.c_uint64()
        zero = ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)  # alignment, wish, flags
        self._call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), *zero)
        return address.value

    def free(self, address: int, size: int) -> None:
        """Free an address range to which nothing is mapped."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def create(self, size: int) -> int:
        """Allocate physical memory without an address; returns its handle."""
        handle = ctypes.c_uint64()
        properties = ctypes.byref(self._properties)
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), properties, ctypes.c_uint64(0))
        return handle.value

    def release(self, handle: int) -> None:
        """Release a handle. The memory is freed when it is mapped nowhere."""
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def map(self, address: int, size: int, handle: int) -> None:
        """Map memory to addresses. It can be accessed after `allow`."""
        values = ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_uint64(handle), ctypes.c_uint64(0)
        self._call("cuMemMap", ctypes.c_uint64(address), *values)

    def allow(self, address: int, size: int) -> None:
        """Allow the GPU to read and write a mapped range of one or several pieces."""
        access = ctypes.byref(self._access)
        self._call("cuMemSetAccess", ctypes.c_uint64(address), ctypes.c_size_t(size), access, ctypes.c_size_t(1))

    def unmap(self, address: int, size: int) -> None:
        """Unmap memory: exactly the range of one `map`."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def export(self, handle: int) -> int:
        """A file descriptor, which the caller closes, by which another process can map the same memory."""
        if not self._shared:
            raise DeviceError(f"cuda:{self._index}: the driver does not share memory by file descriptors here")
        descriptor = ctypes.c_int()
        values = ctypes.c_uint64(handle), ctypes.c_int(_FILE_DESCRIPTOR), ctypes.c_uint64(0)
        self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), *values)
        return descriptor.value

    def left(self) -> int:
        """Bytes that the driver has free."""
        return torch.cuda.mem_get_info(self._index)[0]

    def trim(self) -> None:
        """Make torch free the memory that its allocator caches."""
        with torch.cuda.device(self._index):
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for everything that was launched on the GPU."""
        capture.synchronize(self._index)

    def _granularity(self) -> int:
        size = ctypes.c_size_t()
        minimum = ctypes.c_int(0)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties), minimum)
        return size.value

    def _call(self, name: str, *values: object) -> None:
        with torch.cuda.device(self._index):
            torch.cuda.set_device(self._index)  # a thread that has not used CUDA yet has no current context
            driver.check(getattr(self._driver, name)(*values), f"cuda:{self._index}: {name}")

"""Pinned memory of the host, which kernels on a GPU read and write by the addresses that it has on the host."""

import ctypes
import weakref

import torch
from torch import Tensor

from warpbus.cuda import driver
from warpbus.cuda.devices import enter_context, free_memory
from warpbus.errors import DeviceError

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for all contexts of the process


def pinned_bytes(size: int) -> Tensor:
    """Memory of exactly `size` bytes, uint8 on the CPU, not initialized. It is freed with its last tensor.

    `torch.empty(pin_memory=True)` rounds the size up to a power of two, which large tables cannot afford.

    Raises:
        DeviceError: there is not so much free memory, or the driver pins no more.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    left = free_memory(torch.device("cpu"))
    if left is not None and size > left:
        raise DeviceError(
            f"cpu: {size:,} bytes of pinned memory are needed, {left:,} are free: free memory on this machine, or let "
            "more of the model stay on the GPU"
        )
    enter_context()
    address = ctypes.c_void_p()
    status = driver.library().cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(size), _PORTABLE)
    driver.check(status, f"pinning {size:,} bytes of main memory")
    assert address.value
    memory = (ctypes.c_uint8 * size).from_address(address.value)
    weakref.finalize(memory, _free, address.value)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _free(address: int) -> None:
    driver.library().cuMemFreeHost(ctypes.c_void_p(address))

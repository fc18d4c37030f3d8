"""Pinned memory, and `PinnedStaging`: copies between a GPU and ordinary memory that let other threads go on."""

import ctypes
import weakref
from dataclasses import dataclass

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


_BYTES = 2**23  # of a buffer: what a core has just written is read from its cache


@dataclass(frozen=True)
class _HostBuffer:
    """Pinned memory, and when the GPU has done the last copy that it takes part in."""

    memory: Tensor
    done: torch.cuda.Event


class PinnedStaging:
    """Copies tensors by way of two pinned buffers.

    Memory that is not pinned the driver copies by itself, and while it does, no other thread of the process can launch
    anything. On an H100 that did the work of one GPU of four in a quantization, the layer that was read and the one
    that was written each held it up for about 70 ms, of 340. A copy between a pinned buffer and the GPU is launched and
    holds up nobody.

    A GPU's copies are in the order of the stream that is current. For one thread at a time.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [
            _HostBuffer(torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event(blocking=True))
            for _ in range(2)
        ]

    def put(self, target: Tensor, source: Tensor) -> None:
        """`target.copy_(source)`, from the CPU to the GPU; `source` is not needed any more when it returns.

        Args:
            target: on the GPU, of the shape of `source`; any strides, any dtype that torch converts to.
            source: on the CPU, any strides.
        """
        row = source[:1].nbytes if source.ndim else _BYTES + 1
        if row > _BYTES or source.numel() == 0:
            target.copy_(source)
            return
        height = _BYTES // row
        for part, onto in zip(source.split(height), target.split(height), strict=True):
            buffer = self._next()
            pinned = buffer.memory[: part.nbytes].view(part.dtype).view(part.shape)
            pinned.copy_(part)
            onto.copy_(pinned, non_blocking=True)
            buffer.done.record(torch.cuda.current_stream(self._device))

    def get(self, source: Tensor) -> Tensor:
        """A contiguous copy on the CPU of a tensor on the GPU, which is there when this returns."""
        found = torch.empty(source.shape, dtype=source.dtype)
        given, taken = (tensor.reshape(-1).view(torch.uint8) for tensor in (source, found))
        before: tuple[_HostBuffer, Tensor] | None = None
        for part, onto in zip(given.split(_BYTES), taken.split(_BYTES), strict=True):
            buffer = self._next()
            buffer.memory[: len(part)].copy_(part, non_blocking=True)
            buffer.done.record(torch.cuda.current_stream(self._device))
            if before is not None:
                _take(*before)
            before = buffer, onto
        if before is not None:
            _take(*before)
        return found

    def _next(self) -> _HostBuffer:
        """The buffer that was used longer ago, free again."""
        self._buffers.reverse()
        self._buffers[0].done.synchronize()
        return self._buffers[0]


def _take(buffer: _HostBuffer, onto: Tensor) -> None:
    buffer.done.synchronize()
    onto.copy_(buffer.memory[: len(onto)])

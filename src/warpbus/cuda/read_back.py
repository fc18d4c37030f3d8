"""Copies from a GPU's memory to pinned memory, for reads of a few bytes.

A copy is three calls of the driver: PyTorch's `copy_` from a slice takes longer in Python and in its dispatcher than
the GPU for the bytes. Source: the CUDA driver API reference, the chapters on memory, event and stream management.
"""

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpbus.cuda import driver

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_DISABLE_TIMING = 2  # CUevent_flags


class _Calls(NamedTuple):
    """Functions of the driver that take numbers as they are. They release the interpreter's lock."""

    copy: Any  # target, source, bytes, stream
    record: Any  # event, stream
    query: Any  # event


@functools.cache
def _calls() -> _Calls:
    def function(name: str, *kinds: Any) -> Any:
        return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)((name, driver.library()))

    pointer = ctypes.c_void_p
    return _Calls(
        function("cuMemcpyDtoHAsync_v2", pointer, ctypes.c_uint64, ctypes.c_size_t, pointer),
        function("cuEventRecord", pointer, pointer),
        function("cuEventQuery", pointer),
    )


class ReadBack:
    """Copies from one GPU, each in the current stream of the thread that asks for it.

    Args:
        device: the GPU with its index, which is the thread's current one.

    Raises:
        RuntimeError: PyTorch's error, by all methods, if something that was launched before has failed.
        DeviceError: the driver refuses a call for another reason.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index

    def buffer(self, nbytes: int) -> Tensor:
        """Pinned memory, uint8 `[nbytes]`."""
        with torch.cuda.device(self._device):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> int:
        """A new event, for `copy`."""
        handle = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            self._check(driver.library().cuEventCreate(ctypes.byref(handle), ctypes.c_uint(_DISABLE_TIMING)))
        assert handle.value
        return handle.value

    def copy(self, target: int, source: int, nbytes: int, mark: int) -> None:
        """Copy from an address of the GPU to one of pinned memory once the stream gets there; `mark` follows it."""
        calls, stream = _calls(), torch._C._cuda_getCurrentRawStream(self._index)
        status = calls.copy(target, source, nbytes, stream) or calls.record(mark, stream)
        if status:
            self._check(status)

    def done(self, mark: int) -> bool:
        """Whether everything before the mark is done."""
        status = _calls().query(mark)
        if status == 0:
            return True
        if status != _NOT_READY:
            self._check(status)
        return False

    def _check(self, status: int) -> None:
        if status:
            torch.cuda.synchronize(self._device)  # raises what has failed before
            driver.check(status, f"{self._device}: reading its memory")

"""A stream of a GPU that also waits for, and writes, numbers in memory that several processes see.

With them, the GPUs of two processes take turns without either process's host. Source: the CUDA driver API reference,
"stream memory operations": such a wait ends when the 32 bits in memory are the value or up to 2**31 - 1 beyond it.
"""

import ctypes
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from warpbus.cuda import driver

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_AFTER_ALL_BEFORE = 0  # CU_STREAM_WRITE_VALUE_DEFAULT


class SignalStream:
    """A stream of its own.

    Args:
        device: a GPU with its index.

    Raises:
        DeviceError: by all methods that take addresses, if the driver refuses the call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = driver.library()
        # Of high priority: such streams do not share a hardware queue with those that operators run in.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._handle = ctypes.c_void_p(self._stream.cuda_stream)

    def current(self) -> AbstractContextManager[object]:
        """A context in which operators are launched in this stream."""
        return torch.cuda.stream(self._stream)

    def follow(self) -> None:
        """Go on only after what has been launched in the current stream until now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> torch.cuda.Event:
        """An event behind everything in this stream."""
        return self._stream.record_event()

    def done(self, mark: torch.cuda.Event) -> bool:
        """Whether everything before a mark is done. Another thread may be capturing a graph meanwhile."""
        with driver.relaxed_capture():
            return mark.query()

    def after(self, mark: torch.cuda.Event) -> None:
        """Go on only after a mark of another stream."""
        self._stream.wait_event(mark)

    def join(self, mark: torch.cuda.Event) -> None:
        """Let the current stream go on only after a mark of this stream."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy between addresses of GPU memory."""
        status = self._driver.cuMemcpyAsync(
            ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), self._handle
        )
        self._check(status, "cuMemcpyAsync")

    def wait(self, word: int, value: int) -> None:
        """Wait until the number at an address is `value` or later, modulo 2**32."""
        status = self._driver.cuStreamWaitValue32_v2(
            self._handle, ctypes.c_uint64(word), ctypes.c_uint32(value), ctypes.c_uint(_AT_LEAST)
        )
        self._check(status, "cuStreamWaitValue32")

    def write(self, word: int, value: int) -> None:
        """Write a number to an address when everything before in this stream is done and visible to other GPUs."""
        status = self._driver.cuStreamWriteValue32_v2(
            self._handle, ctypes.c_uint64(word), ctypes.c_uint32(value), ctypes.c_uint(_AFTER_ALL_BEFORE)
        )
        self._check(status, "cuStreamWriteValue32")

    def _check(self, status: int, call: str) -> None:
        if status:
            driver.check(status, f"{self._device}: {call}")


def address_of(pinned: Tensor, device: torch.device) -> int:
    """The address at which a GPU sees a part of pinned memory of the host.

    Args:
        pinned: uint8; its storage begins where the memory that was pinned does.
        device: a GPU with its index.

    Raises:
        DeviceError: it does not see it.
    """
    found = ctypes.c_uint64()
    with torch.cuda.device(device):
        status = driver.library().cuMemHostGetDevicePointer_v2(
            ctypes.byref(found), ctypes.c_void_p(pinned.untyped_storage().data_ptr()), ctypes.c_uint(0)
        )
        driver.check(status, f"{device}: cuMemHostGetDevicePointer")
    return found.value + int(pinned.storage_offset())

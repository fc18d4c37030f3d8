"""Green contexts: streams whose kernels run on some of a GPU's multiprocessors, for tenants that share a process.

A GPU is divided once into the smallest groups that its architecture allows (8 multiprocessors on Hopper). A context
gets whole groups, which no other context of this process has. Multiprocessors that do not fill a group are not used.
Memory, the L2 cache and copy engines are not divided, and a fault ends the process with all its contexts. A kernel that
launches kernels itself may use 2 multiprocessors more. Source: the CUDA driver API reference, "green contexts".
"""

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch

from warpbus.cuda import driver
from warpbus.cuda.devices import running_on
from warpbus.errors import DeviceError, UsageError

_SM = 1  # CUdevResourceType
_DEFAULT_STREAM = 1  # CUgreenCtxCreate_flags

_of_streams: dict[int, "GreenContext"] = {}  # by the handles of their streams, those that graphs are captured on too


class Resource(ctypes.Structure):
    """CUdevResource with the fields of multiprocessors; the driver owns the rest."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("internal", ctypes.c_ubyte * 92),
        ("count", ctypes.c_uint),
        ("minimum", ctypes.c_uint),
        ("alignment", ctypes.c_uint),
        ("external", ctypes.c_ubyte * 36),
    )


class Groups:
    """The groups of one GPU's multiprocessors, and which of them are free."""

    def __init__(self, total: int, groups: list[Resource]) -> None:
        self.total = total
        self._free = groups
        self._count = len(groups)
        self._size = groups[0].count
        self._lock = threading.Lock()

    def take(self, share: float) -> list[Resource]:
        """The whole groups that come closest to a share of the GPU, at least one.

        Raises:
            UsageError: not a share above 0 and at most 1.
            DeviceError: other contexts have too many.
        """
        if not 0 < share <= 1:
            raise UsageError(f"share is {share}: give a part of the GPU above 0 and at most 1, such as 0.25")
        with self._lock:
            wanted = min(self._count, max(1, round(share * self.total / self._size)))
            if wanted > len(self._free):
                raise DeviceError(
                    f"share {share:g} is {wanted} groups of {self._size} multiprocessors, {len(self._free)} of "
                    f"{self._count} are free: close another green context, or ask for less"
                )
            taken, self._free = self._free[:wanted], self._free[wanted:]
            return taken

    def give_back(self, groups: list[Resource]) -> None:
        """Make groups available again."""
        with self._lock:
            self._free = groups + self._free


_cut: dict[int, Groups] = {}
_cutting = threading.Lock()


class GreenContext:
    """A share of a GPU's multiprocessors.

        with GreenContext(device, 0.25) as green:
            with green.running():
                ...  # torch launches on a stream of this share

    Args:
        share: above 0 and at most 1; rounded to whole groups.

    A CUDA graph that is captured there (`warpbus.cuda.capture`) runs on this share wherever it is replayed.

    Attributes:
        multiprocessors: how many it got; `total`: how many the GPU has.
        stream: its stream, which does not wait for others by itself.

    Raises:
        UsageError: not a share.
        DeviceError: the driver or the GPU has no green contexts, or other contexts have the multiprocessors.
    """

    def __init__(self, device: torch.device, share: float) -> None:
        self.device = torch.device("cuda", device.index or 0)
        self._driver = driver.library()
        torch.cuda.synchronize(self.device)  # creates torch's context, with which this one shares memory
        groups = _groups(self._driver, self.device.index)
        self._context = ctypes.c_void_p()
        self._streams: list[int] = []
        self._groups: list[Resource] = groups.take(share)
        self.total = groups.total
        self.multiprocessors = sum(group.count for group in self._groups)
        try:
            self._create()
            self.stream = torch.cuda.ExternalStream(self.create_stream(), self.device)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def running(self) -> Iterator[torch.cuda.Stream]:
        """Make torch launch on this context's stream in this thread. The stream waits for work launched before the
        block; work launched after the block waits for the stream."""
        with running_on(self.stream):
            yield self.stream

    def create_stream(self) -> int:
        """The handle of a new stream of this context, which does not wait for others by itself and ends with it."""
        stream = ctypes.c_void_p()
        status = self._driver.cuGreenCtxStreamCreate(
            ctypes.byref(stream), self._context, ctypes.c_uint(driver.NON_BLOCKING), ctypes.c_int(0)
        )
        driver.check(status, f"{self.device}: making a stream in a green context")
        assert stream.value
        self._streams.append(stream.value)
        _of_streams[stream.value] = self
        return stream.value

    def close(self) -> None:
        """Wait for the work of this context and release its multiprocessors. It may be called again.

        Memory that torch keeps for the stream goes back to the driver by `torch.cuda.empty_cache()`. Graphs that were
        captured here must not be replayed afterwards.
        """
        while self._streams:
            handle = self._streams.pop()
            _of_streams.pop(handle, None)
            stream = ctypes.c_void_p(handle)
            driver.check(self._driver.cuStreamSynchronize(stream), f"{self.device}: waiting for a green context")
            driver.check(self._driver.cuStreamDestroy_v2(stream), f"{self.device}: ending its stream")
        if self._context:
            driver.check(self._driver.cuGreenCtxDestroy(self._context), f"{self.device}: ending a green context")
            self._context = ctypes.c_void_p()
        if self._groups:
            _cut[self.device.index].give_back(self._groups)
            self._groups = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _create(self) -> None:
        count = len(self._groups)
        description = ctypes.c_void_p()
        status = self._driver.cuDevResourceGenerateDesc(
            ctypes.byref(description), (Resource * count)(*self._groups), ctypes.c_uint(count)
        )
        driver.check(status, f"{self.device}: {self.multiprocessors} multiprocessors for a green context")
        status = self._driver.cuGreenCtxCreate(
            ctypes.byref(self._context), description, ctypes.c_int(self.device.index), ctypes.c_uint(_DEFAULT_STREAM)
        )
        driver.check(status, f"{self.device}: making a green context")


def current(device: torch.device) -> GreenContext | None:
    """The green context that this thread's current stream of a GPU belongs to, or `None`."""
    return _of_streams.get(torch.cuda.current_stream(device).cuda_stream) if _of_streams else None


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors for the next kernel: those of the current stream's green context, or of the GPU.

    Kernels whose blocks wait for each other must not have more blocks than fit there.
    """
    context = current(device)
    return _multiprocessors(device) if context is None else context.multiprocessors


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _groups(library: ctypes.CDLL, device: int) -> Groups:
    """The GPU's groups, created at the first call."""
    with _cutting:
        if device not in _cut:
            if not hasattr(library, "cuDevSmResourceSplitByCount"):
                raise DeviceError("this NVIDIA driver has no green contexts: install version 550 or later")
            whole = Resource()
            status = library.cuDeviceGetDevResource(ctypes.c_int(device), ctypes.byref(whole), ctypes.c_int(_SM))
            driver.check(status, f"cuda:{device}: reading its multiprocessors")
            _cut[device] = Groups(whole.count, _split(library, device, whole))
        return _cut[device]


def _split(library: ctypes.CDLL, device: int, whole: Resource) -> list[Resource]:
    smallest = max(1, whole.minimum)
    count = ctypes.c_uint(whole.count // smallest)
    groups = (Resource * count.value)()
    status = library.cuDevSmResourceSplitByCount(
        groups, ctypes.byref(count), ctypes.byref(whole), None, ctypes.c_uint(0), ctypes.c_uint(smallest)
    )
    driver.check(status, f"cuda:{device}: cutting {whole.count} multiprocessors into groups of {smallest}")
    return list(groups[: count.value])

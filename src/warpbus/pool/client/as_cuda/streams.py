"""Streams and events of the leased device. It executes everything in the order in which it was called, so a stream has
nothing to wait for; what a program can observe is when work has ended."""

import time
from typing import Any

import torch

from warpbus.errors import UsageError
from warpbus.pool.client.as_cuda.lease import CUDA, session
from warpbus.pool.client.as_cuda.translation import check_index


def synchronize(device: Any = None) -> None:
    """Wait until the device has executed everything. Raises the error of a call that failed."""
    check_index(device)
    session().ask(["sync"])


class RemoteEvent:
    """Replaces `torch.cuda.Event`.

    One with `enable_timing` waits for the device when it is recorded: the time between two of them is that of the work
    between them, and of a round trip.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        if interprocess or external:
            raise UsageError("torch.cuda.Event: events of a leased GPU stay in their process: leave interprocess out")
        self._timing = enable_timing
        self._seconds: float | None = None
        self.device = CUDA

    def record(self, stream: Any = None) -> None:
        if self._timing:
            synchronize()
            self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Does nothing: later calls are executed later in any case."""

    def query(self) -> bool:
        synchronize()
        return True

    def synchronize(self) -> None:
        synchronize()

    def elapsed_time(self, end_event: "RemoteEvent") -> float:
        """Milliseconds between two recorded events."""
        if self._seconds is None or end_event._seconds is None:
            raise ValueError("elapsed_time: both events need enable_timing=True and have to be recorded before")
        return 1000 * (end_event._seconds - self._seconds)


class RemoteStream:
    """Replaces `torch.cuda.Stream`. All streams are one and the same order."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        check_index(device)
        self.priority = priority
        self.device, self.device_index, self.device_type = CUDA, 0, 1
        self.stream_id = self.cuda_stream = 0

    def wait_event(self, event: Any) -> None:
        """Does nothing: later calls are executed later in any case."""

    def wait_stream(self, stream: Any) -> None:
        """Does nothing: later calls are executed later in any case."""

    def record_event(self, event: RemoteEvent | None = None) -> RemoteEvent:
        event = RemoteEvent() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        synchronize()
        return True

    def synchronize(self) -> None:
        synchronize()

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> "RemoteStream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteStream)

    def __hash__(self) -> int:
        return 0


_STREAM = RemoteStream()


def current_stream(device: Any = None) -> RemoteStream:
    """The stream of all work."""
    check_index(device)
    return _STREAM


def set_stream(stream: Any) -> None:
    """There is one stream, which always is the current one."""


class StreamContext:
    """Replaces `torch.cuda.StreamContext` and `torch.cuda.stream`: a context in which a stream is the current one.
    There is one, which always is."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class DeviceContext:
    """Replaces `torch.cuda.device` and `device_of`: there is one device, which always is the current one."""

    def __init__(self, device: Any) -> None:
        if isinstance(device, torch.Tensor):
            device = None
        check_index(device)
        self.idx, self.prev_idx = 0, 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

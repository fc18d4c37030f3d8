"""Messages from the worker processes of a job to the process that started them, and how the job ended."""

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from warpbus.errors import DeviceError, WarpbusError

Receive = Callable[[Any], None]
"""Called in the parent process with each message of a job."""

Send = Callable[[object], None]
"""Sends a message to `Receive` in the parent process."""

Job = Callable[..., None]
"""`job(group, send, *arguments)`, a function of a module that the worker processes can import."""


class JobPipe(Protocol):
    """A `Send` that also receives messages while the job runs (sent by `Processes.tell`)."""

    def __call__(self, content: object, /) -> None:
        """Send a message to `Receive` in the parent process."""
        ...

    def heard(self, timeout: float | None) -> list[Any]:
        """All messages received since the last call. Waits up to `timeout` seconds for the first; None: forever."""
        ...

    def step(self) -> AbstractContextManager[None]:
        """A block that should be short: heartbeats report how long it has made no progress."""
        ...


@dataclass(frozen=True)
class Message:
    """A message that the job passed to `send`."""

    content: object


@dataclass(frozen=True)
class Done:
    """The job has returned."""


@dataclass(frozen=True)
class JobFailure:
    """The job has raised an exception.

    Attributes:
        kind: the class of a `WarpbusError`; None for any other exception.
        message: the message of a `WarpbusError`; class and first line of the message of any other exception.
        trace: the traceback of any other exception.
    """

    kind: type[WarpbusError] | None
    message: str
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "JobFailure":
        """The failure for the exception that is being handled."""
        if isinstance(error, WarpbusError):
            return cls(type(error), str(error))
        first = next(iter(str(error).splitlines()), "")
        return cls(None, f"{type(error).__name__}: {first}".removesuffix(": "), traceback.format_exc())

    def error(self, process: str) -> WarpbusError:
        """The exception to raise in the parent process; `process` is the name of the worker that failed."""
        if self.kind is not None:
            return self.kind(self.message)
        error = DeviceError(f"{process} stopped at {self.message}: run it again, and report it if it happens again")
        error.add_note(self.trace)
        return error

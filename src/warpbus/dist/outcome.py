"""What the processes of a job tell the one that started them: messages, and how the job ended."""

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from warpbus.errors import DeviceError, WarpbusError

Receive = Callable[[Any], None]
"""Called with each message of a job."""

Send = Callable[[object], None]
"""Hands a message to `Receive` of the process that started the job."""

Job = Callable[..., None]
"""`job(group, send, *arguments)`, a function of a module that the other processes can import."""


class JobPipe(Protocol):
    """A `Send` that is also told things while the job runs (`Processes.tell`)."""

    def __call__(self, content: object, /) -> None:
        """Hand a message to `Receive` of the process that started the job."""
        ...

    def heard(self, timeout: float | None) -> list[Any]:
        """All that has been told since the last call; waits up to `timeout` seconds for something, for None forever."""
        ...

    def step(self) -> AbstractContextManager[None]:
        """A block that should not take long: heartbeats tell the starting process for how long it makes no progress."""
        ...


@dataclass(frozen=True)
class Message:
    """What the job handed to `send`."""

    content: object


@dataclass(frozen=True)
class Done:
    """The job has returned."""


@dataclass(frozen=True)
class JobFailure:
    """The job has raised an exception.

    Attributes:
        kind: its class where it is a `WarpbusError`, which says all by itself.
        message: its message, or the class and the first line of the message of any other exception.
        trace: where any other exception came from.
    """

    kind: type[WarpbusError] | None
    message: str
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "JobFailure":
        """The failure that the exception being handled is."""
        if isinstance(error, WarpbusError):
            return cls(type(error), str(error))
        first = next(iter(str(error).splitlines()), "")
        return cls(None, f"{type(error).__name__}: {first}".removesuffix(": "), traceback.format_exc())

    def error(self, process: str) -> WarpbusError:
        """The exception that the starting process raises; `process` names the one that failed."""
        if self.kind is not None:
            return self.kind(self.message)
        error = DeviceError(f"{process} stopped at {self.message}: run it again, and report it if it happens again")
        error.add_note(self.trace)
        return error

"""The worker's end of the pipe between a worker process and its parent. This module does not import torch."""

import os
import select
import sys
import threading
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from warpbus.dist.outcome import Done, JobFailure, Message
from warpbus.dist.watchdog import Heartbeat, Pulse


class WorkerPipe:
    """The `JobPipe` of a job in this process. Any thread may send; only one may receive.

    Args:
        connection: to the parent process.
        on_cpu: the job computes on the CPU.

    Attributes:
        pulse: sends this process's heartbeats once it is started.
    """

    def __init__(self, connection: Connection, *, on_cpu: bool) -> None:
        self.pulse = Pulse(self.report, on_cpu=on_cpu)
        self._connection = connection
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def __call__(self, content: object, /) -> None:
        self.report(Message(content))

    def step(self) -> AbstractContextManager[None]:
        return self.pulse.step()

    def report(self, what: Message | Done | JobFailure | Heartbeat) -> None:
        """Send a message to the parent process."""
        with self._sending:
            self._connection.send(what)

    def heard(self, timeout: float | None) -> list[Any]:
        messages = []
        wait = None if timeout is None else 1000 * timeout
        while self._poll.poll(wait):
            messages.append(self.received())
            wait = 0
        return messages

    def received(self) -> Any:
        """The next message from the parent process. If the parent has closed the pipe, this process exits."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):  # OSError: closed inside a message
            _leave()


def _leave() -> NoReturn:
    """Exit at once: an orderly shutdown of NCCL waits for the other processes, which may be dead."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

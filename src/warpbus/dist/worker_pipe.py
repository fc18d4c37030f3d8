"""The pipe between a process of a job and the one that started it, as the former sees it. Nothing here loads torch."""

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
        connection: to the starting process.
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
        """Tell the starting process something."""
        with self._sending:
            self._connection.send(what)

    def heard(self, timeout: float | None) -> list[Any]:
        said = []
        wait = None if timeout is None else 1000 * timeout
        while self._poll.poll(wait):
            said.append(self.received())
            wait = 0
        return said

    def received(self) -> Any:
        """The next that the starting process sends; once it has hung up, this process ends here."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):  # OSError: amid a message
            _leave()


def _leave() -> NoReturn:
    """End at once: taking NCCL down the polite way waits for the others, of which one may be dead."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

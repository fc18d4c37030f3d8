"""The main program of a process that `Processes` starts, once its interpreter is there (see `interpreters`)."""

import multiprocessing
import os
import select
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from warpbus.dist.group import join
from warpbus.dist.interpreters import Place, load
from warpbus.dist.outcome import Done, Failure, Job, Message
from warpbus.dist.peers import lost_peer


def main(connection: Connection, module: str) -> NoReturn:
    """Do a job's part, then wait for the end.

    Args:
        connection: to the starting process.
        module: what to load while the processes find each other, before the starting one says more. If it has a
            function `get_ready(device)`, that is called then, too.
    """
    line = PipeLine(connection)
    try:
        _work(connection, line, module)
    except BaseException as error:
        # Of an exchange that nobody came to, CUDA says only that a launch failed.
        line.report(Failure.of(lost_peer() or error))
    else:
        line.report(Done())
    # It stays until it is told to go: the others may still read from its memory and sockets, and what they would say of
    # its end should not hide why it failed.
    while True:
        _received(connection)


class PipeLine:
    """The `Line` of a job in this process. Any thread may speak, one may listen."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def __call__(self, content: object, /) -> None:
        self.report(Message(content))

    def report(self, what: Message | Done | Failure) -> None:
        with self._sending:
            self._connection.send(what)

    def heard(self, timeout: float | None) -> list[Any]:
        said = []
        wait = None if timeout is None else 1000 * timeout
        while self._poll.poll(wait):
            said.append(_received(self._connection))
            wait = 0
        return said


def _work(connection: Connection, line: PipeLine, module: str) -> None:
    place: Place = _received(connection)
    multiprocessing.current_process().authkey = place.key
    # To find each other is mostly to wait: the module is loaded meanwhile, and the job begins.
    group = join(place.meeting, place.rank, place.world, torch.device(place.device))
    get_ready = getattr(load(module), "get_ready", None)
    if get_ready is not None:
        get_ready(group.device)
    function: Job = _received(connection)
    arguments = _received(connection)
    function(group, line, *arguments)


def _received(connection: Connection) -> Any:
    """The next that the starting process sends; once it has hung up, this process ends here."""
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        _leave()


def _leave() -> NoReturn:
    """End at once: taking NCCL down the polite way waits for the others, of which one may be dead."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

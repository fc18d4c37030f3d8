"""The main program of a process that `Processes` starts.

It is started as a plain interpreter and not by `multiprocessing`, which would run the main module of the starting
process once more in each: a user's script would need a guard against that, and the command line would be loaded.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from warpbus.dist.group import join
from warpbus.dist.outcome import Done, Failure, Job, Message

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Place:
    """Where a process belongs. It gets this first, then the job's function, then the arguments when they are there.

    Attributes:
        rank: its number, of `world`.
        world: how many processes the job has.
        device: its own.
        meeting: as in `join`.
        key: the starting process's for sharing memory, which tensors among the arguments are passed in.
    """

    rank: int
    world: int
    device: torch.device
    meeting: str
    key: bytes


def main(descriptor: int, parent: int) -> NoReturn:
    """Do a job's part, then wait for the end.

    Args:
        descriptor: of the pipe to the process `parent`.
        parent: with it this process ends, however it ends.
    """
    os.set_inheritable(descriptor, False)
    _end_with(parent)
    connection = Connection(descriptor)
    sending = threading.Lock()

    def report(what: object) -> None:
        with sending:
            connection.send(what)

    try:
        _work(connection, report)
    except BaseException as error:
        report(Failure.of(error))
    else:
        report(Done())
    # It stays until it is told to go: the others may still read from its memory and sockets, and what they would say of
    # its end should not hide why it failed.
    while True:
        _received(connection)


def _work(connection: Connection, report: Callable[[object], None]) -> None:
    place: Place = _received(connection)
    multiprocessing.current_process().authkey = place.key
    # Two steps that take long: they are done while the starting process still prepares the arguments.
    function: Job = _received(connection)
    group = join(place.meeting, place.rank, place.world, place.device)
    arguments = _received(connection)
    function(group, lambda content: report(Message(content)), *arguments)


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


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, also by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)

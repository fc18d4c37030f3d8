"""Starting the processes of a job on this machine."""

import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import torch

from warpbus.dist.group import Group
from warpbus.dist.interpreters import process_pool
from warpbus.dist.outcome import Done, JobFailure, Job, Message, Receive
from warpbus.dist.watchdog import SECONDS_BETWEEN_HEARTBEATS, Heartbeat, Patience, ProcessDiedError, Watchdog
from warpbus.errors import UsageError, WarpbusError

# A process that lost another one may be heard of before the lost one, whose end says more.
_SECONDS_FOR_THE_CAUSE = 1.0
_SECONDS_TO_LEAVE = 10.0
_SECONDS_TO_TERMINATE = 2.0


def launch(function: Job, arguments: Sequence[object], *, devices: Sequence[torch.device], receive: Receive) -> None:
    """Run `function(group, send, *arguments)` in one process a device, and return when all have returned.

    See `Processes`.
    """
    with Processes(function, devices=devices, receive=receive) as processes:
        processes.run(*arguments)


@dataclass
class _Member:
    """One process as the starting one sees it."""

    rank: int
    name: str
    process: subprocess.Popen[bytes]
    connection: Connection


class Processes:
    """One process a device, which start at once and then run one job.

        with Processes(function, devices=devices, receive=receive) as processes:
            ...  # meanwhile they load torch and the function's module, open their devices, and find each other
            processes.run(*arguments)

    With one device there is no other process: `run` calls the function, unless it is to be `apart`.

    However the block is left, no process is left behind, and if this process dies, by kill -9 too, so do the others
    (on Linux). A block belongs to one thread, which has to live as long as it. Ctrl-C in a terminal reaches only this
    process, which ends the others.

    Args:
        function: a function of a module, called as `function(group, send, *arguments)`. `send(message)` hands a message
            to `receive`; those of one process arrive in their order. Messages and arguments are pickled, but tensors
            among them are shared, and have to fit into shared memory.
        devices: of the processes in rank order; several GPUs, each once, or the CPU several times.
        receive: called here, within `run`, with each message.
        apart: one device has a process of its own, too. What the function gets as `send` is then always a `JobPipe`.
        environment: variables of the processes, where this one has none of that name.
        parting: each leaves as soon as it is done. That is for functions that end after all have got what they need of
            each other; otherwise they stay until the last one is done.
        patience: how long a process that stands still is waited for, see `Patience`.

    Raises:
        UsageError: no device, or devices that cannot work together.
        WarpbusError: from `run`: what one of the processes raised, with its class and message.
        ProcessDiedError: from `run`: a process was killed, or left.
        ProcessStalledError: from `run`: a process stood still for `patience.limit`.
        DeviceError: from `run`: a process stopped at an exception of another kind; or none can be started.
    """

    def __init__(
        self,
        function: Job,
        *,
        devices: Sequence[torch.device],
        receive: Receive,
        apart: bool = False,
        environment: Mapping[str, str] = MappingProxyType({}),
        parting: bool = False,
        patience: Patience | None = None,
    ) -> None:
        _check(devices)
        names = {rank: f"process {rank} on {device}" for rank, device in enumerate(devices)}
        self._watchdog = Watchdog(names, patience or Patience(), self.kill)
        self._parting = parting
        self._environment = environment
        self._apart = apart or len(devices) > 1
        self._function = function
        self._devices = devices
        self._receive = receive
        self._members: list[_Member] = []
        self._directory = Path()
        self._finished = False

    def __enter__(self) -> Self:
        if not self._apart:
            return self
        crew = process_pool([str(device) for device in self._devices], self._function.__module__, self._environment)
        self._directory = crew.directory
        for each in crew.members:
            rank = each.place.rank
            name = f"process {rank} on {each.place.device}"
            self._members.append(_Member(rank, name, each.process, each.connection))
        try:
            for member in self._members:
                _send(member, self._function)
        except BaseException:
            self._end(at_once=True)
            raise
        return self

    def run(self, *arguments: object) -> None:
        """Let all processes do the job, once; returns when all have returned."""
        if not self._apart:
            device = self._devices[0]
            if device.type == "cuda":
                torch.cuda.set_device(device)
            self._function(Group(0, 1, device), self._receive, *arguments)
            return
        with self._watchdog:
            for member in self._members:
                _send(member, arguments)
            self._listen()
        self._finished = True

    def _listen(self) -> None:
        """Hand on messages until all are done."""
        working = {member.connection: member for member in self._members}
        while working:
            heard = wait(list(working), SECONDS_BETWEEN_HEARTBEATS)
            if not heard and self._watchdog.verdict is not None:
                raise self._watchdog.verdict  # it was killed, and has not ended yet
            for ready in heard:
                assert isinstance(ready, Connection)
                member = working[ready]
                outcome = _next(member)
                self._watchdog.heard(member.rank, outcome)
                if isinstance(outcome, Message):
                    with self._watchdog.busy():
                        self._receive(outcome.content)
                elif isinstance(outcome, Done):
                    del working[ready]
                    self._watchdog.done(member.rank)
                    if self._parting:
                        member.connection.close()
                elif not isinstance(outcome, Heartbeat):
                    raise self._cause(member, outcome)

    def tell(self, what: object) -> None:
        """Tell the first process something, where `JobPipe.heard` has it. Another thread than that of `run` may call it.

        Only after the first message has come from there, and from one thread at a time. It waits while the process
        does not listen and its pipe is full.
        """
        _send(self._members[0], what)

    def hurry(self) -> None:
        """Wait only seconds from now on for a process that stands still; the thread of `run`, or another, may call it."""
        self._watchdog.hurry()

    def kill(self) -> None:
        """Let `run` end with `ProcessDiedError` at once; another thread may call it."""
        for member in list(self._members):
            member.process.kill()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(at_once=not self._finished)

    def _cause(self, member: _Member, outcome: JobFailure | None) -> WarpbusError:
        """The exception to raise after the first process that failed, or died where `outcome` is None."""
        if self._watchdog.verdict is not None:
            return self._watchdog.verdict
        if outcome is None:
            return _death(member)
        if outcome.kind is None:
            end = time.monotonic() + _SECONDS_FOR_THE_CAUSE
            others = {
                other.connection: other
                for other in self._members
                if other is not member and not other.connection.closed
            }
            while others and (ready := wait(list(others), max(0.0, end - time.monotonic()))):
                for connection in ready:
                    assert isinstance(connection, Connection)
                    other = others[connection]
                    said = _next(other)
                    if said is None:
                        return _death(other)
                    if isinstance(said, JobFailure) and said.kind is not None:
                        return said.error(other.name)
                    if not isinstance(said, Message | Heartbeat):
                        del others[connection]
        return outcome.error(member.name)

    def _end(self, *, at_once: bool) -> None:
        """End all processes and wait for them; `at_once` is for those that may still be at work."""
        for member in self._members:
            if at_once:
                member.process.terminate()
            else:
                member.connection.close()
        end = time.monotonic() + (_SECONDS_TO_TERMINATE if at_once else _SECONDS_TO_LEAVE)
        for member in self._members:
            try:
                member.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
        end = time.monotonic() + _SECONDS_TO_TERMINATE
        for member in self._members:
            with suppress(subprocess.TimeoutExpired):  # in a call of a driver not even SIGKILL ends it at once
                member.process.wait(max(0.0, end - time.monotonic()))
            member.connection.close()
        self._members = []
        if self._directory != Path():
            shutil.rmtree(self._directory, ignore_errors=True)


def _check(devices: Sequence[torch.device]) -> None:
    if not devices:
        raise UsageError("no device: give at least one")
    names = ", ".join(map(str, devices))
    if len({device.type for device in devices}) > 1:
        raise UsageError(f"devices {names}: GPUs and the CPU cannot share a job: give devices of one kind")
    if devices[0].type == "cuda" and len(set(devices)) < len(devices):
        raise UsageError(f"devices {names}: two processes cannot share one GPU: give each once")


def _send(member: _Member, what: object) -> None:
    with suppress(OSError):  # it has died: what reads its messages finds out
        member.connection.send(what)


def _next(member: _Member) -> Message | Done | JobFailure | Heartbeat | None:
    """What a process says next; None once it has died."""
    try:
        said = member.connection.recv()
    except (EOFError, OSError):  # OSError: it died amid a message
        return None
    assert isinstance(said, Message | Done | JobFailure | Heartbeat)
    return said


def _death(member: _Member) -> ProcessDiedError:
    report = "report it if it happens again"
    try:
        code = member.process.wait(_SECONDS_TO_TERMINATE)
    except subprocess.TimeoutExpired:
        return ProcessDiedError(f"{member.name} has closed its pipe", f"run it again, and {report}")
    if code >= 0:
        return ProcessDiedError(f"{member.name} ended with exit code {code}", "see what it printed, and run it again")
    name = {known.value: known.name for known in signal.Signals}.get(-code, "unknown")
    advice = f"run it again, and {report}"
    if -code == signal.SIGKILL:
        advice = "somebody killed it, or the system for want of memory (see dmesg): run it again"
    return ProcessDiedError(f"{member.name} was killed by signal {-code} ({name})", advice)

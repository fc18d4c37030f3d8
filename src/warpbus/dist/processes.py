"""Starts the worker processes of a job on this machine."""

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
from warpbus.dist.outcome import Done, Job, JobFailure, Message, Receive
from warpbus.dist.watchdog import SECONDS_BETWEEN_HEARTBEATS, Heartbeat, Patience, ProcessDiedError, Watchdog
from warpbus.errors import UsageError, WarpbusError

# The failure of a process that lost a peer may arrive before the peer's own failure, which is the cause.
_SECONDS_FOR_THE_CAUSE = 1.0
_SECONDS_TO_LEAVE = 10.0
_SECONDS_TO_TERMINATE = 2.0


def launch(function: Job, arguments: Sequence[object], *, devices: Sequence[torch.device], receive: Receive) -> None:
    """Run `function(group, send, *arguments)` in one process per device, and return when all have returned.

    See `Processes`.
    """
    with Processes(function, devices=devices, receive=receive) as processes:
        processes.run(*arguments)


@dataclass
class _WorkerProcess:
    """A worker process as the parent sees it."""

    rank: int
    name: str
    process: subprocess.Popen[bytes]
    connection: Connection


class Processes:
    """One worker process per device; they start immediately and run one job.

        with Processes(function, devices=devices, receive=receive) as processes:
            ...  # meanwhile they import torch and the function's module, open their devices, and connect
            processes.run(*arguments)

    With one device no process is started and `run` calls the function, unless `apart` is set.

    All processes have ended when the block is left. If this process dies, even by SIGKILL, so do the workers (on
    Linux). The block must run in one thread, which has to outlive it. Ctrl-C in a terminal reaches only this process,
    which ends the workers.

    Args:
        function: a function of a module, called as `function(group, send, *arguments)`. `send(message)` passes a
            message to `receive`; messages of one process arrive in order. Messages and arguments are pickled; tensors
            among them are passed in shared memory.
        devices: of the processes in rank order; distinct GPUs, or the CPU several times.
        receive: called here, inside `run`, with each message.
        apart: start a process also for a single device; `send` is then always a `JobPipe`.
        environment: environment variables of the workers; variables of this process take precedence.
        exit_early: each worker exits as soon as its function returns. Use it only if no worker needs another one after
            that. Otherwise all stay until the last one has finished.
        patience: how long to wait for a process that makes no progress, see `Patience`.

    Raises:
        UsageError: no device, or devices that cannot work together.
        WarpbusError: from `run`: raised by one of the processes, with its class and message.
        ProcessDiedError: from `run`: a process was killed, or exited.
        ProcessStalledError: from `run`: a process made no progress for `patience.limit` seconds.
        DeviceError: from `run`: a process raised another exception, or none can be started.
    """

    def __init__(
        self,
        function: Job,
        *,
        devices: Sequence[torch.device],
        receive: Receive,
        apart: bool = False,
        environment: Mapping[str, str] = MappingProxyType({}),
        exit_early: bool = False,
        patience: Patience | None = None,
    ) -> None:
        _check(devices)
        names = {rank: f"process {rank} on {device}" for rank, device in enumerate(devices)}
        self._watchdog = Watchdog(names, patience or Patience(), self.kill)
        self._exit_early = exit_early
        self._environment = environment
        self._apart = apart or len(devices) > 1
        self._function = function
        self._devices = devices
        self._receive = receive
        self._members: list[_WorkerProcess] = []
        self._directory = Path()
        self._finished = False

    def __enter__(self) -> Self:
        if not self._apart:
            return self
        pool = process_pool([str(device) for device in self._devices], self._function.__module__, self._environment)
        self._directory = pool.directory
        for each in pool.members:
            rank = each.spec.rank
            name = f"process {rank} on {each.spec.device}"
            self._members.append(_WorkerProcess(rank, name, each.process, each.connection))
        try:
            for member in self._members:
                _send(member, self._function)
        except BaseException:
            self._end(at_once=True)
            raise
        return self

    def run(self, *arguments: object) -> None:
        """Run the job in all processes, once; returns when all have returned."""
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
        """Pass messages to `receive` until all processes have finished."""
        working = {member.connection: member for member in self._members}
        while working:
            heard = wait(list(working), SECONDS_BETWEEN_HEARTBEATS)
            if not heard and self._watchdog.verdict is not None:
                raise self._watchdog.verdict  # the process was killed, but has not ended yet
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
                    if self._exit_early:
                        member.connection.close()
                elif not isinstance(outcome, Heartbeat):
                    raise self._cause(member, outcome)

    def tell(self, what: object) -> None:
        """Send a message to the first process, which gets it from `JobPipe.heard`.

        May be called from any one thread at a time, after the first message from that process has arrived. Blocks while
        the pipe is full.
        """
        _send(self._members[0], what)

    def hurry(self) -> None:
        """From now on wait only seconds for a process that makes no progress; any thread may call this."""
        self._watchdog.hurry()

    def kill(self) -> None:
        """Kill the processes, so that `run` raises `ProcessDiedError`; any thread may call this."""
        for member in list(self._members):
            member.process.kill()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(at_once=not self._finished)

    def _cause(self, member: _WorkerProcess, outcome: JobFailure | None) -> WarpbusError:
        """The exception to raise after a process failed, or died if `outcome` is None."""
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
                    found = _next(other)
                    if found is None:
                        return _death(other)
                    if isinstance(found, JobFailure) and found.kind is not None:
                        return found.error(other.name)
                    if not isinstance(found, Message | Heartbeat):
                        del others[connection]
        return outcome.error(member.name)

    def _end(self, *, at_once: bool) -> None:
        """End all processes and wait for them; `at_once` terminates processes that may still be working."""
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
            with suppress(subprocess.TimeoutExpired):  # inside a driver call, even SIGKILL takes effect late
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
        raise UsageError(f"devices {names}: a job cannot use GPUs and the CPU together: give devices of one kind")
    if devices[0].type == "cuda" and len(set(devices)) < len(devices):
        raise UsageError(f"devices {names}: two processes cannot share one GPU: give each once")


def _send(member: _WorkerProcess, what: object) -> None:
    with suppress(OSError):  # it has died: reading its messages will report that
        member.connection.send(what)


def _next(member: _WorkerProcess) -> Message | Done | JobFailure | Heartbeat | None:
    """The next message of a process; None once it has died."""
    try:
        message = member.connection.recv()
    except (EOFError, OSError):  # OSError: it died inside a message
        return None
    assert isinstance(message, Message | Done | JobFailure | Heartbeat)
    return message


def _death(member: _WorkerProcess) -> ProcessDiedError:
    report = "report it if it happens again"
    try:
        code = member.process.wait(_SECONDS_TO_TERMINATE)
    except subprocess.TimeoutExpired:
        return ProcessDiedError(f"{member.name} has closed its pipe", f"run it again, and {report}")
    if code >= 0:
        return ProcessDiedError(f"{member.name} ended with exit code {code}", "see its output, and run it again")
    name = {known.value: known.name for known in signal.Signals}.get(-code, "unknown")
    advice = f"run it again, and {report}"
    if -code == signal.SIGKILL:
        advice = "it was killed by a user, or by the system because memory ran out (see dmesg): run it again"
    return ProcessDiedError(f"{member.name} was killed by signal {-code} ({name})", advice)

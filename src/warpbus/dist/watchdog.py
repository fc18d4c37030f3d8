"""Detects stalled processes of a job: alive, but stopped by a signal or hanging in a call.

Each worker sends heartbeats from a separate thread (`Pulse`); the parent process checks them (`Watchdog`).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from warpbus.errors import DeviceError, UsageError

SECONDS_BETWEEN_HEARTBEATS = 1.0
SHORTEST_LIMIT = 10
"""Seconds: a shorter limit would end processes that only wait for a CPU core."""

# A CPU process makes progress in a step if it uses at least this share of a core.
_LEAST_SHARE = 0.05

_log = logging.getLogger("warpbus.dist")


class ProcessDiedError(DeviceError):
    """A process ended before its job was done. `what` is the message without the advice."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}: {advice}")
        self.what = what


class ProcessStalledError(ProcessDiedError):
    """A process made no progress for too long, and was killed."""


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of a process.

    Attributes:
        in_step: seconds for which the current step has made no progress (see `Pulse`); 0 outside of steps.
    """

    in_step: float


class Pulse:
    """Sends heartbeats from a thread, with the time that the job's current step has made no progress.

    On a GPU progress inside a step cannot be seen, so that its whole duration counts. On the CPU a step may
    legitimately take minutes; only time in which the process uses hardly any CPU counts.

    Args:
        send: called with each heartbeat; heartbeats stop when it raises OSError.
        on_cpu: the job computes on the CPU.
    """

    def __init__(self, send: Callable[[Heartbeat], None], *, on_cpu: bool) -> None:
        self._send = send
        self._on_cpu = on_cpu
        self._ending = threading.Event()
        self._step: float | None = None  # when it began

    def start(self) -> None:
        """Start sending heartbeats."""
        threading.Thread(target=self._run, name="warpbus-heartbeats", daemon=True).start()

    def stop(self) -> None:
        """Stop sending heartbeats."""
        self._ending.set()

    @contextmanager
    def step(self) -> Iterator[None]:
        """The job is in a step while this block runs."""
        self._step = time.monotonic()
        try:
            yield
        finally:
            self._step = None

    def _run(self) -> None:
        computed, progress = time.process_time(), 0.0
        while True:
            now, before, computed = time.monotonic(), computed, time.process_time()
            if self._on_cpu and computed - before >= _LEAST_SHARE * SECONDS_BETWEEN_HEARTBEATS:
                progress = now
            step = self._step
            try:
                self._send(Heartbeat(0.0 if step is None else now - max(step, progress)))
            except OSError:  # the parent process has exited, and this one will
                return
            if self._ending.wait(SECONDS_BETWEEN_HEARTBEATS):
                return


@dataclass(frozen=True)
class Patience:
    """How long a job waits for a stalled process: one that sends no heartbeat, or makes no progress in a step.

    Attributes:
        limit: seconds after which the job ends with `ProcessStalledError`.
        report: seconds after which the process is named in the log, unless `limit` is shorter.
        on_stall: called with a description of the stalled processes, and with "" when all make progress again; runs in
            the watchdog's thread.
    """

    limit: float = 300.0
    report: float = 30.0
    on_stall: Callable[[str], None] = lambda description: None


def check_limit(name: str, seconds: float) -> None:
    """Check an option `name` that becomes `Patience.limit`; raises UsageError if it is too short."""
    if not seconds >= SHORTEST_LIMIT:
        raise UsageError(f"{name} is {seconds:g} s: give {SHORTEST_LIMIT:g} or more, or inf for no limit")


@dataclass
class _Watched:
    """State of a process: seconds since its last message, and seconds of its step without progress."""

    silent: float = 0.0
    in_step: float = 0.0


class Watchdog:
    """Watches the processes of a job, in a thread, while a `with` block runs.

    Time counts only while the parent process receives messages, and at most two heartbeat intervals at once: neither a
    receiver that blocks nor a suspended machine makes a process look stalled.

    Args:
        names: of the processes, by rank.
        patience: the limits.
        kill: called to kill a stalled job; the receiving thread then raises `verdict`.

    Attributes:
        verdict: the error for a stalled process; None until then.
    """

    def __init__(self, names: Mapping[int, str], patience: Patience, kill: Callable[[], None]) -> None:
        self.verdict: ProcessStalledError | None = None
        self._names = names
        self._patience = patience
        self._limit = patience.limit
        self._kill = kill
        self._watched = {rank: _Watched() for rank in names}
        self._listening = True
        self._reported = ""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="warpbus-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()

    def heard(self, rank: int, message: object) -> None:
        """A message of a process has arrived."""
        watched = self._watched.get(rank)
        if watched is not None:
            watched.silent = 0.0
            if isinstance(message, Heartbeat):
                watched.in_step = message.in_step

    def done(self, rank: int) -> None:
        """A process has finished and is no longer watched."""
        self._watched.pop(rank, None)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The parent process does not receive messages while this block runs."""
        self._listening = False
        try:
            yield
        finally:
            self._listening = True

    def hurry(self) -> None:
        """From now on wait only `SHORTEST_LIMIT` seconds for a stalled process, or `limit` if that is shorter."""
        self._limit = min(self._limit, SHORTEST_LIMIT)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._ending.wait(SECONDS_BETWEEN_HEARTBEATS):
            now = time.monotonic()
            passed, before = min(now - before, 2 * SECONDS_BETWEEN_HEARTBEATS), now
            if not self._listening:
                continue
            for watched in list(self._watched.values()):
                watched.silent += passed
            self._judge()
            if self.verdict is not None:
                self._kill()
                return

    def _judge(self) -> None:
        limit = self._limit
        stalled, seconds = self._stalled(min(limit, self._patience.report))
        if seconds >= limit:
            self.verdict = ProcessStalledError(
                f"{stalled}, and was killed", "check if it was stopped (SIGSTOP) or its GPU hangs, and run it again"
            )
        if bool(stalled) != bool(self._reported):
            action = f"{stalled}: it is killed after {limit:g} s" if stalled else "all processes make progress again"
            _log.warning("%s", action)
            self._patience.on_stall(stalled)
            self._reported = stalled

    def _stalled(self, least: float) -> tuple[str, float]:
        """A description of the processes stalled for at least `least` seconds, and the longest time of them."""
        watched = sorted(self._watched.items())
        # Processes in a step may wait for one that is silent: report the silent ones first.
        for find, state in ((_silent, "sent no heartbeat"), (_in_step, "been in one step without progress")):
            found = {rank: seconds for rank, each in watched if (seconds := find(each)) >= least}
            if found:
                longest = max(found.values())
                names = " and ".join(self._names[rank] for rank in found)
                return f"{names} {'has' if len(found) == 1 else 'have'} {state} for {longest:.0f} s", longest
        return "", 0.0


def _silent(watched: _Watched) -> float:
    return watched.silent


def _in_step(watched: _Watched) -> float:
    return watched.in_step

"""Finds processes of a job that no longer go on, though they live: stopped by a signal, or hanging in a call.

Each process sends heartbeats from a thread of its own (`Pulse`); the starting process checks them (`Watchdog`).
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
SHORTEST_LIMIT = 10.0
"""Seconds: with a shorter limit, processes would be ended that are only slow to get a core."""

# A process on the CPU makes progress in a step while it uses at least this share of a core.
_LEAST_SHARE = 0.05

_log = logging.getLogger("warpbus.dist")


class ProcessDiedError(DeviceError):
    """A process of a job has ended before the job. `what` is the message without its advice."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}: {advice}")
        self.what = what


class ProcessStalledError(ProcessDiedError):
    """A process of a job stood still for too long, and was ended."""


@dataclass(frozen=True)
class Heartbeat:
    """A process lives.

    Attributes:
        in_step: for how many seconds its step has made no progress (see `Pulse`); 0 outside of steps.
    """

    in_step: float


class Pulse:
    """Sends heartbeats from a thread, and knows how long the job's step takes.

    On a GPU no progress is seen within a step, so that its whole duration counts. On the CPU a step may honestly take
    minutes; there only time counts in which the process hardly uses a core.

    Args:
        send: called with each heartbeat; they end where it raises OSError.
        on_cpu: the job computes on the CPU.
    """

    def __init__(self, send: Callable[[Heartbeat], None], *, on_cpu: bool) -> None:
        self._send = send
        self._on_cpu = on_cpu
        self._ending = threading.Event()
        self._step: float | None = None  # when it began

    def start(self) -> None:
        """Send heartbeats from now on."""
        threading.Thread(target=self._run, name="warpbus-heartbeats", daemon=True).start()

    def stop(self) -> None:
        """Send no more of them."""
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
            except OSError:  # the starting process has gone, and this one ends
                return
            if self._ending.wait(SECONDS_BETWEEN_HEARTBEATS):
                return


@dataclass(frozen=True)
class Patience:
    """How long a job waits for a process that does not go on: that sends no heartbeat, or stays in one step.

    Attributes:
        limit: after so many seconds the job ends with `ProcessStalledError`.
        report: after so many seconds, unless `limit` is shorter, a line in the log names the process.
        told: called with the same in words, and with "" when all go on again; in a thread of its own.
    """

    limit: float = 300.0
    report: float = 30.0
    told: Callable[[str], None] = lambda what: None


def check_limit(name: str, seconds: float) -> None:
    """Raises UsageError where an option `name`, which becomes `Patience.limit`, is too short."""
    if not seconds >= SHORTEST_LIMIT:
        raise UsageError(f"{name} is {seconds:g} s: give {SHORTEST_LIMIT:g} or more, or inf for no limit")


@dataclass
class _Watched:
    """What is known of a process: seconds since it was heard of, and those of its step without progress."""

    silent: float = 0.0
    in_step: float = 0.0


class Watchdog:
    """Watches the processes of a job, in a thread, while a `with` block runs.

    Time counts only while the starting process listens, and in pieces of at most two heartbeats: neither a receiver
    that blocks nor a machine that was suspended as a whole makes a process seem stopped.

    Args:
        names: of the processes, by rank.
        patience: how long they are waited for.
        kill: called when a process is given up; what listens then finds the processes dead, and raises `verdict`.

    Attributes:
        verdict: why a process was given up; None until then.
    """

    def __init__(self, names: Mapping[int, str], patience: Patience, kill: Callable[[], None]) -> None:
        self.verdict: ProcessStalledError | None = None
        self._names = names
        self._patience = patience
        self._limit = patience.limit
        self._kill = kill
        self._watched = {rank: _Watched() for rank in names}
        self._listening = True
        self._told = ""
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

    def heard(self, rank: int, said: object) -> None:
        """Something has come from a process."""
        watched = self._watched.get(rank)
        if watched is not None:
            watched.silent = 0.0
            if isinstance(said, Heartbeat):
                watched.in_step = said.in_step

    def done(self, rank: int) -> None:
        """A process has nothing more to do: it is watched no longer."""
        self._watched.pop(rank, None)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The starting process does not listen while this block runs."""
        self._listening = False
        try:
            yield
        finally:
            self._listening = True

    def hurry(self) -> None:
        """From now on wait only `SHORTEST_LIMIT` seconds for a process that stands still; at most `limit`."""
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
        what, seconds = self._standing_still(min(limit, self._patience.report))
        if seconds >= limit:
            self.verdict = ProcessStalledError(
                f"{what}, and was ended", "see whether something stopped it (SIGSTOP) or its GPU hangs, and run it again"
            )
        if bool(what) != bool(self._told):
            _log.warning("%s", f"{what}: it is given up after {limit:g} s" if what else "all processes go on again")
            self._patience.told(what)
            self._told = what

    def _standing_still(self, least: float) -> tuple[str, float]:
        """The processes that have stood still for so long, in words, and the seconds of the longest of them."""
        watched = sorted(self._watched.items())
        # Where one sends nothing, others may wait for it in a step: it is to blame.
        for find, said in ((_silent, "sent no heartbeat"), (_in_step, "been in one step without progress")):
            found = {rank: seconds for rank, each in watched if (seconds := find(each)) >= least}
            if found:
                longest = max(found.values())
                names = " and ".join(self._names[rank] for rank in found)
                return f"{names} {'has' if len(found) == 1 else 'have'} {said} for {longest:.0f} s", longest
        return "", 0.0


def _silent(watched: _Watched) -> float:
    return watched.silent


def _in_step(watched: _Watched) -> float:
    return watched.in_step

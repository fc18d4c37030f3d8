"""Steps of groups that GPUs do by themselves, after the processes have launched them: what is under way, and what ends
it if another lease's process is gone."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from warpbus.errors import WarpbusError

_LOOKED_EVERY = 0.01
_GRACE = 1.0
"""Seconds for which steps may still complete after another process has left: it has launched its part before."""
_MOST = 64
"""Steps under way. A process that only sends would be ahead of the others without end."""


class StepStream(Protocol):
    """The interface of `warpbus.cuda.signal_stream.SignalStream` that steps use beside `device_link.SlotStream`."""

    def current(self) -> AbstractContextManager[object]: ...
    def follow(self) -> None: ...
    def mark(self) -> Any: ...
    def done(self, mark: Any) -> bool: ...
    def after(self, mark: Any) -> None: ...
    def join(self, mark: Any) -> None: ...
    def copy(self, target: int, source: int, nbytes: int) -> None: ...
    def wait(self, word: int, value: int) -> None: ...
    def write(self, word: int, value: int) -> None: ...


@dataclass
class StepTimes:
    """What the steps of a lease's groups have taken in the process's thread.

    Attributes:
        steps: their number.
        nbytes: bytes that were sent.
        seconds: in all, in which the thread launched nothing else.
        waited: of these, for other ranks to come to the step.
        launched: steps that GPUs did by themselves.
    """

    steps: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    launched: int = 0


@dataclass(eq=False)
class PendingStep:
    """A step that is under way.

    Attributes:
        label: what the program called.
        stream: the one of its last part.
        mark: the end of it there.
        clock: `Storages.clock` when it began.
        until: when it must be done, in seconds of `time.monotonic`.
        kept: the tensors that it uses.
    """

    label: str
    stream: StepStream
    mark: Any
    clock: int
    until: float
    kept: Sequence[Tensor] = field(default=(), repr=False)

    @property
    def done(self) -> bool:
        """Whether it is complete."""
        return self.stream.done(self.mark)

    def join(self) -> None:
        """Let the current stream wait for it."""
        self.stream.join(self.mark)


@dataclass(frozen=True)
class StepFailure:
    """A step whose results are invalid.

    Attributes:
        label: what the program called.
        clock: `Storages.clock` when it began: what was written since is invalid, too.
        why: the reason.
    """

    label: str
    clock: int
    why: str


class StepWatch:
    """Watches the steps of a group in a thread of its own: while a GPU waits for one that does not come, the thread
    that launches may wait for that GPU.

    Args:
        release: lets the GPU go on that waits for another one; called repeatedly.
        gone: why another process will not do its part, or None.
        broken: called with the reason, before `release`, when the steps under way cannot be completed.
    """

    def __init__(
        self, release: Callable[[], None], gone: Callable[[], str | None], broken: Callable[[str], None]
    ) -> None:
        self._release, self._gone, self._broken = release, gone, broken
        self._steps: deque[PendingStep] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._failure: StepFailure | None = None
        self._failed_since: int | None = None  # the clock of the first step that has failed
        self._thread: threading.Thread | None = None

    def failure(self) -> StepFailure | None:
        """The first step that has failed; once."""
        with self._changed:
            found, self._failure = self._failure, None
        return found

    def fail(self, failure: StepFailure) -> bool:
        """A step has failed. Returns whether that is news: a failure covers all later steps."""
        with self._changed:
            if self._failed_since is not None and self._failed_since <= failure.clock:
                return False
            self._failure, self._failed_since = failure, failure.clock
            return True

    @property
    def failed(self) -> bool:
        """Whether `failure` has something to tell."""
        return self._failure is not None

    def add(self, pending: PendingStep) -> None:
        """A step has been launched."""
        with self._changed:
            self._steps.append(pending)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pending-steps", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def has_pending(self) -> bool:
        """Whether a step is under way."""
        return bool(self._steps)

    def drain(self, attend: Callable[[], None], most: int = _MOST - 1, seconds: float = math.inf) -> None:
        """Wait until no more than `most` steps are under way, or for so long. `attend` is called from time to time."""
        until = time.monotonic() + seconds
        while len(self._steps) > most and time.monotonic() < until:
            with self._changed:
                self._changed.wait_for(lambda: len(self._steps) <= most, _LOOKED_EVERY)
            attend()

    def end(self) -> None:
        """No more steps come."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        alone_since: float | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._steps or self._ended)
                if not self._steps:
                    return
            pending, now = self._steps[0], time.monotonic()
            try:
                done = pending.done
            except (RuntimeError, WarpbusError) as error:  # CUDA's: nothing on this GPU will be done any more
                self._fail(pending, str(error).partition("\n")[0])
                done = True
            if done:
                with self._changed:
                    self._steps.popleft()
                    self._changed.notify_all()
                continue
            why = self._gone()
            alone_since = None if why is None else alone_since or now
            if why is not None and alone_since is not None and now > alone_since + _GRACE:
                self._fail(pending, why)
            elif now > pending.until:
                self._fail(pending, "another rank's GPU does not do its part in time")
            time.sleep(_LOOKED_EVERY)

    def _fail(self, pending: PendingStep, why: str) -> None:
        if self.fail(StepFailure(pending.label, pending.clock, why)):
            self._broken(why)
        self._release()

"""Stops a run on Ctrl-C or SIGTERM: it finishes its step and saves a checkpoint."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A run was stopped by a signal.

    Attributes:
        signal: the number of the signal.
        step: the number of finished steps; None if unknown, because the checkpoint is older.
        state: the path of the checkpoint; None if there is none.
    """

    def __init__(self, number: int, step: int | None = 0, state: Path | None = None) -> None:
        if state is None:
            kept = "no step was finished" if step == 0 else "no checkpoint was saved"
        else:
            kept = f"the last checkpoint is {state}" if step is None else f"{step:,} steps saved in {state}"
        super().__init__(f"stopped by {signal.Signals(number).name}: {kept}")
        self.signal, self.step, self.state = number, step, state


class Signals:
    """Catches a signal of `STOPPING` while a `with` block runs; a second signal raises `Stopped` in the block.

    Outside the main thread, where Python cannot handle signals, this does nothing.

    Args:
        tell: called with the number of the first signal.

    Attributes:
        caught: the number of the first signal, or 0.
    """

    def __init__(self, tell: Callable[[int], None] | None = None) -> None:
        self.caught = 0
        self._tell = tell
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOPPING}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.caught:
            raise Stopped(number)
        self.caught = number
        if self._tell is not None:
            self._tell(number)

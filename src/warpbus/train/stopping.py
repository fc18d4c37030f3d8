"""How a run is stopped: Ctrl-C and SIGTERM let it finish its step and save its state."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A run that a signal has ended, with its state saved.

    Attributes:
        signal: its number.
        step: how many steps are done; None where that is not known, and the state is an earlier one.
        state: where they are kept; None where there was nothing to keep yet.
    """

    def __init__(self, number: int, step: int | None = 0, state: Path | None = None) -> None:
        if state is None:
            kept = "nothing was done yet" if step == 0 else "nothing was saved yet"
        else:
            kept = f"what was saved last is in {state}" if step is None else f"{step:,} steps are kept in {state}"
        super().__init__(f"stopped by {signal.Signals(number).name}: {kept}")
        self.signal, self.step, self.state = number, step, state


class Signals:
    """Notes a signal of `STOPPING` while a `with` block runs; a second one ends the block at once.

    Outside of the main thread, where Python has no signals, nothing is noted.

    Args:
        tell: called with the number of the first one, too.

    Attributes:
        caught: the number of the first one, or 0.
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

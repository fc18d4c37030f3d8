"""Measures the stages of a run."""

import time

import torch


class Stopwatch:
    """Seconds per named stage.

    On a GPU a lap ends when the GPU has finished the earlier work of the current stream. The host does not wait for
    that, and other streams are not delayed.

    Args:
        device: of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._now()
        self._laps: list[tuple[str, float | torch.cuda.Event]] = []
        self._seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Count the time since the last lap as spent on `name`."""
        self._laps.append((name, self._now()))

    @property
    def seconds(self) -> dict[str, float]:
        """The sums of all laps so far; waits for the GPU."""
        for name, end in self._laps:
            self._seconds[name] = self._seconds.get(name, 0.0) + _between(self._last, end)
            self._last = end
        self._laps = []
        return dict(self._seconds)

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return start.elapsed_time(end) / 1000
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start

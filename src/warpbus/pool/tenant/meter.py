"""How much of its GPU a lease uses, and slices of time where nothing else limits that."""

import time
from collections import deque

import torch

_WINDOW = 0.1
_KEPT = 1.0
_AHEAD = 1  # batches that the GPU has beside the one that it executes: a turn may last that much too long


class Slices:
    """A token bucket: over a tenth of a second and any longer time, a lease is busy for its share of it.

    Args:
        share: of the time, above 0 and at most 1.
        now: seconds, as all times here.
    """

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._most = share * _WINDOW
        self._tokens = self._most
        self._last = now

    def wait(self, now: float, least: float = 0.0) -> float:
        """Seconds until there are `least` seconds to spend."""
        self._refill(now, self._most)
        return max(0.0, (least - self._tokens) / self._share)

    def spend(self, seconds: float, now: float) -> None:
        """It was busy; that may be more than there was to spend, and is waited for afterwards."""
        most = max(self._most, self._tokens)
        self._tokens -= seconds
        self._refill(now, most)  # it went on being filled meanwhile

    def stand(self, now: float) -> None:
        """It wanted to be busy and others did not let it: what it could not spend it keeps, up to a second's share."""
        self._refill(now, self._share * _KEPT)

    def rest(self) -> None:
        """It has nothing to do, and forgets what it kept."""
        self._tokens = min(self._tokens, self._most)

    def _refill(self, now: float, most: float) -> None:
        filled = min(most, self._tokens + (now - self._last) * self._share)
        self._tokens, self._last = max(self._tokens, filled), now


class Meter:
    """Seconds that a device was busy with a lease's batches: on CUDA by events, on a CPU by the clock.

    Attributes:
        busy: seconds, as far as they are known; what the GPU has not finished is not in it.
    """

    def __init__(self, device: torch.device) -> None:
        self.busy = 0.0
        self._events = device.type == "cuda"
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._began = 0.0

    def begin(self) -> None:
        """A batch begins."""
        if self._events:
            self._start = torch.cuda.Event(enable_timing=True)
            self._start.record()
        else:
            self._began = time.perf_counter()

    def end(self) -> None:
        """It was launched, or on a CPU executed."""
        if self._events:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._running.append((self._start, end))
            self.collect()
        else:
            self.busy += time.perf_counter() - self._began

    @property
    def running(self) -> bool:
        """Whether the GPU was not done with everything at the last `collect`."""
        return bool(self._running)

    def collect(self, *, behind: bool = False) -> None:
        """Count what has finished; with `behind`, wait until no more than one batch has not."""
        while self._running:
            start, end = self._running[0]
            if behind and len(self._running) > _AHEAD:
                end.synchronize()
            if not end.query():
                return
            self.busy += start.elapsed_time(end) / 1000
            self._running.popleft()

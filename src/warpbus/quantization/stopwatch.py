"""Where the time of a run goes."""

import time

import torch


class Stopwatch:
    """Seconds by the name of what they went into.

    Args:
        device: what it waits for before it looks at the clock, if it is a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Count the time since the last lap as spent on `name`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

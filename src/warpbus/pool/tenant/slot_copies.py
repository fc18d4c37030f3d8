"""Copies between a lease's storages and slots of memory that it shares with another lease's process.

On a GPU the slots are pinned, and copies have a stream of their own: both directions run at the same time, and the host
deals with one slot while the next one is copied. On a CPU they are done at once.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

_AHEAD = 1
"""Copies that run while the host deals with the one before."""


class SlotCopies:
    """Copies in one direction. For one thread, but for `follow`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._taken: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def follow(self) -> None:
        """Later copies wait for what was launched in the current stream until now. Not while copies are made."""
        if self._device.type == "cuda":
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[int]:
        """Copy to slots.

        Args:
            pairs: a slot and what it gets, both uint8 of the same size.

        Yields:
            The bytes of each slot once it has them, in order.
        """
        running: deque[tuple[torch.cuda.Event | None, int]] = deque()
        for slot, source in pairs:
            running.append((self._launch(slot, source), len(source)))
            if len(running) > _AHEAD:
                yield _awaited(*running.popleft())
        while running:
            yield _awaited(*running.popleft())

    def take(self, target: Tensor, slot: Tensor, done: Callable[[], None]) -> None:
        """Copy the first bytes of a slot to a uint8 tensor. `done` is called once the slot is not read any more, in a
        later call or in `finish`."""
        event = self._launch(target, slot[: len(target)])
        if event is None:
            done()
            return
        self._taken.append((event, done))
        if len(self._taken) > _AHEAD:
            self._give_back()

    def finish(self) -> None:
        """Wait until what was taken is there."""
        while self._taken:
            self._give_back()

    @torch.inference_mode()  # as the storages' tensors are made
    def _launch(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        if self._stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event

    def _give_back(self) -> None:
        event, done = self._taken.popleft()
        event.synchronize()
        done()


def _awaited(event: torch.cuda.Event | None, nbytes: int) -> int:
    if event is not None:
        event.synchronize()
    return nbytes

"""What other ranks of a group have yet to announce: messages that this rank's GPU waits for already.

A rank launches its part of a step without waiting until the others come to it. Each of them sends a frame per message
before its GPU fills a slot. So when the bytes of a message are there, its frame is there too, and tells whether the
other rank did the same step.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from warpbus.errors import PoolError
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.frames import Frame
from warpbus.pool.tenant.pending_steps import StepFailure


@dataclass(frozen=True)
class ExpectedMessage:
    """A message that another rank has to announce.

    Attributes:
        label: what the program called.
        clock: `Storages.clock` when the step was launched.
        since: when, in seconds of `time.monotonic`.
        check: raises PoolError if a frame announces something else.
    """

    label: str
    clock: int
    since: float
    check: Callable[[Frame], None]


class Announcements:
    """The expected messages of a group, in order for each rank. Its methods may be called from any thread.

    Args:
        channels: to the other ranks. Only one thread receives from them at a time, which holds `reading`.
        most: bytes of a frame.
        failed: called with the failure of a step whose message is not the expected one, once.

    Attributes:
        reading: see `channels`.
    """

    def __init__(self, channels: Mapping[int, Channel], most: int, failed: Callable[[StepFailure], None]) -> None:
        self.reading = threading.RLock()
        self._channels = channels
        self._most = most
        self._failed = failed
        self._expected: dict[int, deque[ExpectedMessage]] = {}

    def expect(self, rank: int, message: ExpectedMessage) -> None:
        """This rank's GPU waits for a message from now on."""
        with self.reading:
            self._expected.setdefault(rank, deque()).append(message)

    def behind(self, seconds: float = 0.0) -> tuple[int, ExpectedMessage] | None:
        """A rank that has not announced a message which has been expected for so long, and the message."""
        before = time.monotonic() - seconds
        with self.reading:
            for rank, expected in self._expected.items():
                if expected and expected[0].since <= before:
                    return rank, expected[0]
        return None

    def check(self, *, wait: bool = True) -> None:
        """Check all frames that are here.

        Args:
            wait: for another thread that receives; if not, nothing happens while there is one.
        """
        if any(list(self._expected.values())) and self.reading.acquire(blocking=wait):
            try:
                for rank in self._expected:
                    while self.next(rank, 0.0):
                        pass
            finally:
                self.reading.release()

    def next(self, rank: int, timeout: float) -> bool:
        """Check the next frame of a rank. Returns False if none comes in so many seconds, or none is expected."""
        with self.reading:
            expected = self._expected.get(rank)
            if not expected:
                return False
            try:
                frame = self._channels[rank].receive(timeout, most=self._most)
                if frame is None:
                    return False
                expected[0].check(frame)
            except PoolError as error:
                self.fail(expected[0], str(error))
                return False
            expected.popleft()
            return True

    def fail(self, message: ExpectedMessage, why: str) -> None:
        """A message does not come, nor any later one."""
        with self.reading:
            for expected in self._expected.values():
                expected.clear()
        self._failed(StepFailure(message.label, message.clock, why))

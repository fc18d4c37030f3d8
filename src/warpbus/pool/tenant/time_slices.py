"""Time slices on a GPU that several tenants share: which tenant may execute, and for how long.

Only the tenant that holds the slice has work on the GPU, so the length of the slice is the time that it used. A slice
lasts for the tenant's share of a round; then the tenant goes to the end of the queue, if others wait. In addition, a
token bucket (`Slices`) limits the tenant to its share of all time, even if the other tenants are idle.
"""

import fcntl
import os
import struct
from pathlib import Path

from warpbus.pool.tenant.meter import Slices

NAP = 0.0003
"""Seconds between two polls of a tenant that waits for its slice, or for its GPU to finish at the end of a slice."""

_ROUND = 0.05  # seconds, of which each slice is a share; long compared with the nap between two slices
_LINGER = 0.001  # seconds within which a client that waited for a result sends its next batch
_POSITIONS = 16
_LOCK = struct.Struct("hhqqi0q")  # struct flock of fcntl(2): type, whence, start, length, process


class GpuQueue:
    """The queue of the tenants of one GPU that have work; the tenant at position 0 holds the slice.

    A position is a byte of a file, locked by the tenant there (F_OFD_SETLK of fcntl(2)). A tenant locks the next
    position before it unlocks its own, so the order never changes. When a process dies, the kernel unlocks its
    position.

    Args:
        path: a file that all tenants of the GPU open; its content does not matter.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._position: int | None = None

    @property
    def queued(self) -> bool:
        """Whether this tenant is in the queue, at any position."""
        return self._position is not None

    @property
    def first(self) -> bool:
        """Whether this tenant holds the slice."""
        return self._position == 0

    def advance(self) -> bool:
        """Join the queue, if its last position is free, and advance as far as possible. Returns `first`."""
        if self._position is None and self._take(_POSITIONS - 1):
            self._position = _POSITIONS - 1
        while self._position and self._take(self._position - 1):
            self._set(fcntl.F_UNLCK, self._position)
            self._position -= 1
        return self.first

    def others(self) -> bool:
        """Whether other tenants are queued. For the tenant at position 0."""
        wanted = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 1, _POSITIONS - 1, 0)
        found = _LOCK.unpack(fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, wanted))
        return bool(found[0] != fcntl.F_UNLCK)

    def leave(self) -> None:
        """Leave the queue, so that the tenants behind can advance."""
        if self._position is not None:
            self._set(fcntl.F_UNLCK, self._position)
            self._position = None

    def close(self) -> None:
        """Leave the queue and close its file."""
        os.close(self._file)
        self._position = None

    def _take(self, position: int) -> bool:
        try:
            self._set(fcntl.F_WRLCK, position)
        except BlockingIOError:
            return False
        return True

    def _set(self, kind: int, position: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, position, 1, 0))


class TimeSlices:
    """The time slices of one tenant, which calls `may_execute` before each batch and `attend` regularly.

    Args:
        share: of the GPU's time, above 0 and at most 1.
        queue: of the GPU.
        now: the time in seconds, as everywhere in this class.
    """

    def __init__(self, share: float, queue: GpuQueue, now: float) -> None:
        self._share = share
        self._slice = share * _ROUND
        self._queue = queue
        self._slices = Slices(share, now)
        # Seconds left of the slice. A negative value is the time by which the slice was overrun: it shortens the next
        # slice, after it has been reduced at the rate of the share until the tenant queues again.
        self._left = 0.0
        self._counted = now  # the time up to which `_left` is accounted
        self._resting: float | None = None  # the time since which the tenant has had nothing to do in its slice

    def may_execute(self, now: float) -> bool:
        """Whether a waiting batch may be executed now. Takes the slice if nobody holds it."""
        if not self._queue.first and not self._begin(now):
            return False
        self._resting = None
        return not self._over(now)

    def attend(self, now: float, *, waiting: bool, running: bool) -> None:
        """Give up a slice that is over, or that was idle for a millisecond.

        Args:
            waiting: there is a batch that was not executed yet.
            running: launched work is not complete.
        """
        if not self._queue.first:
            if not waiting:
                self._queue.leave()
        elif running:
            self._resting = None
        elif self._over(now):
            self.give_up(now)
        elif self._resting is None:
            self._resting = now
        elif now - self._resting >= _LINGER:
            self.give_up(now)
            self._slices.rest()

    def give_up(self, now: float) -> None:
        """Leave the queue from any position. Launched work has to be complete."""
        if self._queue.first:
            self._count(now)
        self._queue.leave()

    def patience(self, now: float, *, waiting: bool) -> float | None:
        """Seconds until the next call of `may_execute`, if a batch waits, or else of `attend`; None: not before a batch
        arrives."""
        if waiting:
            return NAP if self._queue.queued else max(NAP, self._slices.wait(now, self._slice / 2))
        return _LINGER if self._queue.first else None

    def close(self) -> None:
        """Stop sharing: no other tenant is left."""
        self._queue.close()

    def _begin(self, now: float) -> bool:
        if not self._queue.queued:
            if self._slices.wait(now, self._slice / 2) > 0:  # less is not worth the change
                return False
            self._left = min(0.0, self._left + (now - self._counted) * self._share)
            self._counted = now
        if not self._queue.advance():
            return False
        self._slices.stand(now)
        self._left += self._slice
        self._counted = now
        self._resting = None
        return True

    def _over(self, now: float) -> bool:
        self._count(now)
        if self._slices.wait(now) > 0:
            return True
        if self._left <= 0 and not self._queue.others():
            self._left = self._slice
        return self._left <= 0

    def _count(self, now: float) -> None:
        passed, self._counted = now - self._counted, now
        self._left -= passed
        self._slices.spend(passed, now)

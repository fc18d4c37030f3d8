"""Turns on a GPU that several tenants share by slices of time: who may execute, and for how long.

While a tenant has the turn nobody else's work is on the GPU, so the time that it has it for is the time that it used.
It has it for its part of a round, after which it goes to the end of the line if somebody stands there. Beside that a
token bucket (`Slices`) keeps it to its share of all time, also when its neighbours rest.
"""

import fcntl
import os
import struct
from pathlib import Path

from warpbus.pool.tenant.meter import Slices

NAP = 0.0003
"""Seconds between two looks of a tenant that waits: for those before it, or for its GPU to be done at a turn's end."""

_ROUND = 0.05  # of which each turn is a share: long beside the nap that goes by between two turns
_LINGER = 0.001  # a client that has waited for a result sends what comes next within this
_PLACES = 16
_LOCK = struct.Struct("hhqqi0q")  # struct flock of fcntl(2): type, whence, start, length, process


class GpuQueue:
    """The tenants of one GPU that have work, in a line; the one in place 0 has the turn.

    A place is a byte of a file, locked by whoever stands there (F_OFD_SETLK of fcntl(2)); who steps forward locks the
    next place before it gives up its own, so nobody is overtaken. When a process dies, the kernel unlocks its place.

    Args:
        path: of a file that all of them open; its content does not matter.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._place: int | None = None

    @property
    def standing(self) -> bool:
        """Whether this one is in the line, perhaps first."""
        return self._place is not None

    @property
    def first(self) -> bool:
        """Whether this one has the turn."""
        return self._place == 0

    def step_forward(self) -> bool:
        """Join the line, if there is room at its end, and go as far as it is free. Returns `first`."""
        if self._place is None and self._take(_PLACES - 1):
            self._place = _PLACES - 1
        while self._place and self._take(self._place - 1):
            self._set(fcntl.F_UNLCK, self._place)
            self._place -= 1
        return self.first

    def others(self) -> bool:
        """Whether anybody stands behind the first place, seen from there."""
        wanted = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 1, _PLACES - 1, 0)
        found = _LOCK.unpack(fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, wanted))
        return bool(found[0] != fcntl.F_UNLCK)

    def leave(self) -> None:
        """Let those behind step forward."""
        if self._place is not None:
            self._set(fcntl.F_UNLCK, self._place)
            self._place = None

    def close(self) -> None:
        """Leave it for good."""
        os.close(self._file)
        self._place = None

    def _take(self, place: int) -> bool:
        try:
            self._set(fcntl.F_WRLCK, place)
        except BlockingIOError:
            return False
        return True

    def _set(self, kind: int, place: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, place, 1, 0))


class TimeSlices:
    """One tenant's turns. It calls `may_execute` before each batch, and `attend` again and again.

    Args:
        share: of the time, above 0 and at most 1.
        line: of its GPU.
        now: seconds, as all times here.
    """

    def __init__(self, share: float, line: GpuQueue, now: float) -> None:
        self._share = share
        self._turn = share * _ROUND
        self._line = line
        self._slices = Slices(share, now)
        # Seconds that are left of the turn. Below 0: it took that much too long, which the next one is shorter by, but
        # for what becomes its own, at the rate of its share, before it stands in line again.
        self._left = 0.0
        self._counted = now  # until when time is in `_left`
        self._resting: float | None = None  # since when there is nothing to do in the turn

    def may_execute(self, now: float) -> bool:
        """There is a batch: whether it may be executed now. If it is nobody's turn, it is this one's."""
        if not self._line.first and not self._begin(now):
            return False
        self._resting = None
        return not self._over(now)

    def attend(self, now: float, *, waiting: bool, running: bool) -> None:
        """Give up what is not needed: a turn that is over, or that nothing was done with for a millisecond.

        Args:
            waiting: there is a batch that was not executed yet.
            running: the GPU is not done with what was launched.
        """
        if not self._line.first:
            if not waiting:
                self._line.leave()
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
        """Leave the line, whatever the place. The GPU has to be done with what was launched."""
        if self._line.first:
            self._count(now)
        self._line.leave()

    def patience(self, now: float, *, waiting: bool) -> float | None:
        """Seconds after which to call again: `may_execute` if a batch waits, else `attend`; None: not before there is
        one."""
        if waiting:
            return NAP if self._line.standing else max(NAP, self._slices.wait(now, self._turn / 2))
        return _LINGER if self._line.first else None

    def close(self) -> None:
        """There is nobody any more to take turns with."""
        self._line.close()

    def _begin(self, now: float) -> bool:
        if not self._line.standing:
            if self._slices.wait(now, self._turn / 2) > 0:  # less is not worth the change
                return False
            self._left = min(0.0, self._left + (now - self._counted) * self._share)
            self._counted = now
        if not self._line.step_forward():
            return False
        self._slices.stand(now)
        self._left += self._turn
        self._counted = now
        self._resting = None
        return True

    def _over(self, now: float) -> bool:
        self._count(now)
        if self._slices.wait(now) > 0:
            return True
        if self._left <= 0 and not self._line.others():
            self._left = self._turn
        return self._left <= 0

    def _count(self, now: float) -> None:
        passed, self._counted = now - self._counted, now
        self._left -= passed
        self._slices.spend(passed, now)

"""Rate limits: a token bucket per tenant and per address."""

import time
from collections.abc import Callable

from warpbus.errors import UnavailableError

_MOST_REMEMBERED = 10_000


class RateLimit:
    """Lets each key do something `per_minute` times a minute, and as many times at once after it has rested.

    Args:
        per_minute: of each key.
        what: is limited, in the error's words.
        clock: seconds.
    """

    def __init__(self, per_minute: float, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = max(1.0, per_minute)
        self._per_second = per_minute / 60.0
        self._what = what
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # what is left, and when that was so; the oldest first

    def check(self, key: str) -> None:
        """Count one more.

        Raises:
            UnavailableError: it is one too many; the message says for how long to wait, as does `retry_after`.
        """
        now = self._clock()
        left, then = self._buckets.pop(key, (self._most, now))
        left = min(self._most, left + (now - then) * self._per_second)
        wait = (1.0 - left) / self._per_second
        self._buckets[key] = (left if wait > 0 else left - 1.0, now)
        while len(self._buckets) > _MOST_REMEMBERED:
            del self._buckets[next(iter(self._buckets))]
        if wait > 0:
            raise UnavailableError(
                f"{key} asks for {self._what} too often: at most {60 * self._per_second:g} a minute: try again in "
                f"{wait:.1f} s",
                retry_after=wait,
            )

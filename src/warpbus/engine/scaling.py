"""Decides how many replicas a model has, by the length of their queues. Knows no processes and no clock."""

from dataclasses import dataclass

SECONDS_UNTIL_MORE = 10.0
"""For so long requests must wait before a replica is added."""

SECONDS_UNTIL_FEWER = 300.0
"""For so long fewer replicas must suffice before one is removed."""


@dataclass
class QueueScaling:
    """Adds a replica when requests have waited for a while, and removes one when few have run for longer.

    Args:
        least, most: replicas.
        max_num_seqs: requests that a replica runs at once.
        until_more, until_fewer: seconds.
    """

    least: int
    most: int
    max_num_seqs: int
    until_more: float = SECONDS_UNTIL_MORE
    until_fewer: float = SECONDS_UNTIL_FEWER
    _busy_since: float | None = None
    _idle_since: float | None = None

    def wanted(self, now: float, replicas: int, *, running: int, waiting: int) -> int:
        """How many replicas there should be; at most one more or one fewer than there are.

        Args:
            now: in seconds; does not decrease.
            replicas: that there are, those that start included.
            running, waiting: requests of all replicas.
        """
        # Half empty without one of them: that one does not come back at once.
        idle = not waiting and 2 * running <= (replicas - 1) * self.max_num_seqs
        self._busy_since = (self._busy_since if self._busy_since is not None else now) if waiting else None
        self._idle_since = (self._idle_since if self._idle_since is not None else now) if idle else None
        if self._busy_since is not None and now - self._busy_since >= self.until_more and replicas < self.most:
            self._busy_since = None
            return replicas + 1
        if self._idle_since is not None and now - self._idle_since >= self.until_fewer and replicas > self.least:
            self._idle_since = None
            return replicas - 1
        return replicas

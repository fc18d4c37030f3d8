"""The hosts, the current leases and the last events. Records them and makes no decisions.

What is free is never stored, it is computed from the leases, so that it cannot be wrong.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from warpbus.cuda.memory_size import gigabytes
from warpbus.pool.broker.leases import Event, Lease, PoolGpu
from warpbus.pool.quota import Quota

EVENTS = 1000
"""How many events are kept."""

# Shares such as 0.7 + 0.2 + 0.1 have to fill a GPU, whatever their last bits add up to.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class HostEntry:
    """A machine of the pool.

    Attributes:
        gpus: by name.
        seen: when it was last heard of.
        draining: it gets no new leases.
        lost: it left; it is kept so that people see what is missing.
    """

    name: str
    gpus: dict[str, PoolGpu]
    seen: float
    draining: bool = False
    lost: bool = False

    @property
    def open(self) -> bool:
        """It may get leases."""
        return not (self.draining or self.lost)


@dataclass(frozen=True)
class Room:
    """The free part of a GPU: bytes, and share of its compute."""

    gpu: PoolGpu
    memory: int
    share: float

    def holds(self, quota: Quota) -> bool:
        """Whether a lease of `quota` fits."""
        return quota.memory <= min(self.memory, self.gpu.memory) and quota.share <= self.share + TOLERANCE

    def without(self, quota: Quota) -> "Room":
        """The room that is left after a lease of `quota` is placed there."""
        return replace(self, memory=self.memory - quota.memory, share=self.share - quota.share)

    def with_back(self, quota: Quota) -> "Room":
        """The room after a lease of `quota` leaves."""
        return replace(self, memory=self.memory + quota.memory, share=self.share + quota.share)

    def __str__(self) -> str:
        return f"{self.gpu.name} with {gigabytes(self.memory)} and share {max(self.share, 0.0):.2f}"


@dataclass
class Ledger:
    """The state of the pool.

    Attributes:
        hosts: by name.
        leases: those that live, by id.
        events: the last of them, the oldest first.
        changes: how many events there have been: what is written to disk is old when this has grown.
    """

    hosts: dict[str, HostEntry] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS))
    changes: int = 0

    def gpus(self) -> list[PoolGpu]:
        """All GPUs that have not left."""
        return [gpu for host in self.hosts.values() if not host.lost for gpu in host.gpus.values()]

    def gpu(self, name: str | None) -> PoolGpu | None:
        """A GPU that has not left, or None."""
        host = self.hosts.get((name or "").partition("/")[0])
        return None if host is None or host.lost else host.gpus.get(name or "")

    def rooms(self) -> dict[str, Room]:
        """The room of each GPU that has not left, by name. A migrating lease takes room on both sides."""
        rooms = {gpu.name: Room(gpu, gpu.promised, gpu.oversubscribe) for gpu in self.gpus()}
        for lease in self.leases.values():
            for name in (lease.gpu, lease.target):
                if name is not None:
                    rooms[name] = rooms[name].without(lease.quota)
        return rooms

    def open_rooms(self) -> dict[str, Room]:
        """`rooms` of the GPUs that may get leases."""
        return {name: room for name, room in self.rooms().items() if self.hosts[room.gpu.host].open}

    def on(self, names: Iterable[str]) -> list[Lease]:
        """The leases that are on these GPUs, or move to or from them."""
        wanted = set(names)
        return [lease for lease in self.leases.values() if wanted & {lease.gpu, lease.target}]

    def queue(self, aging: float) -> list[Lease]:
        """The leases that wait, the next one first.

        All of them gain a priority of one in `aging` seconds. So who is ahead of whom depends on their priorities and
        on when they began to wait, and never changes. Of equals the one that was requested first is ahead.
        """
        waiting = [lease for lease in self.leases.values() if lease.state == "queued"]
        return sorted(waiting, key=lambda lease: lease.since / aging - lease.priority)

    def neighbour(self, lease: Lease) -> Lease | None:
        """The lease that this one is to be near to, if it lives."""
        return self.leases.get(lease.near or "")

    def suits(self, lease: Lease, gpu: PoolGpu) -> bool:
        """Whether a GPU is where the lease was requested for: `on`, and on the host of `near` where that has a GPU."""
        if lease.on is None and lease.near is None:
            return True
        near = self.gpu(neighbour.gpu) if (neighbour := self.neighbour(lease)) else None
        return lease.on in (None, gpu.name, gpu.host) and (near is None or near.host == gpu.host)

    def put(self, lease: Lease) -> Lease:
        """Keep a lease as it is now."""
        self.leases[lease.id] = lease
        return lease

    def change(self, lease: Lease, kind: str, now: float, *, source: str | None = None, **changes: Any) -> Lease:
        """Bring a lease into another state, with an event of this kind."""
        after = replace(lease, since=now, **changes)
        waited = now - lease.since if kind == "placed" else None
        self.record(
            now, kind, lease, source=source, target=after.target or after.gpu, seconds=waited, text=after.reason
        )
        return self.put(after)

    def end_move(
        self,
        lease: Lease,
        moved: bool,
        why: str,
        now: float,
        *,
        copied: int | None = None,
        pause: float | None = None,
    ) -> Lease:
        """A lease that moves is at its target, or stays where it was, which `why` explains."""
        there = lease.target if moved else lease.gpu
        kind, reason = ("moved", f"moved from {lease.gpu}") if moved else ("not moved", f"stayed on {there}: {why}")
        self.record(
            now,
            kind,
            lease,
            source=lease.gpu,
            target=lease.target,
            seconds=now - lease.since,
            bytes=copied,
            pause=pause,
            text=reason,
        )
        return self.put(
            replace(lease, state="placed", gpu=there, target=None, since=now, seen=max(lease.seen, now), reason=reason)
        )

    def end(self, lease: Lease, state: Literal["released", "expired"], kind: str, why: str, now: float) -> Lease:
        """A lease is over; it is returned for the last time."""
        del self.leases[lease.id]
        life = now - lease.created
        self.record(now, kind, lease, source=lease.gpu, target=lease.target, seconds=life, text=why)
        return replace(lease, state=state, gpu=None, target=None, since=now, reason=why)

    def record(
        self,
        now: float,
        kind: str,
        lease: Lease | None = None,
        *,
        source: str | None = None,
        target: str | None = None,
        seconds: float | None = None,
        bytes: int | None = None,
        pause: float | None = None,
        text: str,
    ) -> None:
        """Record an event."""
        who, whose = (None, None) if lease is None else (lease.id, lease.tenant)
        self.events.append(Event(now, kind, who, whose, source, target, seconds, bytes, pause, text))
        self.changes += 1

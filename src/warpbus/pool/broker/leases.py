"""The data of the broker: GPUs, leases, limits, migrations and events. Immutable, without behaviour."""

from dataclasses import dataclass
from typing import Literal

from warpbus.pool.quota import Quota

HIGHEST_PRIORITY = 100
"""Priorities go from minus this to this: what waiting adds has to make up for them within reasonable time."""

State = Literal["queued", "placed", "moving", "suspended", "released", "expired"]


@dataclass(frozen=True)
class PoolGpu:
    """A GPU of the pool.

    Attributes:
        name: "host/index", for example "mill/0".
        host: the machine's name in the pool.
        index: of the GPU on its host.
        model: as the driver calls it.
        memory: bytes that leases may have of it.
        links: names of the GPUs of its host that it reaches over NVLink.
        oversubscribe: how many times its memory and its compute are promised to leases. Above 1 its host swaps leases
            that have nothing to do out to host memory.
    """

    name: str
    host: str
    index: int
    model: str
    memory: int
    links: tuple[str, ...] = ()
    oversubscribe: float = 1.0

    @property
    def promised(self) -> int:
        """The most bytes of all its leases together."""
        return int(self.memory * self.oversubscribe)


@dataclass(frozen=True)
class Lease:
    """A tenant's right to a part of one GPU, as it stood when the broker returned it.

    Attributes:
        id: 32 hexadecimal digits. It only names the lease: its client shows a key, which the broker does not know.
        tenant: the user that asked for it.
        quota: its quota.
        priority: as requested; waiting adds to it.
        gpu: the GPU that it is on, or None. While it moves, the one it comes from.
        state: "queued" for room, "placed", "moving" to `target`, "suspended" on disk; the last two states are the end:
            "released" by its client, "expired" because its client or its GPU vanished.
        created: when it was requested. All times are seconds since the epoch.
        since: when it came into its state.
        seen: when its client was last heard of.
        target: the GPU that is reserved for it while it moves, else None.
        reason: why it is where it is, for people.
        movable: it may be moved and suspended.
        on: the GPU or the host that it was requested for, or None for any.
        near: the lease that it was requested next to, or None.
        memory_used: bytes, as last reported, or None.
    """

    id: str
    tenant: str
    quota: Quota
    priority: int
    gpu: str | None
    state: State
    created: float
    since: float
    seen: float
    target: str | None
    reason: str
    movable: bool
    on: str | None
    near: str | None
    memory_used: int | None = None


@dataclass(frozen=True)
class Limits:
    """The most that one tenant may have at a time; None is no limit.

    Attributes:
        memory: bytes of all its leases that wait, are placed or move.
        share: of compute, added up over the same leases; above 1 for more than one GPU.
        leases: how many, those that are suspended included.
        priority: of each of its leases: where a GPU is oversubscribed, work of a higher one preempts that of others.
    """

    memory: int | None = None
    share: float | None = None
    leases: int | None = None
    priority: int | None = None


@dataclass(frozen=True)
class LeaseMove:
    """A move that a plan proposes: `lease` from GPU `source` to GPU `target`; `bytes` is what it is likely to copy."""

    lease: str
    source: str
    target: str
    bytes: int


@dataclass(frozen=True)
class Event:
    """Something that happened in the pool.

    Attributes:
        time: when.
        kind: of a host "joined", "left", "draining" or "undrained"; of a lease "queued", "placed", "moving", "moved",
            "not moved", "suspended", "released", "expired" or "lost" (its GPU left).
        lease, tenant: whom it concerns, or None.
        source: the GPU that the lease had, or the host that the event is of.
        target: the GPU that the lease got, or was to get.
        seconds: how long it took: waiting for "placed", moving for "moved" and "not moved", the life of a lease at its
            end.
        bytes: copied by a move, where that is known.
        pause: of a move, where that is known: seconds for which the lease executed nothing.
        text: the same for people.
    """

    time: float
    kind: str
    lease: str | None = None
    tenant: str | None = None
    source: str | None = None
    target: str | None = None
    seconds: float | None = None
    bytes: int | None = None
    pause: float | None = None
    text: str = ""

"""The records of a machine's leases: their orders, their processes, and how they ended."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, Self

from warpbus.errors import UsageError
from warpbus.pool.daemon.residency import Residence
from warpbus.pool.daemon.tenant_processes import TenantProcess
from warpbus.pool.protocol.messages import Request, checked
from warpbus.pool.protocol.operations import DAEMON


@dataclass(frozen=True)
class Order:
    """The order of the broker that a machine hosts a lease.

    Attributes:
        lease: its id.
        key: the secret with which its client authenticates.
        tenant: its owner.
        gpu: one of this machine's.
        memory, share: its quota.
        migration_token: if it moves here, the secret with which the source machine authenticates.
        saved: it was suspended here, and resumes.
        priority: of its work over that of other leases on an oversubscribed GPU.
        movable: it may be swapped out.
    """

    lease: str
    key: bytes = field(repr=False)
    tenant: str
    gpu: str
    memory: int
    share: float
    migration_token: bytes | None = field(default=None, repr=False)
    saved: bool = False
    priority: int = 0
    movable: bool = True

    @classmethod
    def read(cls, arguments: Any) -> Self:
        """From `asdict`. Raises UsageError if it is malformed."""
        order = cls(**checked("receive", arguments, DAEMON).arguments)
        return replace(order, share=float(order.share))


def check_lease_id(lease: str) -> None:
    """Raises UsageError if it cannot be the id of a lease."""
    if len(lease) != 32 or set(lease) - set("0123456789abcdef"):
        raise UsageError(f"lease is {lease!r:.100}: give 32 hexadecimal digits")


@dataclass
class Tenancy:
    """A lease on this machine, and its process.

    Attributes:
        ready: done when clients may come, or failed.
        clients: how many are connected.
        memory: bytes in use, as its process reports.
        work: the messages of its process on a move or on saving; None if there is neither.
        dealt: batches and questions that it has finished, as its process reports.
        residence: the state of its memory: on the GPU or swapped out.
        ending: the reason for which it is being ended; its process is then expected to end.
    """

    order: Order
    process: TenantProcess
    ready: asyncio.Future[None]
    clients: int = 0
    memory: int | None = None
    work: asyncio.Queue[Request | None] | None = None
    ending: str | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    dealt: int = 0
    residence: Residence = field(init=False)

    def __post_init__(self) -> None:
        order = self.order
        self.residence = Residence(
            order.lease, order.gpu, order.memory, order.share, priority=order.priority, movable=order.movable
        )


@dataclass(frozen=True)
class EndedLease:
    """The fate of a lease that was here: it moved to `address`, or it ended, and `why`."""

    when: float
    key: bytes
    why: str = ""
    address: str | None = None

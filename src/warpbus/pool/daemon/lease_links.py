"""Connections between the processes of two leases: opened by the daemon of the one that asks for it.

A process cannot connect to anything itself. Its daemon checks, or has the other machine's daemon check, that whoever
asks knows the other lease's link key. On one machine both processes get an end of a socket pair and memory that they
share; else the daemon connects to the other one, as a client does.
"""

import asyncio
import hmac
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from warpbus.cuda.memory_size import short_size
from warpbus.errors import AuthorizationError, DeviceError
from warpbus.pool.broker.status import LinkMemoryUsage
from warpbus.pool.protocol import link_memory
from warpbus.pool.protocol.address import address as read_address
from warpbus.pool.protocol.channel import HANDSHAKE_SECONDS, pool_at
from warpbus.pool.protocol.preamble import link_id, link_key
from warpbus.pool.protocol.sockets import connected

if TYPE_CHECKING:
    from warpbus.pool.daemon.tenancies import Order, Tenancy

_log = logging.getLogger(__name__)

_MOST_REMEMBERED = 10_000


def log_indirect(order: "Order", why: str) -> None:
    """Log that a lease exchanges bytes with another one of this machine through host memory.

    Args:
        order: of the lease.
        why: the reason.
    """
    _log.warning(
        "lease %s of tenant %s on %s: it exchanges bytes with another lease of this machine through host memory, not "
        "from GPU to GPU, which takes longer: %s",
        order.lease,
        order.tenant,
        order.gpu,
        why,
    )


class LinkMemories:
    """The memory that leases of this machine share, of which there is a limit for all of them together.

    It is in no lease's quota, because both leases have it and it is no memory of their GPU. What is in use is asked of
    the kernel, so that a process that dies, or keeps a mapping, needs no report.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._watches: list[int] = []
        self._groups: dict[bytes, None] = {}  # that use sockets, the oldest first
        self._unshared = 0

    def create(self) -> list[int]:
        """Descriptors of `link_memory` for two processes.

        Raises:
            DeviceError: the limit is reached, or the system does not provide the memory.
        """
        used = self._used()
        if used + link_memory.SIZE > self.limit:
            raise DeviceError(
                f"leases of this machine share {short_size(used)} of host memory already, of {short_size(self.limit)} "
                "at most: leave groups or end leases that are not needed"
            )
        descriptors, watch = link_memory.create()
        self._watches.append(watch)
        return descriptors

    def unshared(self, order: "Order", group: bytes, why: str) -> None:
        """Two leases of a group are linked without shared memory: this is logged once per group.

        Args:
            order: of the lease that has none.
            group: its id.
            why: the reason.
        """
        if group in self._groups:
            return
        while len(self._groups) >= _MOST_REMEMBERED:
            del self._groups[next(iter(self._groups))]
        self._groups[group] = None
        self._unshared += 1
        _log.warning(
            "lease %s of tenant %s on %s: its group exchanges bytes through sockets, not through shared memory, which "
            "takes longer (a training step took 172 ms instead of 74 on two H200s): %s",
            order.lease,
            order.tenant,
            order.gpu,
            why,
        )

    def usage(self) -> LinkMemoryUsage:
        """For the status of the pool."""
        return LinkMemoryUsage(self._used(), self.limit, self._unshared)

    def close(self) -> None:
        """Close the daemon's descriptors."""
        for watch in self._watches:
            os.close(watch)
        self._watches = []

    def _used(self) -> int:
        watches = {watch: link_memory.in_use(watch) for watch in self._watches}
        for watch in [each for each, used in watches.items() if not used]:
            os.close(watch)
        self._watches = [watch for watch, used in watches.items() if used]
        return len(self._watches) * link_memory.SIZE


@asynccontextmanager
async def opened_link(
    memories: LinkMemories, other: "Tenancy | None", lease: str, address: str, key: bytes
) -> AsyncIterator[tuple[list[int], dict[str, Any], str]]:
    """A socket that leads to the process of a lease.

    Args:
        memories: of this machine.
        other: the lease, if it is on this machine.
        lease: its id.
        address: of the daemon of its machine.
        key: its link key.

    Yields:
        The descriptors of the socket and, on one machine, of `link_memory`; what the process that gets them has to
        know: "address", "link_id" and "link_key"; and why there is no memory on one machine, or "".

    Raises:
        AuthorizationError: it is not the key of this lease.
        ConnectionLostError: the other machine does not answer.
    """
    known = {"link_id": link_id(bytes.fromhex(lease)), "link_key": key}
    if other is not None and other.ending is None:
        if not hmac.compare_digest(link_key(other.order.key), key):
            raise AuthorizationError(f"this is not the link key of lease {lease}: take what its client gives")
        shared, why = [], ""
        try:
            shared = memories.create()
        except DeviceError as error:
            why = str(error)
        mine, theirs = socket.socketpair()
        try:
            with mine:
                with theirs:
                    await other.process.tell("client", {}, theirs.fileno(), *shared)
                yield [mine.fileno(), *shared], {"address": None, **known}, why
        finally:
            link_memory.close(shared)
        return
    where = read_address(address)
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    with await asyncio.to_thread(connected, where, pool_at(where), deadline) as sock:
        yield [sock.fileno()], {"address": address, **known}, ""

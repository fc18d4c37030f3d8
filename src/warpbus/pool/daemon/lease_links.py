"""Connections between the processes of two leases: opened by the daemon of the one that asks for it.

A process cannot connect to anything itself. Its daemon checks, or has the other machine's daemon check, that whoever
asks knows the other lease's link key. On one machine both processes get an end of a socket pair and memory that they
share; else the daemon connects to the other one, as a client does.
"""

import asyncio
import hmac
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from warpbus.errors import AuthorizationError
from warpbus.pool.protocol import link_memory
from warpbus.pool.protocol.address import address as read_address
from warpbus.pool.protocol.channel import HANDSHAKE_SECONDS, pool_at
from warpbus.pool.protocol.preamble import link_id, link_key
from warpbus.pool.protocol.sockets import connected

if TYPE_CHECKING:
    from warpbus.pool.daemon.tenancies import Tenancy


@asynccontextmanager
async def opened_link(
    other: "Tenancy | None", lease: str, address: str, key: bytes
) -> AsyncIterator[tuple[list[int], dict[str, Any]]]:
    """A socket that leads to the process of a lease.

    Args:
        other: the lease, if it is on this machine.
        lease: its id.
        address: of the daemon of its machine.
        key: its link key.

    Yields:
        The descriptors of the socket and, on one machine, of `link_memory`; and what the process that gets them has to
        know: "address", "link_id" and "link_key".

    Raises:
        AuthorizationError: it is not the key of this lease.
        ConnectionLostError: the other machine does not answer.
    """
    known = {"link_id": link_id(bytes.fromhex(lease)), "link_key": key}
    if other is not None and other.ending is None:
        if not hmac.compare_digest(link_key(other.order.key), key):
            raise AuthorizationError(f"this is not the link key of lease {lease}: take what its client gives")
        shared = link_memory.create()
        mine, theirs = socket.socketpair()
        try:
            with mine:
                with theirs:
                    await other.process.tell("client", {}, theirs.fileno(), *shared)
                yield [mine.fileno(), *shared], {"address": None, **known}
        finally:
            link_memory.close(shared)
        return
    where = read_address(address)
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    with await asyncio.to_thread(connected, where, pool_at(where), deadline) as sock:
        yield [sock.fileno()], {"address": address, **known}

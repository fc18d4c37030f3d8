"""Connections from this lease's process to those of other leases, for the groups that they are in.

The daemon has opened the socket. The lease with the higher rank connects, and the other one lets it in if its own
client has joined the group with this id: so both clients have agreed to it.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from warpbus.errors import (
    AuthorizationError,
    ConnectionLostError,
    DeviceError,
    LeaseLostError,
    ProtocolError,
    StateError,
    WarpbusError,
)
from warpbus.pool.protocol import link_memory
from warpbus.pool.protocol.address import address as read_address
from warpbus.pool.protocol.channel import HANDSHAKE_SECONDS, Channel, begin, context_for
from warpbus.pool.protocol.failures import error_value, sent_error
from warpbus.pool.protocol.frames import MAX_HELLO, PROTOCOL, Kind
from warpbus.pool.protocol.link_memory import LinkMemory
from warpbus.pool.protocol.messages import decode_dict
from warpbus.pool.protocol.sockets import Tls
from warpbus.pool.protocol.wire import Value, encode
from warpbus.pool.tenant.acceptor import refuse
from warpbus.pool.tenant.device_link import DeviceLink
from warpbus.pool.tenant.groups import LeaseGroups

Report = Callable[[str, dict[str, Value]], None]
"""Reports one of `operations.EVENTS` with its facts."""

_SECONDS_TO_ANSWER = 60.0
"""The other process may be executing a batch."""


class LinkOpener:
    """Does the handshakes of outgoing connections, each in a thread: the other process may have much to do."""

    def __init__(self, groups: LeaseGroups) -> None:
        self._groups = groups
        self._finished: queue.SimpleQueue[tuple[str, dict[str, Value]]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor that becomes readable when a handshake has ended."""
        return self._wake

    def finished(self) -> list[tuple[str, dict[str, Value]]]:
        """The events to report to the daemon, with their facts, of the handshakes that have ended."""
        found = []
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with suppress(queue.Empty):
            while True:
                found.append(self._finished.get_nowait())
        return found

    def connect(
        self,
        sock: socket.socket,
        shared: list[int],
        address: str | None,
        ca: str | None,
        link_id: bytes,
        link_key: bytes,
        group: bytes,
        rank: int,
    ) -> None:
        """Take over a socket to the process of the lease that has `rank` in a group, with the descriptors of
        `link_memory` or none; see `operations.TENANT`."""

        def run() -> None:
            memory = _memory(self._groups, group, shared, self._report, connects=True)
            direct = _direct(self._groups, memory, self._report)
            try:
                channel = _greeted(sock, address, ca, link_id, link_key)
                self._join(channel, group, rank, memory, direct)
                done: tuple[str, dict[str, Value]] = ("linked", {})
            except WarpbusError as error:
                sock.close()
                self._groups.discard(direct)
                done = ("failed", error_value(error))
            self._report(*done)

        threading.Thread(target=run, name="link", daemon=True).start()

    def _report(self, event: str, facts: dict[str, Value]) -> None:
        self._finished.put((event, facts))
        os.eventfd_write(self._wake, 1)

    def _join(
        self, channel: Channel, group: bytes, rank: int, memory: LinkMemory | None, direct: DeviceLink | None
    ) -> None:
        found = self._groups.get(group)
        own = found.membership
        if not 0 <= rank < own.rank:
            raise StateError(f"rank {own.rank} connects to the ranks below it, not to rank {rank}")
        hello: dict[str, Value] = {"protocol": PROTOCOL, "link": group, "rank": own.rank, "to": rank, "size": own.size}
        hello["memory"] = memory is not None
        try:
            channel.send(Kind.HELLO, 0, encode(hello))
            frame = channel.receive(_SECONDS_TO_ANSWER, most=MAX_HELLO)
            if frame is None:
                raise ConnectionLostError(f"the process of rank {rank} does not answer")
            if frame.kind is Kind.REFUSED:
                raise _refusal(sent_error(decode_dict(frame.payload)))
            if frame.kind is not Kind.WELCOME:
                raise ProtocolError(f"the process of rank {rank} greets with a {frame.kind.name} frame")
            memory = memory if decode_dict(frame.payload).get("memory") is True else None
            direct = None if memory is None else _opened(self._groups, direct, self._report)
            found.link(rank, channel, memory, direct, self._groups.streams)
        except BaseException:
            channel.close()
            raise


def _greeted(sock: socket.socket, address: str | None, ca: str | None, link_id: bytes, link_key: bytes) -> Channel:
    """A channel over the socket, once the other lease's daemon has let it through."""
    if address is None:
        return Channel(sock, "the process of the other lease")
    where = read_address(address)
    context = context_for(where, None if ca is None else Tls(Path(ca)))
    return begin(sock, where, link_id, link_key, context, time.monotonic() + HANDSHAKE_SECONDS)


def _refusal(error: WarpbusError) -> WarpbusError:
    """The other machine's daemon does not know a lease with this key: its answer concerns no lease of ours."""
    if not isinstance(error, LeaseLostError):
        return error
    return AuthorizationError("the other lease's machine does not accept the link key, or the lease has ended")


def _memory(
    groups: LeaseGroups, group: bytes, shared: list[int], report: Report, *, connects: bool
) -> LinkMemory | None:
    """See `LeaseGroups.memory`. If it cannot be had, this is reported to the daemon, and the result is None."""
    try:
        return groups.memory(shared, connects=connects)
    except DeviceError as error:
        with suppress(StateError):
            groups.get(group)  # the link to a group that the lease is not in is refused
            report("unshared", {"group": group, "why": str(error)})
        return None


def _direct(groups: LeaseGroups, memory: LinkMemory | None, report: Report) -> DeviceLink | None:
    """See `LeaseGroups.direct`. If it cannot be had, this is reported to the daemon, and the result is None."""
    try:
        return groups.direct(memory)
    except DeviceError as error:
        report("indirect", {"why": str(error)})
        return None


def _opened(groups: LeaseGroups, direct: DeviceLink | None, report: Report) -> DeviceLink | None:
    """The link of two GPUs once the other process's slots are open here; else None, which is reported."""
    try:
        if direct is not None and direct.open(groups.streams()[0]):
            return direct
    except DeviceError as error:
        report("indirect", {"why": str(error)})
    groups.discard(direct)
    return None


def admit(channel: Channel, hello: dict[str, Any], groups: LeaseGroups, shared: list[int], report: Report) -> None:
    """Handle a HELLO of another lease's process: connect it to its group, or refuse it.

    Both use the memory of which `shared` are the descriptors, if both could map it.

    Args:
        channel: the connection.
        hello: what came.
        groups: of this lease.
        shared: descriptors of `link_memory`, or none.
        report: reports an event to the daemon.
    """
    group, rank, size = hello.get("link"), hello.get("rank"), hello.get("size")
    memory = None
    if hello.get("memory") is True and isinstance(group, bytes):
        memory = _memory(groups, group, shared, report, connects=False)
    else:
        link_memory.close(shared)
    direct = _opened(groups, _direct(groups, memory, report), report)
    try:
        if hello.get("protocol") != PROTOCOL or not isinstance(group, bytes) or type(rank) is not int:
            raise ProtocolError(f"this pool speaks protocol {PROTOCOL}: use one version of Warpbus")
        found = groups.get(group)
        own = found.membership
        if (hello.get("to"), size) != (own.rank, own.size) or not own.rank < rank < own.size:
            raise StateError(f"rank {own.rank} of {own.size} is not what rank {rank} of {size} wants to connect to")
        found.link(rank, channel, memory, direct, groups.streams)
        channel.send(Kind.WELCOME, 0, encode({"protocol": PROTOCOL, "memory": memory is not None}))
    except WarpbusError as error:
        groups.discard(direct)
        refuse(channel, error)

"""Messages between a machine's daemon and the processes of its tenants, over one Unix socket pair per process.

A message is one datagram of a `SOCK_SEQPACKET` socket: a request (`messages`). It gets no answer; the process reports
events by requests in the other direction. It can carry file descriptors (unix(7), SCM_RIGHTS).
"""

import os
import socket
from collections.abc import Mapping
from typing import Any

from warpbus.errors import ConnectionLostError, ProtocolError, WarpbusError
from warpbus.pool.protocol.messages import Operation, Request, decode_request, encode_request

MAX_MESSAGE = 128 << 10  # below Linux's default limit of a datagram (net.core.wmem_default)
_MAX_DESCRIPTORS = 4


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, operation: str, arguments: Mapping[str, Any], *sockets: socket.socket) -> None:
    """Send a request, and the other end's own descriptors of `sockets`.

    Raises:
        ConnectionLostError: the other end is gone.
        ProtocolError: the message is longer than `MAX_MESSAGE`.
    """
    data = encode_request(operation, arguments)
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"a message of {len(data)} bytes to a process of the pool: at most {MAX_MESSAGE}")
    try:
        socket.send_fds(end, [data], [each.fileno() for each in sockets])
    except OSError as error:
        raise ConnectionLostError(f"the other process of the pool is gone: {error}") from None


def receive(end: socket.socket, operations: Mapping[str, Operation]) -> tuple[Request, list[int]]:
    """The next request, which is one of `operations`, and the descriptors that came with it, which are the caller's.

    Raises:
        ConnectionLostError: the other end is gone.
        ProtocolError: the received bytes are no message.
        UsageError: it is none of `operations`, or has other arguments.
    """
    try:
        data, descriptors, flags, _ = socket.recv_fds(end, MAX_MESSAGE, _MAX_DESCRIPTORS)
    except OSError as error:
        raise ConnectionLostError(f"the other process of the pool is gone: {error}") from None
    try:
        if not data:
            raise ConnectionLostError("the other process of the pool has closed the connection")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ProtocolError(f"a message between processes of the pool is longer than {MAX_MESSAGE} bytes")
        request = decode_request(data, operations)
    except WarpbusError:
        for each in descriptors:
            os.close(each)
        raise
    return request, descriptors

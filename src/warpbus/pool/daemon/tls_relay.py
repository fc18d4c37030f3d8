"""TLS of leases' connections: done by the daemon, so that no process that executes for a tenant holds the TLS key.

A lease's process gets one end of a pair of Unix sockets in place of the client's socket. A thread per connection does
the TLS handshake and carries bytes between the other end and the client. It understands none of them.
"""

import select
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path

from warpbus.errors import UsageError
from warpbus.pool.protocol.channel import HANDSHAKE_SECONDS
from warpbus.pool.protocol.sockets import server_context, tune

_BUFFER = 2**18


def relay(
    sock: socket.socket, inner: socket.socket, certificate: Path, key: Path, seconds: float = HANDSHAKE_SECONDS
) -> None:
    """Begin to serve TLS on a connection.

    Args:
        sock: to the client; becomes the relay's own.
        inner: the other end of the pair of which the lease's process has one; becomes the relay's own. It ends when the
            client's connection does, and the other way round.
        certificate, key: PEM files, read now.
        seconds: in which the client has to finish the handshake.

    Raises:
        UsageError: certificate and key cannot be used; both sockets are closed.
    """
    try:
        context = server_context(certificate, key)
    except UsageError:
        sock.close()
        inner.close()
        raise
    threading.Thread(target=_serve, args=(sock, inner, context, seconds), name="TLS relay", daemon=True).start()


def _serve(sock: socket.socket, inner: socket.socket, context: ssl.SSLContext, seconds: float) -> None:
    with inner, sock:
        try:
            sock.settimeout(seconds)
            tune(sock)
            tune(inner)
            outer = context.wrap_socket(sock, server_side=True)
        except OSError:  # the client did not do its part
            return
        with outer:
            outer.setblocking(False)
            inner.setblocking(False)
            with suppress(OSError):
                _carry(outer, inner)


def _carry(outer: ssl.SSLSocket, inner: socket.socket) -> None:
    """Carry bytes both ways until one side has ended and the other has got all of them. Raises OSError."""
    ways = _Way(outer, inner), _Way(inner, outer)
    while not any(way.ended for way in ways):
        moved = [way.step() for way in ways]
        if any(moved):
            continue
        wanted: dict[int, int] = {}
        for way in ways:
            descriptor, event = way.needs
            wanted[descriptor] = wanted.get(descriptor, 0) | event
        poll = select.poll()
        for descriptor, event in wanted.items():
            poll.register(descriptor, event)
        poll.poll()


class _Way:
    """One direction: what was read of `source` and not yet written to `sink`.

    Attributes:
        ended: the source has ended, and the sink has all that came of it.
        needs: the descriptor and the event that it waits for, after a `step` that did nothing.
    """

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.ended = False
        self.needs = (source.fileno(), select.POLLIN)
        self._source = source
        self._sink = sink
        self._buffer = memoryview(bytearray(_BUFFER))
        self._left = self._buffer[:0]

    def step(self) -> bool:
        """Move some bytes, without waiting. False if that is not possible now. Raises OSError."""
        sock, event = (self._sink, select.POLLOUT) if self._left else (self._source, select.POLLIN)
        try:
            if self._left:
                self._left = self._left[self._sink.send(self._left) :]
            else:
                self._left = self._buffer[: self._source.recv_into(self._buffer)]
                self.ended = not self._left
        except BlockingIOError:
            self.needs = (sock.fileno(), event)
            return False
        except ssl.SSLWantReadError:
            self.needs = (sock.fileno(), select.POLLIN)
            return False
        except ssl.SSLWantWriteError:
            self.needs = (sock.fileno(), select.POLLOUT)
            return False
        return True

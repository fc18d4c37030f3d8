"""A channel: a connected socket (TCP, TLS or Unix) that carries frames, and how both sides come to have one.

A connection opens with a `preamble` in plain text. The daemon reads it and does TLS; where a lease is wanted, frames go
on to that lease's process.

A channel blocks, and may have one thread that sends and one that receives at the same time. It knows nothing of what
frames mean.
"""

import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from warpbus.errors import AuthorizationError, ConnectionLostError, UsageError
from warpbus.pool.protocol.address import Address
from warpbus.pool.protocol.frames import HEADER, MAX_FRAME, Frame, Kind, pack_header, parse_header
from warpbus.pool.protocol.preamble import CONTROL, LEASE_BYTES, MAGIC, NONCE_BYTES, mac_of
from warpbus.pool.protocol.sockets import (
    Tls,
    client_context,
    connected,
    left,
    name_of,
    ready,
    reason,
    tune,
)

HANDSHAKE_SECONDS = 10.0
SPIN_SECONDS = 1e-4
"""How long a side that expects a frame looks for it before it sleeps, see `Channel.spin`."""
STALL_SECONDS = 30.0  # without a byte in the middle of a frame

_GIVEN_UP = "a frame was given up halfway, and with it the connection to"
_IN = select.POLLIN
_OUT = select.POLLOUT
_OTHER_NAME = frozenset({62, 64})  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
_HEADER_BYTES = HEADER.size
_READ_AHEAD = 2**16  # small frames come several at a time
_MOST_IN_VAIN = 6
_JOINED = 2**14  # parts up to this are copied together: one call, or one TLS record, in place of several
_MOST_PARTS = 1024  # of one sendmsg: IOV_MAX

_Buffer = bytes | bytearray | memoryview


class Channel:
    """Frames over a connected socket, which becomes the channel's own.

    Attributes:
        before_waiting: called each time before it waits for the other side, in `send` or `receive`; or None.
    """

    before_waiting: Callable[[], None] | None = None

    def __init__(self, sock: socket.socket, peer: str | None = None) -> None:
        """`peer` is what messages call the other side; by default its IP address."""
        self.peer = peer or name_of(sock)
        sock.setblocking(False)
        tune(sock)
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        # Held for the moment of one call that does not block: no other thread closes the descriptor meanwhile, and of
        # OpenSSL's objects only one call may run at a time.
        self._reading = threading.RLock()
        self._writing = self._reading if self._tls else threading.RLock()
        # Set while bytes move. Where an exception, such as KeyboardInterrupt, leaves one of them set, a part of a frame
        # may be lost, and nobody could understand what follows.
        self._sending = False
        self._receiving = False
        self._held: list[_Buffer] = []  # frames that go out with the next one
        self._held_bytes = 0
        self._in_vain = 0  # times in a row that spinning was
        self._skipped = 0  # waits that do not spin, yet
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._lost: str | None = None  # why there is nothing more to receive
        self._deaf: str | None = None  # why the other side takes nothing more
        self._ahead = memoryview(bytearray(_READ_AHEAD))
        self._start = 0  # of what is read and not yet given out
        self._end = 0
        self._large: tuple[Kind, int, memoryview] | None = None  # a frame on its way into memory of its own
        self._filled = 0
        self._progress = time.monotonic()

    def send(self, kind: Kind, number: int = 0, *payload: _Buffer, more: bool = False) -> None:
        """Send a frame with these buffers, one after the other, as payload; waits as long as the other side does.

        With `more` another frame follows at once, and both are sent together; the buffers must not change until then.

        Raises:
            ConnectionLostError: the other side is gone. What it had sent before can still be received.
            ProtocolError: the payload is more than `MAX_FRAME`.
        """
        nbytes = 0
        for part in payload:
            nbytes += part.nbytes if part.__class__ is memoryview else len(part)
        header = pack_header(kind, number, nbytes)
        if self._deaf is not None:
            raise ConnectionLostError(self._deaf)
        if self._sending:
            raise self._fail(f"{_GIVEN_UP} {self.peer}")
        self._held += (header, *payload)
        self._held_bytes += _HEADER_BYTES + nbytes
        if more:
            return
        self._sending = True
        held, self._held = self._held, []
        nbytes, self._held_bytes = self._held_bytes, 0
        if nbytes <= _JOINED:
            data = b"".join(held)
            sent = self._attempt(self._sock.send, data, _OUT)
            if sent < nbytes:
                self._send_rest([memoryview(data)], sent)
        else:
            parts = _joined([memoryview(each).cast("B") for each in held if len(each)])
            self._send_rest(parts, self._attempt(self._write, parts, _OUT))
        self._sending = False

    def _send_rest(self, parts: list[memoryview], sent: int) -> None:
        """Send what is left of the parts, after an attempt that sent so many bytes, or minus the event it waits for."""
        while True:
            if sent < 0:
                self._wait(-sent, math.inf)
            while sent > 0 and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if not parts:
                return
            if sent > 0:
                parts[0] = parts[0][sent:]
            sent = self._attempt(self._write, parts, _OUT)

    def offer(self, kind: Kind, number: int = 0, *payload: _Buffer) -> bool:
        """Send a small frame if the other side takes it without being waited for; returns whether it was sent.

        Raises:
            ConnectionLostError: as `send`.
        """
        if self._sending or self._lost is not None or not ready(self._sock, select.POLLOUT, 0.0):
            return False
        self.send(kind, number, *payload)
        return True

    def receive(self, timeout: float | None = None, *, most: int = MAX_FRAME) -> Frame | None:
        """The next frame, or None if it is not complete after `timeout` seconds; what has come of it is kept.

        Raises:
            ConnectionLostError: the peer is gone, or stops in the middle of a frame.
            FrameError: it sends something that is no frame, or a frame with a payload of more than `most` bytes.
        """
        if (frame := self._next(most)) is not None:
            return frame
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._fill(deadline):
            if (frame := self._next(most)) is not None:
                return frame
        return None

    def pending(self) -> bool:
        """Whether `receive` finds something at once: a frame, bytes at the socket or within TLS, or the end."""
        if self._large is None and self._end - self._start >= HEADER.size:
            try:
                nbytes, _, _ = self._header()
            except ConnectionLostError:
                return True
            if self._end - self._start >= HEADER.size + nbytes:
                return True
        with self._reading:
            if self._lost is not None or (self._tls and self._sock.pending()):  # type: ignore[attr-defined]
                return True
        return bool(self._readable.poll(0))

    def fileno(self) -> int:
        """For `select`; ask `pending` before, which knows what was read already."""
        return self._sock.fileno()

    def close(self) -> None:
        """End the connection; a thread that waits on it gets ConnectionLostError."""
        self._fail(f"the connection to {self.peer} is closed")

    def abandon(self, why: str) -> None:
        """In a forked child: close this process's descriptor alone. The parent's connection goes on."""
        self._lost = self._deaf = why
        self._reading = self._writing = threading.RLock()  # another thread of the parent may have held one
        self._sock.close()

    def _next(self, most: int) -> Frame | None:
        """The next frame if all of it is here; a large one's header moves it to memory of its own."""
        if self._large is not None:
            kind, number, payload = self._large
            if self._filled < len(payload):
                return None
            self._large = None
            return Frame(kind, number, payload)
        begin = self._start + _HEADER_BYTES
        if self._end < begin:
            return None
        nbytes, kind, number = self._header(most)
        end = begin + nbytes
        if end <= self._end:
            self._start = end
            # A copy, because the next frames come to the same place.
            return Frame(kind, number, memoryview(bytearray(self._ahead[begin:end])))
        if HEADER.size + nbytes > _READ_AHEAD:
            payload = np.empty(nbytes, dtype=np.uint8).data  # not zeroed: all of it is written
            self._filled = self._end - begin
            payload[: self._filled] = self._ahead[begin : self._end]
            self._start = self._end = 0
            self._large = kind, number, payload
        return None

    def _header(self, most: int = MAX_FRAME) -> tuple[int, Kind, int]:
        try:
            return parse_header(self._ahead, self.peer, most, self._start)
        except ConnectionLostError as error:
            raise self._fail(str(error)) from None

    def _fill(self, deadline: float | None) -> bool:
        """Read what there is of the next bytes; False if there was nothing until the deadline."""
        if self._lost is not None:
            raise ConnectionLostError(self._lost)
        if self._receiving:
            raise self._fail(f"{_GIVEN_UP} {self.peer}")
        target = self._space()
        within = self._large is not None or self._end > 0
        stall = self._progress + STALL_SECONDS if within else math.inf
        until = stall if deadline is None else min(deadline, stall)
        if deadline is None and not self.spin(SPIN_SECONDS):
            self._wait(_IN, until - time.monotonic())
        while True:
            self._receiving = True
            received = self._attempt(self._sock.recv_into, target, _IN)
            if received >= 0:
                break
            self._receiving = False
            if not self._wait(-received, until - time.monotonic()):
                if time.monotonic() >= stall:
                    raise self._fail(f"{self.peer} sent nothing for {STALL_SECONDS:.0f} s in the middle of a frame")
                return False
        if received == 0:
            raise self._fail(f"{self.peer} closed the connection{' in the middle of a frame' if within else ''}")
        if self._large is not None:
            self._filled += received
        else:
            self._end += received
        self._progress = time.monotonic()
        self._receiving = False
        return True

    def spin(self, seconds: float) -> bool:
        """Wait for bytes at the socket without sleeping, and return whether there are any.

        A thread that sleeps is woken later than a frame takes over the loopback. Where this was in vain, as on a busy
        machine, whose processors others need, or for a long computation, the next waits do without it: twice as many
        each time, up to 63.
        """
        poll = self._readable.poll
        if poll(0) or self._lost is not None or (self._tls and self._sock.pending()):  # type: ignore[attr-defined]
            return True
        if self._skipped:
            self._skipped -= 1
            return False
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if poll(0) or self._lost is not None:
                self._in_vain = 0
                return True
        self._in_vain = min(self._in_vain + 1, _MOST_IN_VAIN)
        self._skipped = (1 << self._in_vain) - 1
        return False

    def _wait(self, event: int, seconds: float) -> bool:
        """Wait until the socket is ready, and return whether it is."""
        if seconds <= 0:
            return False  # it was not, a moment ago
        if self.before_waiting is not None:
            self.before_waiting()
        if event != _IN:
            return ready(self._sock, event, seconds)
        if self._lost is not None:
            return True
        return bool(self._readable.poll(None if seconds == math.inf else math.ceil(seconds * 1000)))

    def _space(self) -> memoryview:
        """Where the next bytes go."""
        if self._large is not None:
            return self._large[2][self._filled :]
        rest = self._end - self._start
        if not rest:
            self._start = self._end = 0
            return self._ahead
        if self._start:
            self._ahead[:rest] = bytes(self._ahead[self._start : self._end])
            self._start, self._end = 0, rest
        return self._ahead[rest:]

    def _write(self, parts: list[memoryview]) -> int:
        if self._tls or len(parts) == 1:
            return self._sock.send(parts[0])
        return self._sock.sendmsg(parts[:_MOST_PARTS])

    def _attempt(self, call: Callable[[Any], int], buffers: Any, event: int) -> int:
        """Bytes that the call moved, or minus the event that it needs first. ConnectionLostError if it never will."""
        try:
            with self._reading if event == _IN else self._writing:
                return call(buffers)
        except BlockingIOError:
            return -event
        except ssl.SSLWantReadError:
            return -select.POLLIN
        except ssl.SSLWantWriteError:
            return -select.POLLOUT
        except OSError as error:
            what = "TLS with" if isinstance(error, ssl.SSLError) else "the connection to"
            lost = ConnectionLostError(self._lost or f"{what} {self.peer} broke ({reason(error)})")
        if event == select.POLLIN:
            raise self._fail(str(lost))
        self._deaf = str(lost)
        raise lost

    def _fail(self, why: str) -> ConnectionLostError:
        """Close the socket, for the first reason that comes."""
        if self._lost is None:
            self._lost = self._deaf = why
            with suppress(OSError):  # it may not be connected any more
                # Wakes a thread that waits. SSLSocket's own method would first let others write what is not encrypted.
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
            with self._reading, self._writing:
                self._sock.close()
        return ConnectionLostError(self._lost)


def connect(
    address: Address,
    lease: bytes | None = None,
    key: bytes = b"",
    tls: Tls | None = None,
    timeout: float = HANDSHAKE_SECONDS,
) -> Channel:
    """Connect to a lease's process, or to the daemon where `lease` is None.

    Args:
        address: of the pool's daemon.
        lease: its 16 bytes.
        key: the lease's secret.
        tls: whom to trust; None means what the address says.
        timeout: seconds for all of it, but for the look-up of the name.

    Raises:
        ConnectionLostError: nobody answers there, or not as a pool does.
        AuthorizationError: the certificate is not trusted, or another host's.
        UsageError: the authorities' file cannot be used.
    """
    if lease is not None and len(lease) != LEASE_BYTES:
        raise UsageError(f"the id of a lease has {LEASE_BYTES} bytes, not {len(lease)}: take it as the pool gave it")
    context = context_for(address, tls)
    deadline = time.monotonic() + timeout
    return begin(connected(address, pool_at(address), deadline), address, lease, key, context, deadline)


def begin(
    sock: socket.socket,
    address: Address,
    lease: bytes | None,
    key: bytes,
    context: ssl.SSLContext | None,
    deadline: float,
) -> Channel:
    """Do the client's side of the preamble and of TLS on a socket that is connected to `address`; see `connect`."""
    peer = pool_at(address)
    try:
        sock.settimeout(left(deadline))
        sock.sendall(MAGIC + (lease or CONTROL))
        if lease is not None:
            sock.sendall(mac_of(key, lease, _exactly(sock, NONCE_BYTES, deadline)))
    except OSError as error:
        sock.close()
        raise ConnectionLostError(f"{peer} does not take the connection ({reason(error)})") from None
    if context is None:
        return Channel(sock, peer)
    try:
        sock.settimeout(left(deadline))
        return Channel(context.wrap_socket(sock, server_hostname=address.host), peer)
    except ssl.SSLCertVerificationError as error:
        sock.close()
        if error.verify_code in _OTHER_NAME:
            raise AuthorizationError(
                f"{peer} has a certificate of another name ({error.verify_message}); give the name that it is for"
            ) from None
        raise AuthorizationError(
            f"{peer} has a certificate that is not trusted ({error.verify_message}); give its authority as ?ca=FILE, "
            "or to a daemon as --authority"
        ) from None
    except OSError as error:
        sock.close()
        raise ConnectionLostError(f"{peer} did not finish a TLS handshake ({reason(error)})") from None


def context_for(address: Address, tls: Tls | None) -> ssl.SSLContext | None:
    """A client's TLS context for the address; None without TLS. UsageError if the authorities cannot be used."""
    return client_context(tls or Tls(address.ca)) if address.transport == "tls" else None


def pool_at(address: Address) -> str:
    """The name of the pool at this address in messages."""
    return f"the pool at {address}"


def _exactly(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    """So many bytes, and none beyond. Raises OSError."""
    found = b""
    while len(found) < nbytes:
        sock.settimeout(left(deadline))
        data = sock.recv(nbytes - len(found))
        if not data:
            raise ConnectionResetError("closed by the other side")
        found += data
    return found


def _joined(parts: list[memoryview]) -> list[memoryview]:
    """The same bytes, small parts that stand together copied into one."""
    found: list[memoryview] = []
    together: list[memoryview] = []
    size = 0
    for part in parts:
        if size + len(part) > _JOINED and together:
            found.append(together[0] if len(together) == 1 else memoryview(b"".join(together)))
            together, size = [], 0
        together.append(part)
        size += len(part)
    found.append(together[0] if len(together) == 1 else memoryview(b"".join(together)))
    return found

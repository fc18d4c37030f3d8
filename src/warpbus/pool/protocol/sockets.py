"""Sockets of the pool before they carry frames: how they are opened, tuned, called in messages and waited for; TLS."""

import math
import select
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpbus.errors import ConnectionLostError, NotListeningError, UsageError
from warpbus.pool.protocol.address import Address, is_loopback

_UNIX_BUFFER = 4 * 2**20  # TCP's buffers are left to the kernel, which lets them grow where that helps

# Seconds idle until the first probe, between probes, and how many: a peer that vanished is noticed after 25 s. While
# data is unacknowledged there are no probes, and the kernel would send that again for a quarter of an hour. The last,
# in milliseconds, is for that; it also ends connections whose peer lives and reads nothing, as a busy one may for long.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 300_000}


@dataclass(frozen=True)
class Tls:
    """The authorities that a client trusts: those in the file `ca`, or the system's if it is None."""

    ca: Path | None = None


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 or later with this certificate. UsageError if certificate and key cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # nobody resumes sessions
    try:
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:
        raise UsageError(
            f"{certificate} and {key} cannot be used as certificate and key ({reason(error)}); give two PEM files, "
            "the key without a password"
        ) from None
    return context


def client_context(tls: Tls) -> ssl.SSLContext:
    """TLS 1.2 or later that checks certificates and names. UsageError if the authorities' file cannot be used."""
    try:
        context = ssl.create_default_context(cafile=tls.ca)
    except OSError as error:
        raise UsageError(f"{tls.ca} holds no authorities to trust ({reason(error)}); give a PEM file") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def connected(address: Address, peer: str, deadline: float) -> socket.socket:
    """A socket connected to the first of the host's addresses that answers.

    Raises:
        NotListeningError: all of them refuse the connection.
        ConnectionLostError: none answers until the deadline.
    """
    failed: Exception = OSError(f"{address.host} has no address of this machine")
    refused = []
    try:
        for family, target in _targets(address):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(left(deadline))
                sock.connect(target)
                return sock
            except OSError as error:
                sock.close()
                failed = error
                refused.append(isinstance(error, ConnectionRefusedError | FileNotFoundError))
    except (OSError, UnicodeError) as error:  # of the look-up
        failed = error
    kind = NotListeningError if refused and all(refused) else ConnectionLostError
    raise kind(f"{peer} cannot be reached ({reason(failed)}); is `warpbus pool serve` running there?")


def _targets(address: Address) -> list[tuple[int, Any]]:
    if address.transport == "unix":
        return [(socket.AF_UNIX, address.path)]
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    # Unencrypted data stays on this machine, whatever its files say about its names.
    return [(info[0], info[4]) for info in found if address.transport == "tls" or is_loopback(str(info[4][0]))]


def left(deadline: float) -> float:
    """Seconds until then. TimeoutError if there are none; 0 would mean not to block at all."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


def ready(sock: socket.socket, event: int, seconds: float) -> bool:
    """Whether the event, an error or the end comes within so many seconds, which may be infinity."""
    poll = select.poll()
    try:
        poll.register(sock, event)
    except (OSError, ValueError):
        return True  # closed by another thread: the next call on it says so
    return bool(poll.poll(None if math.isinf(seconds) else max(0, math.ceil(seconds * 1000))))


def hung_up(sock: Any) -> bool:
    """Whether the other side of a socket has closed it, or will send nothing more."""
    poll = select.poll()
    try:
        poll.register(sock, select.POLLRDHUP)
    except (OSError, ValueError):
        return True
    return bool(poll.poll(0))


def tune(sock: socket.socket) -> None:
    """Small frames go out at once, and a peer that vanished is noticed."""
    if sock.family == socket.AF_UNIX:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _UNIX_BUFFER)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # not every system has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def name_of(sock: socket.socket) -> str:
    """The name of the other side in messages."""
    try:
        peer = sock.getpeername()
    except OSError:
        return "a client that is gone"
    if sock.family == socket.AF_UNIX:
        return "a client at the Unix socket"
    return f"{peer[0]} port {peer[1]}"


def reason(error: Exception) -> str:
    """The message of an error in one line, without its number."""
    text = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split()).replace("_", " ").lower() if isinstance(error, ssl.SSLError) else str(text)

"""Addresses of pools: `warpbus://host:7700`."""

import os
import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from warpbus.errors import UsageError

DEFAULT_PORT = 7700

_FORMS = "warpbus://localhost:7700, warpbuss://host:7700 (TLS) or warpbus+unix:///path"
_TRANSPORTS: dict[str, Literal["plain", "tls", "unix"]] = {
    "warpbus": "plain",
    "warpbuss": "tls",
    "warpbus+unix": "unix",
}
_SCHEMES = {transport: scheme for scheme, transport in _TRANSPORTS.items()}
_HOST = re.compile(r"[\w.:%-]+")
_MOST_PATH = 107  # bytes of a Unix socket's path, unix(7)


@dataclass(frozen=True)
class Address:
    """The address of a pool or of one of its tenant processes; `str` gives the form that `address` reads.

    Attributes:
        transport: "plain" (TCP, to this machine alone), "tls" (TCP) or "unix".
        host: name or IP address, without brackets; empty for Unix sockets.
        port: of TCP; 0 for Unix sockets.
        path: of the Unix socket, or empty.
        ca: file with the authorities to trust in place of the system's, or None.
    """

    transport: Literal["plain", "tls", "unix"]
    host: str = ""
    port: int = 0
    path: str = ""
    ca: Path | None = None

    def __str__(self) -> str:
        scheme = _SCHEMES[self.transport]
        if self.transport == "unix":
            return f"{scheme}://{quote(self.path)}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        trust = f"?ca={quote(str(self.ca))}" if self.ca else ""
        return f"{scheme}://{host}:{self.port}{trust}"


def address(text: str) -> Address:
    """Read `warpbus://host[:port]`, `warpbuss://host[:port][?ca=FILE]` or `warpbus+unix:///path`.

    IPv6 addresses stand in brackets; the port is 7700 where none is given.

    Raises:
        UsageError: it has none of these forms, or is `warpbus://` to another machine, which needs TLS.
    """
    try:
        parts = urlsplit(text)
        port = parts.port  # reads it only now
    except ValueError as error:
        raise UsageError(f"{text}: no address of a pool ({error}); give {_FORMS}") from None
    transport = _TRANSPORTS.get(parts.scheme)
    if transport is None:
        raise UsageError(f"{text}: no address of a pool; give {_FORMS}")
    if "@" in parts.netloc or parts.fragment:
        raise UsageError(f"{text}: an address has no user and no fragment; give {_FORMS}")
    if transport == "unix":
        return _unix(text, parts)
    if not parts.hostname or not _HOST.fullmatch(parts.hostname) or parts.path not in ("", "/") or port == 0:
        raise UsageError(f"{text}: no host and port of a pool; give {_FORMS}")
    ca = _ca(text, parts, transport)
    if transport == "plain" and not is_loopback(parts.hostname):
        raise UsageError(
            f"{text}: connections to other machines are encrypted; give warpbuss://{parts.netloc} and start the pool "
            "there with a certificate"
        )
    return Address(transport, parts.hostname, port or DEFAULT_PORT, ca=ca)


def is_loopback(host: str) -> bool:
    """Whether a name or IP address means this machine: localhost (RFC 6761), 127.0.0.0/8 or ::1."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        found = ip_address(host)
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback


def _unix(text: str, parts: SplitResult) -> Address:
    path = unquote(parts.path)
    if parts.netloc or parts.query or not path.startswith("/"):
        raise UsageError(f"{text}: no path of a Unix socket; give warpbus+unix:///path")
    if "\0" in path or len(os.fsencode(path)) > _MOST_PATH:
        raise UsageError(f"{text}: the path of a Unix socket has at most {_MOST_PATH} bytes")
    return Address("unix", path=path)


def _ca(text: str, parts: SplitResult, transport: str) -> Path | None:
    options = parse_qsl(parts.query, keep_blank_values=True)
    if not options:
        return None
    if transport != "tls" or [name for name, _ in options] != ["ca"] or not options[0][1]:
        raise UsageError(f"{text}: no such option of an address; give warpbuss://{parts.netloc}?ca=FILE")
    return Path(os.path.expanduser(options[0][1]))

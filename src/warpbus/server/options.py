"""How a server listens, whom it answers, and how much of anything it takes."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from warpbus.errors import UsageError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        host, port: where it listens; port 0 takes a free one.
        api_keys: one of them is needed for every route but GET /health and the chat page's files; none asks for none.
        share_prefixes: requests share what is stored of prompts that begin alike, whatever their key; else those with
            different keys share nothing.
        ssl_certfile, ssl_keyfile: PEM files, with which it speaks TLS.
        insecure: listen beyond this machine also without a key or without TLS.
        allow_origins: web origins (`https://example.com`) whose pages may call the API; "*" is all.
        allowed_hosts: further names by which requests may call a server that listens on loopback.
        max_body_bytes: of a request.
        max_n: answers a prompt.
        max_tokens: the most that a request may ask for; None leaves it to the context.
        max_schema_bytes: of a JSON schema, regular expression, list of choices, or of all tools.
        max_connections: open at the same time.
        request_timeout: seconds that an answer may take.
        body_timeout: seconds in which a request, and each piece of an answer, has to pass.
        heartbeat: seconds without news after which a stream gets a comment line.
        shutdown_timeout: seconds that running requests get once the server has to end.

    Raises:
        UsageError: a value is out of range, files are missing, or the server would be open to everybody.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    share_prefixes: bool = False
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    insecure: bool = False
    allow_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 2 << 20
    max_n: int = 16
    max_tokens: int | None = None
    max_schema_bytes: int = 64 << 10
    max_connections: int = 1024
    request_timeout: float = 3600.0
    body_timeout: float = 60.0
    heartbeat: float = 15.0
    shutdown_timeout: float = 30.0

    def __post_init__(self) -> None:
        for name, least in (("port", 0), ("max_body_bytes", 1), ("max_n", 1), ("max_connections", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{_flag(name)} is {getattr(self, name)}: give {least} or more")
        if self.port > 65535:
            raise UsageError(f"--port is {self.port}: give at most 65535")
        for name in ("request_timeout", "body_timeout", "heartbeat", "shutdown_timeout"):
            if not 0 < getattr(self, name) < 1e9:
                raise UsageError(f"{_flag(name)} is {getattr(self, name)}: give seconds, more than 0")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"--max-tokens is {self.max_tokens}: give 1 or more")
        for key in self.api_keys:
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                raise UsageError("--api-key: a key has 8 or more printable ASCII characters without spaces")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise UsageError("--ssl-certfile and --ssl-keyfile go together: give both")
        for origin in self.allow_origins:
            if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.count("/") != 2):
                raise UsageError(f"--allow-origin {origin}: give an origin such as https://example.com, or *")
        if "*" in self.allow_origins and not self.api_keys:
            raise UsageError("--allow-origin * lets every web page use the server: give an --api-key with it")
        if not self.loopback and not self.insecure and not (self.api_keys and self.tls):
            raise UsageError(
                f"--host {self.host} can be reached from other machines: give --api-key, --ssl-certfile and "
                "--ssl-keyfile, or --insecure if everybody may use it and read along"
            )

    @property
    def tls(self) -> bool:
        """It speaks TLS."""
        return self.ssl_certfile is not None

    @property
    def loopback(self) -> bool:
        """Only this machine reaches it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check_tls(self) -> None:
        """Raises UsageError if certificate and key cannot be used."""
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            return
        for name, path in (("--ssl-certfile", self.ssl_certfile), ("--ssl-keyfile", self.ssl_keyfile)):
            if not path.is_file():
                raise UsageError(f"{name} {path}: there is no such file; give a PEM file")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            raise UsageError(
                f"--ssl-certfile {self.ssl_certfile}: cannot be used with {self.ssl_keyfile} ({error}); give a PEM "
                "certificate and its key, without a password"
            ) from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

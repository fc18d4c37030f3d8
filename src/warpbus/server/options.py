"""The options of a server: its address, access control and limits."""

from __future__ import annotations

import ipaddress
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from warpbus.errors import UsageError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        host, port: the address to listen on; port 0 takes a free one.
        api_keys: every route except for GET /health, /ready and the chat page's files requires one of them; empty: no
            key.
        share_prefixes: requests with different API keys share the prefix cache.
        ssl_certfile, ssl_keyfile: PEM files, for TLS.
        insecure: allow other hosts to connect without a key or without TLS.
        allow_origins: web origins (`https://example.com`) whose pages may call the API; "*" is all.
        allowed_hosts: further host names that requests to a server on loopback may use.
        max_body_bytes: the most bytes of a request body.
        max_n: the most answers per prompt.
        max_tokens: the most tokens that a request may ask for; None: limited by the context only.
        max_schema_bytes: of a JSON schema, regular expression, list of choices, or of all tools.
        max_connections: the most open connections.
        request_timeout: the most seconds for an answer.
        body_timeout: the most seconds for receiving a request body, and without a client reading of its answer.
        heartbeat: after so many seconds without data a stream gets a comment line.
        shutdown_timeout: how many seconds running requests get at shutdown.
        max_stored_responses: how many responses of /v1/responses are kept, to be continued by their id; 0: none.
        adapter_dirs: directories below which POST /v1/load_lora_adapter may load adapters; empty: nowhere.
        log_format: "text", or "json" for one JSON object per line.
        otlp_endpoint: the URL of an OpenTelemetry collector for traces (OTLP over HTTP); None: there are no traces.
        root_path: a prefix such as "/llm" that a proxy leaves in the paths of requests; others are served, too.
        strict: refuse requests with unknown fields; otherwise they are ignored with a warning.

    Raises:
        UsageError: a value is out of range, files are missing, or anyone could connect without a key or TLS.
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
    max_stored_responses: int = 256
    adapter_dirs: tuple[str, ...] = ()
    log_format: Literal["text", "json"] = "text"
    otlp_endpoint: str | None = None
    root_path: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("port", 0),
            ("max_body_bytes", 1),
            ("max_n", 1),
            ("max_connections", 1),
            ("max_stored_responses", 0),
        ):
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
                raise UsageError(
                    "--api-key, --api-key-file or WARPBUS_API_KEY: a key has 8 or more printable ASCII characters "
                    "without spaces"
                )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise UsageError("--ssl-certfile and --ssl-keyfile go together: give both")
        for origin in self.allow_origins:
            if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.count("/") != 2):
                raise UsageError(f"--allow-origin {origin}: give an origin such as https://example.com, or *")
        if self.root_path is not None and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", self.root_path):
            raise UsageError(f"--root-path {self.root_path}: give a path such as /llm, without a slash at its end")
        if self.log_format not in ("text", "json"):
            raise UsageError(f"--log-format is {self.log_format!r}: give text or json")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise UsageError(
                f"--otlp-endpoint {self.otlp_endpoint}: give a URL such as http://127.0.0.1:4318/v1/traces"
            )
        for directory in self.adapter_dirs:
            if not Path(directory).is_dir():
                raise UsageError(f"--adapter-dir {directory}: there is no such directory; give one with adapters")
        if "*" in self.allow_origins and not self.api_keys:
            raise UsageError("--allow-origin * lets every web page use the server: give an --api-key with it")
        if not self.loopback and not self.insecure and not (self.api_keys and self.tls):
            raise UsageError(
                f"--host {self.host} can be reached from other machines: give --api-key, --ssl-certfile and "
                "--ssl-keyfile, or --insecure to accept unauthenticated and unencrypted connections"
            )

    @property
    def tls(self) -> bool:
        """The server uses TLS."""
        return self.ssl_certfile is not None

    @property
    def loopback(self) -> bool:
        """The server listens on loopback only."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check_tls(self) -> None:
        """Raises UsageError if certificate or key is invalid."""
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

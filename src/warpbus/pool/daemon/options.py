"""The options of a daemon: addresses, access and limits."""

import re
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from warpbus.errors import UsageError
from warpbus.pool.broker.request_checks import MOST_OVERSUBSCRIBED
from warpbus.pool.protocol.address import DEFAULT_PORT, Address, is_loopback
from warpbus.pool.protocol.sockets import server_context

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)

Sharing = Literal["auto", "mps", "slices"]


def _this_machine() -> str:
    return re.sub(r"[^\w.-]", "-", socket.gethostname())[:64] or "host"


@dataclass(frozen=True)
class PoolOptions:
    """Options of `warpbus pool serve`.

    Attributes:
        name: of this machine in the pool; its GPUs are name/0, name/1 and so on.
        host, port: where it listens; port 0 takes a free one.
        advertise: the host name that other machines reach it by; None is `host`.
        unix: a socket in the file system where it listens too, which only this user can open.
        certificate, key: PEM files, with which it speaks TLS.
        tokens: file of tokens, see `Tokens.read`; None lets in everybody who reaches it.
        peers: addresses of daemons, of whose pool this machine becomes a part as soon as one of them is there. Without
            any, the pool begins here: this machine has its broker.
        peer_token: an admin's, for the peers.
        authority: PEM file that the certificates of other daemons are checked with; None is the system's.
        directory: where it keeps what has to survive a restart; None is ~/.local/state/warpbus/pool/NAME.
        audit: file of the audit log; None is audit.jsonl in `directory`.
        cluster: Ray's address, "auto" or ray://HOST:PORT, if Ray knows the machines of the pool and keeps its broker.
        checkpoints: directories with checkpoints that leases on this machine may load, see `CheckpointFiles`.
        spare: processes that have loaded torch and wait for a lease.
        grace: seconds without its client after which a lease is reclaimed.
        sandbox: tenants' processes are confined, see `warpbus.pool.tenant.sandbox`.
        gpu_links: leases on two GPUs of this machine exchange a group's bytes from GPU to GPU, see
            `warpbus.pool.tenant.device_link`; else through memory of the host. Experimental.
        sharing: how a GPU is shared: "mps", "slices" of time, or "auto": MPS where there is one.
        cpu_memory: the memory for leases if there is no GPU, such as 8GB or 50%.
        oversubscribe: how many times each GPU's memory and compute are promised to leases. Above 1, leases that have
            nothing to do, or a lower priority, are moved to host memory when others need the GPU.
        swap_memory: host memory for these leases, such as 64GB, or a part of what is free, such as 50%.
        swap_time_slice: seconds that a lease that computes stays before one of the same priority takes its room.
        gpu_memory_reserve: of each GPU, not for leases: contexts and workspaces of their processes go there.
        max_connections: open at the same time.
        max_unfinished: of these, how many may not have said yet who they are. Beyond, the oldest is closed.
        max_unfinished_of_address: the same of one IPv4 address or IPv6 /64.
        max_queued: leases that wait, of all tenants.
        max_asking: connections of one tenant that wait for an answer.
        max_lease_rate: leases that one tenant may ask for in a minute.
        handshake_timeout: seconds in which a connection has to say who it is.
        idle_timeout: seconds after which a silent control connection is closed.

    Raises:
        UsageError: a value is out of range, or the pool would be open to everybody.
    """

    name: str = field(default_factory=_this_machine)
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    advertise: str | None = None
    unix: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    tokens: Path | None = None
    peers: tuple[str, ...] = ()
    peer_token: str | None = field(default=None, repr=False)
    authority: Path | None = None
    directory: Path | None = None
    audit: Path | None = None
    cluster: str | None = None
    checkpoints: tuple[str, ...] = ()
    spare: int = 1
    grace: float = 60.0
    sandbox: bool = True
    gpu_links: bool = False
    sharing: Sharing = "auto"
    cpu_memory: str = "50%"
    gpu_memory_reserve: str = "10%"
    oversubscribe: float = 1.0
    swap_memory: str = "50%"
    swap_time_slice: float = 5.0
    max_connections: int = 1024
    max_unfinished: int = 256
    max_unfinished_of_address: int = 32
    max_queued: int = 256
    max_asking: int = 64
    max_lease_rate: float = 60.0
    handshake_timeout: float = 10.0
    idle_timeout: float = 86400.0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"--name is {self.name!r}: give letters, digits, dots and hyphens, at most 64")
        counts = ("max_connections", "max_unfinished", "max_unfinished_of_address")
        for name, least in (("port", 0), ("spare", 0), *((name, 1) for name in counts)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}: give {least} or more")
        if self.port > 65535:
            raise UsageError(f"--port is {self.port}: give at most 65535")
        if not 0 < self.max_lease_rate < 1e9:
            raise UsageError(f"--max-lease-rate is {self.max_lease_rate}: give leases a minute, more than 0")
        if not 1 <= self.oversubscribe <= MOST_OVERSUBSCRIBED:
            raise UsageError(f"--oversubscribe is {self.oversubscribe}: give 1 to {MOST_OVERSUBSCRIBED:g}")
        for name in ("grace", "handshake_timeout", "idle_timeout", "swap_time_slice"):
            if not 0 < getattr(self, name) < 1e9:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}: give seconds, more than 0")
        if self.sharing not in ("auto", "mps", "slices"):
            raise UsageError(f"--sharing is {self.sharing!r}: give auto, mps or slices")
        if (self.certificate is None) != (self.key is None):
            raise UsageError("--certificate and --key go together: give both")
        if self.cluster is not None and self.peers:
            raise UsageError("--cluster and --peer: two ways to find other machines: give one of them")
        if not self.loopback and (self.certificate is None or self.tokens is None):
            raise UsageError(
                f"--host {self.host} can be reached from other machines: give --certificate, --key and --tokens, "
                "or listen at 127.0.0.1"
            )

    @property
    def home(self) -> Path:
        """`directory`, or what it is by default."""
        return self.directory or Path.home() / ".local" / "state" / "warpbus" / "pool" / self.name

    @property
    def loopback(self) -> bool:
        """Only this machine reaches it."""
        return is_loopback(self.host)

    def address(self, port: int) -> Address:
        """The address for clients if it listens at `port`."""
        host = self.advertise or (socket.getfqdn() if self.host in ("0.0.0.0", "::") else self.host)
        return Address("plain" if self.certificate is None else "tls", host, port)

    def tls(self) -> ssl.SSLContext | None:
        """Its TLS context; None without a certificate.

        Raises:
            UsageError: certificate and key cannot be used.
        """
        if self.certificate is None or self.key is None:
            return None
        return server_context(self.certificate, self.key)

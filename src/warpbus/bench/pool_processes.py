"""The processes of a measured pool: daemons, clients, and networks as slow as wanted between them."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warpbus.bench.servers import serving
from warpbus.errors import DeviceError
from warpbus.pool.protocol.address import address as read_address
from warpbus.pool.protocol.control_channel import ControlChannel

_SECONDS_OF_A_JOB = 900.0
_SECONDS_OF_A_TENANT = 120.0  # until it is ready, or has measured once
_BURST_SECONDS = 0.001  # of a shaped link: at its rate, the bytes that may come at once


@dataclass(frozen=True)
class ClientLocation:
    """Where processes run, and how a client there reaches a daemon.

    Attributes:
        prefix: of each command, which brings it into a network namespace.
        address: of the daemon, as clients write it.
        environment: of the clients.
    """

    address: str
    prefix: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@contextmanager
def daemon(*flags: str, prefix: Sequence[str] = ()) -> Iterator[str]:
    """A context with `warpbus pool serve` on a free port, with these flags; yields its address, and ends it.

    Raises:
        DeviceError: it does not start; the message is its own.
    """
    with tempfile.TemporaryDirectory(prefix="warpbus-bench-") as directory:
        command = ["pool", "serve", "--port", "0", "--directory", directory, *flags]
        failed = "bench pool: the pool's daemon did not start"
        with serving(command, r"ready: \S+ at (\S+)", failed, prefix=prefix) as address:
            yield address


def gpu_memory(place: ClientLocation) -> int:
    """Bytes of the first GPU of a pool on this machine."""
    with ControlChannel(read_address(place.address), None) as control:
        return int(control.ask("status")["gpus"][0]["memory"])


def do(job: str, place: ClientLocation, **arguments: Any) -> dict[str, Any]:
    """The result of a job of `pool_client`.

    Raises:
        DeviceError: it failed; the message is the last line that it said.
    """
    with _client(job, place, arguments) as process:
        return _answer(job, process)


class Tenants:
    """Clients that are connected, and wait for the signal to begin."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def measure(self, *which: int) -> list[float]:
        """Products per second of some clients, by index, that begin at the same moment.

        Raises:
            DeviceError: one of them failed.
        """
        return [float(said["products"]) for said in self.ask(*which)]

    def ask(self, *which: int) -> list[dict[str, float]]:
        """The answers of some clients, by index, that begin at the same moment.

        Raises:
            DeviceError: one of them failed.
        """
        for index in which:
            stdin = self._processes[index].stdin
            assert stdin is not None
            stdin.write("go\n")
            stdin.flush()
        return [json.loads(_line(self._processes[index])) for index in which]


@contextmanager
def tenants(place: ClientLocation, shares: Sequence[float], **arguments: Any) -> Iterator[Tenants]:
    """Tenants with these shares, which start at the same time.

    Raises:
        DeviceError: one of them failed.
    """
    with connected("tenant", place, [{**arguments, "share": share} for share in shares]) as found:
        yield found


@contextmanager
def connected(job: str, place: ClientLocation, clients: Sequence[dict[str, Any]]) -> Iterator[Tenants]:
    """Clients that do a job of `pool_client` on request, each with its arguments.

    Raises:
        DeviceError: one of them failed.
    """
    processes = [_client(job, place, arguments) for arguments in clients]
    try:
        for process in processes:
            _line(process)  # "ready"
        yield Tenants(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def echo() -> Iterator[int]:
    """The port of a process that takes bytes over a plain socket; see `pool_client.echo_server`."""
    command = [sys.executable, "-m", "warpbus.bench.pool_client", "echo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(json.loads(process.stdout.readline())["port"])
        finally:
            process.kill()


def _client(job: str, place: ClientLocation, arguments: dict[str, Any]) -> subprocess.Popen[str]:
    asked = json.dumps({"address": place.address, **arguments})
    return subprocess.Popen(
        [*place.prefix, sys.executable, "-m", "warpbus.bench.pool_client", job, asked],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **place.environment},
    )


def _line(process: subprocess.Popen[str]) -> str:
    """The next line of a tenant. Raises DeviceError if it ends instead, or prints nothing for too long."""
    assert process.stdout is not None
    limit = threading.Timer(_SECONDS_OF_A_TENANT, process.kill)
    limit.start()
    try:
        line = process.stdout.readline()
    finally:
        limit.cancel()
    if not line:
        _answer("tenant", process)
        raise DeviceError("bench pool: tenant ended too early")
    return line


def _answer(job: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        said, complaint = process.communicate(timeout=_SECONDS_OF_A_JOB)
    except subprocess.TimeoutExpired:
        process.kill()
        raise DeviceError(f"bench pool: {job} did not end within {_SECONDS_OF_A_JOB:.0f} s") from None
    if process.returncode:
        lines = complaint.strip().splitlines() or [f"it ended with {process.returncode}"]
        raise DeviceError(f"bench pool: {job} failed: {lines[-1]}")
    found: dict[str, Any] = json.loads((said.strip().splitlines() or ["{}"])[-1])
    return found


# Links

_SERVER, _CLIENT = "10.199.77.1", "10.199.77.2"


def why_no_links() -> str | None:
    """The reason for which no networks can be made here; None if they can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [name for name in ("ip", "tc", "openssl") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} is not installed"
    probe = f"wb{os.getpid()}p"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made ({made.stderr.strip()})"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return None


@contextmanager
def link(gigabits: float, *flags: str) -> Iterator[ClientLocation]:
    """A daemon with these flags behind a link of so many Gbit/s: TLS and a token, as between machines.

    Both ends are network namespaces, and a token bucket filter shapes what each sends (tc-tbf(8)).

    Raises:
        DeviceError: a command failed, or the daemon does not start.
    """
    server, client = (f"wb{os.getpid()}{end}" for end in "sc")
    burst = max(64 << 10, round(gigabits * 1e9 / 8 * _BURST_SECONDS))
    with tempfile.TemporaryDirectory(prefix="warpbus-bench-") as directory:
        made = []
        try:
            for name in (server, client):
                _run("ip", "netns", "add", name)
                made.append(name)
            _run("ip", "-n", server, "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", client)
            for name, address in ((server, _SERVER), (client, _CLIENT)):
                _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", "link0")
                for device in ("lo", "link0"):
                    _run("ip", "-n", name, "link", "set", device, "up")
                shape = ("rate", f"{round(gigabits * 1e9)}bit", "burst", str(burst), "latency", "50ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", "link0", "root", "tbf", *shape)
            certificate, key, tokens = (Path(directory) / name for name in ("cert.pem", "key.pem", "tokens"))
            _certify(certificate, key)
            token = secrets.token_hex(16)
            tokens.write_text(f"{token} bench\n", encoding="utf-8")
            tokens.chmod(0o600)
            guarded = ("--certificate", str(certificate), "--key", str(key), "--tokens", str(tokens))
            inside = ("ip", "netns", "exec")
            with daemon("--host", _SERVER, *guarded, *flags, prefix=(*inside, server)) as address:
                yield ClientLocation(f"{address}?ca={certificate}", (*inside, client), {"WARPBUS_POOL_TOKEN": token})
        finally:
            for name in made:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _certify(certificate: Path, key: Path) -> None:
    """A certificate of the server's address that nobody else has signed, for a day."""
    _run(
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", "1", "-subj", "/CN=bench", "-addext", f"subjectAltName=IP:{_SERVER}"),
        *("-out", str(certificate), "-keyout", str(key)),
    )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise DeviceError(f"bench pool: {' '.join(command[:4])} failed: {said}")

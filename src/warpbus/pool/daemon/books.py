"""The broker as a daemon reaches it: in its own process, with a file for what has to survive a restart, or by Ray."""

import asyncio
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, Protocol

from warpbus.errors import DataError, UsageError
from warpbus.pool.broker.broker import Broker
from warpbus.pool.broker.leases import Gpu, Lease
from warpbus.pool.broker.membership import RayMembership

_log = logging.getLogger(__name__)

# The operations of `Broker` that take no time.
_TIMELESS = ("lease", "measured", "defragment")


class Books(Protocol):
    """The broker of a pool."""

    async def call(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """An operation of `Broker`, at the time of its clock. Raises what the operation raises."""

    async def addresses(self) -> dict[str, str]:
        """Where the daemons are, by host."""

    async def tick(self) -> list[Lease]:
        """What time brings. Returns the leases that ended: expired, or lost with their host."""


class OwnBooks:
    """A broker in this process.

    Args:
        broker: without leases yet.
        path: of the file. It is written whole, under another name first.
        host, gpus, address: of this machine, which joins. What ran on it before has ended with the daemon before.

    Raises:
        DataError: the file is damaged; the message says what to do.
    """

    def __init__(self, broker: Broker, path: Path, *, host: str, gpus: list[Gpu], address: str) -> None:
        self._broker = broker
        self._path = path
        self._host = host
        self._members = {host: (address, "")}
        self._written = -1
        now = time.time()
        if path.exists():
            try:
                broker.load(json.loads(path.read_text(encoding="utf-8")), now)
            except (OSError, ValueError, DataError) as error:
                raise DataError(f"{path}: the pool's state cannot be read ({error}); move the file away") from None
            for entry in broker.status(now)["queue"]:
                broker.release(entry["id"], now)  # who waited has lost its connection
            if any(gpu["host"] == host for gpu in broker.status(now)["gpus"]):
                broker.leave(host, now)
        broker.join(host, gpus, now)
        self._write()

    async def call(self, operation: str, *arguments: Any, **named: Any) -> Any:
        if operation not in _TIMELESS:
            named["now"] = time.time()
        answer = getattr(self._broker, operation)(*arguments, **named)
        self._write()
        return answer

    async def addresses(self) -> dict[str, str]:
        return {host: address for host, (address, _) in self._members.items()}

    async def tick(self) -> list[Lease]:
        now = time.time()
        self._broker.alive(self._host, now)
        ended = [lease for host in self._broker.silent(now) for lease in self._leave(host, now)]
        ended += self._broker.expire(now)
        self._write()
        return ended

    def join(self, host: str, gpus: list[Gpu], address: str, life: str, living: set[str]) -> list[str]:
        """Another machine joins, or says again that it is here.

        Args:
            host, gpus, address: of the machine.
            life: something that is another for each start of its daemon, with which its leases ended.
            living: the leases that it has.

        Returns:
            Those of them that it has to end, since they ended here.

        Raises:
            UsageError: see `Broker.join`; or its name is this machine's.
        """
        now = time.time()
        if host == self._host:
            raise UsageError(f"host {host} is this machine's own name: start the other daemon with another --name")
        here = {gpu["host"] for gpu in self._broker.status(now)["gpus"] if gpu["state"] != "lost"}
        before = self._members.get(host)
        if before != (address, life) or host not in here:
            if before is not None and before[1] != life and host in here:
                self._broker.leave(host, now)
            self._broker.join(host, gpus, now)
            self._members[host] = address, life
            if before is None:  # this broker was started again, and the other daemon may have been too
                for lease in self._on(host, now) - living:
                    self._broker.lose(lease, f"it was not on {host} any more", now)
        self._broker.alive(host, now)
        self._write()
        return sorted(living - self._on(host, now))

    def _on(self, host: str, now: float) -> set[str]:
        """The leases that a host has, or is to get."""
        leases = self._broker.status(now)["leases"]
        return {
            each["id"]
            for each in leases
            if host in (str(each["gpu"]).partition("/")[0], str(each["target"]).partition("/")[0])
        }

    def _leave(self, host: str, now: float) -> list[Lease]:
        self._members.pop(host, None)
        return self._broker.leave(host, now)

    def _write(self) -> None:
        if self._broker.changes == self._written:
            return
        self._written = self._broker.changes
        beside = self._path.with_name(f"{self._path.name}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(self._broker.dump(), file)
            beside.replace(self._path)
        except OSError as error:
            _log.warning("the pool's state cannot be written: %s", error)


class SharedBooks:
    """The broker of a cluster, by Ray."""

    def __init__(self, membership: RayMembership) -> None:
        self._membership = membership

    async def call(self, operation: str, *arguments: Any, **named: Any) -> Any:
        return await asyncio.to_thread(self._membership.call, operation, *arguments, **named)

    async def addresses(self) -> dict[str, str]:
        return {member.host: member.address for member in await asyncio.to_thread(self._membership.members)}

    async def tick(self) -> list[Lease]:
        tick = await asyncio.to_thread(self._membership.tick)
        return [*tick.lost, *tick.expired]

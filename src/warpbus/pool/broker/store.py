"""The broker of a pool as daemons use it: in this process with a file, or in an actor of Ray (`ray_store`)."""

import json
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from warpbus.errors import DataError, UsageError
from warpbus.pool.broker.broker import Broker
from warpbus.pool.broker.leases import Lease, LeaseMove, PoolGpu
from warpbus.pool.broker.status import HostResidency, LinkMemoryUsage
from warpbus.pool.quota import Quota

_log = logging.getLogger(__name__)

T = TypeVar("T")


class BrokerStore(ABC):
    """The broker of a pool, wherever it runs, with the time of its clock.

    Each method except `addresses` and `tick` is the operation of `Broker` with its name, and raises the same errors.
    """

    @abstractmethod
    async def _run(self, operation: Callable[[Broker, float], T], *, repeatable: bool = False) -> T:
        """Run an operation with the broker and its present time, and store what it has changed.

        Args:
            operation: the function to run; captures only values that can be sent to the broker's process.
            repeatable: running it twice does no harm.
        """

    @abstractmethod
    async def addresses(self) -> dict[str, str]:
        """The addresses of the daemons, by host."""

    @abstractmethod
    async def tick(self) -> list[Lease]:
        """Expire leases and remove silent hosts. Returns the leases that ended: expired, or lost with their host."""

    async def status(self, *, tenant: str | None = None) -> dict[str, Any]:
        return await self._run(lambda broker, now: broker.status(now, tenant=tenant), repeatable=True)

    async def measured(self, gpu: str, *, utilization: float | None, memory: int | None) -> None:
        await self._run(lambda broker, _: broker.measured(gpu, utilization=utilization, memory=memory), repeatable=True)

    async def resident(self, host: str, found: HostResidency) -> None:
        await self._run(lambda broker, _: broker.resident(host, found), repeatable=True)

    async def linked(self, host: str, found: LinkMemoryUsage) -> None:
        await self._run(lambda broker, _: broker.linked(host, found), repeatable=True)

    async def drain(self, host: str) -> list[LeaseMove]:
        return await self._run(lambda broker, now: broker.drain(host, now), repeatable=True)

    async def undrain(self, host: str) -> None:
        await self._run(lambda broker, now: broker.undrain(host, now), repeatable=True)

    async def request(
        self,
        tenant: str,
        quota: Quota,
        *,
        priority: int = 0,
        on: str | None = None,
        near: str | None = None,
        movable: bool = True,
    ) -> Lease:
        return await self._run(
            lambda broker, now: broker.request(
                tenant, quota, priority=priority, on=on, near=near, movable=movable, now=now
            )
        )

    async def lease(self, id: str) -> Lease:
        return await self._run(lambda broker, _: broker.lease(id), repeatable=True)

    async def place(self) -> list[Lease]:
        return await self._run(lambda broker, now: broker.place(now))

    async def seen(self, id: str, *, memory_used: int | None = None) -> Lease:
        return await self._run(lambda broker, now: broker.seen(id, now, memory_used=memory_used), repeatable=True)

    async def release(self, id: str) -> Lease:
        return await self._run(lambda broker, now: broker.release(id, now))

    async def lose(self, id: str, why: str) -> Lease:
        return await self._run(lambda broker, now: broker.lose(id, why, now))

    async def suspend(self, id: str) -> Lease:
        return await self._run(lambda broker, now: broker.suspend(id, now))

    async def resume(self, id: str, *, on: str | None = None) -> Lease:
        return await self._run(lambda broker, now: broker.resume(id, now, on=on))

    async def begin_move(self, id: str, to: str) -> Lease:
        return await self._run(lambda broker, now: broker.begin_move(id, to, now))

    async def end_move(self, id: str, moved: bool, *, copied: int | None = None, pause: float | None = None) -> Lease:
        return await self._run(lambda broker, now: broker.end_move(id, moved, now, copied=copied, pause=pause))

    async def defragment(self) -> list[LeaseMove]:
        return await self._run(lambda broker, _: broker.defragment(), repeatable=True)


class LocalBrokerStore(BrokerStore):
    """A broker in this process, whose state is stored in a JSON file.

    Args:
        broker: has no leases yet.
        path: the file. Each version is written under a temporary name and renamed.
        host, gpus, address: of this machine, which joins the pool. Its leases ended with the daemon before this one.

    Raises:
        DataError: the file is damaged; the message says what to do.
    """

    def __init__(self, broker: Broker, path: Path, *, host: str, gpus: list[PoolGpu], address: str) -> None:
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
        self._found = {each["id"] for each in broker.status(now)["leases"]}  # those of the broker before this one
        self._write()

    async def _run(self, operation: Callable[[Broker, float], T], *, repeatable: bool = False) -> T:
        answer = operation(self._broker, time.time())
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

    def join(self, host: str, gpus: list[PoolGpu], address: str, life: str, living: set[str]) -> list[str]:
        """Another machine joins, or reports again.

        Args:
            host, gpus, address: of the machine.
            life: a random id of its daemon's process: all leases of the machine end with that process.
            living: ids of the leases that run there.

        Returns:
            The ids in `living` of leases that have ended in the broker, which the machine has to end.

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
                for lease in (self._on(host, now) & self._found) - living:
                    self._broker.lose(lease, f"it was not on {host} any more", now)
        self._broker.alive(host, now)
        self._write()
        return sorted(living - self._on(host, now))

    def _on(self, host: str, now: float) -> set[str]:
        """Ids of the leases on a host, and of those that are moving to it."""
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

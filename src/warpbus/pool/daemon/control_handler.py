"""Answers the requests of control connections: the broker decides, and the daemons of the machines execute.

`warpbus.pool.protocol.operations` lists the requests. A tenant controls its own leases, and sees of other leases only
how much room they take. Only admins drain hosts. A viewer sees everything and changes nothing.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from warpbus.errors import QueueFullError, TokenError, UnavailableError, UsageError, WarpbusError
from warpbus.pool.broker.leases import Lease
from warpbus.pool.broker.status import seen_by
from warpbus.pool.broker.store import BrokerStore
from warpbus.pool.daemon.audit import AuditLog
from warpbus.pool.daemon.host import new_key
from warpbus.pool.daemon.lease_moves import LeaseMover
from warpbus.pool.daemon.rates import RateLimit
from warpbus.pool.daemon.tenancies import Order
from warpbus.pool.daemon.tokens import Role, Tenant
from warpbus.pool.protocol.control_channel import Tell
from warpbus.pool.protocol.messages import Request
from warpbus.pool.quota import Quota

_log = logging.getLogger(__name__)

# A waiting request checks the queue this often, even if nothing was placed.
_SECONDS = 0.5
# Leases are moved for the first of the queue once it has waited for this long.
_SECONDS_BEFORE_MOVES = 10.0
_TENANTS_OF_ADDRESS = 4


@dataclass(frozen=True)
class Asker:
    """The sender of a request: its tenant and its network address."""

    tenant: Tenant
    address: str

    def check(self, operation: str, role: Role) -> None:
        """Raises TokenError unless the tenant's role allows an operation that needs `role`."""
        if role == "admin" and not self.tenant.admin:
            raise TokenError(f"{operation}: only an admin may do that: use an admin's token")
        if role == "tenant" and self.tenant.role == "viewer":
            raise TokenError(f"{operation}: a viewer may only ask for the status: use a tenant's token")


class HostDaemon(Protocol):
    """The daemon of a machine, as the broker's daemon uses it: `Host` for this machine, `Peer` over the network."""

    async def receive(self, order: Order) -> str: ...
    async def end(self, lease: str, why: str) -> None: ...
    async def call_off(self, lease: str, why: str) -> None: ...
    async def send(self, lease: str, to: str, migration_token: bytes, tell: Tell) -> dict[str, Any]: ...
    async def save(self, lease: str, tell: Tell) -> dict[str, Any]: ...
    async def open_link(
        self, lease: str, to: str, address: str, link_key: bytes, group: bytes, rank: int
    ) -> dict[str, Any]: ...
    async def order(self, lease: str) -> Order | None: ...
    async def forget(self, lease: str) -> None: ...
    async def offered(self) -> list[dict[str, Any]]: ...
    async def offer(self, lease: str, checkpoint: str) -> dict[str, Any]: ...


class ControlHandler:
    """The control requests of a pool. All methods run on the daemon's event loop.

    Args:
        store: the broker.
        machine: returns the daemon of a host by its name. Raises UnavailableError if the host is not in the pool.
        audit: gets one line per operation.
        most: the most lease requests of one tenant that wait at the same time.
        rate: the most leases per minute that a tenant may request or resume, each of which starts a process; all
            tenants of one address together may `_TENANTS_OF_ADDRESS` times as many.
    """

    def __init__(
        self,
        store: BrokerStore,
        machine: Callable[[str], Awaitable[HostDaemon]],
        audit: AuditLog,
        *,
        most: int,
        rate: float,
    ) -> None:
        self._store = store
        self._machine = machine
        self._audit = audit
        self._most = most
        self._tenant_rate = RateLimit(rate, "leases")
        self._address_rate = RateLimit(_TENANTS_OF_ADDRESS * rate, "leases")
        self._moving = LeaseMover(store, machine, audit)
        self._busy: dict[str, str] = {}
        self._waiting: dict[str, int] = {}
        self._placed = asyncio.Event()
        self._leaving = 0
        self._left = asyncio.Event()
        self._left.set()
        self._background: set[asyncio.Task[None]] = set()

    async def answer(self, request: Request, asker: Asker, tell: Tell) -> dict[str, Any]:
        """Carry out a request of a client and return its result; progress goes to `tell`.

        Raises:
            WarpbusError: the request failed; the error is sent to the client.
        """
        operation, arguments = request
        if operation == "status":
            whole = dict(await self._store.status(tenant=asker.tenant.name))
            return whole if asker.tenant.role != "tenant" else seen_by(whole, asker.tenant.name)
        if operation in ("lease", "resume"):
            self._tenant_rate.check(f"tenant {asker.tenant.name}")
            self._address_rate.check(asker.address.partition(" port ")[0])
        if operation == "lease":
            return await self._lease(arguments, asker, tell)
        if operation in ("drain", "undrain"):
            return await self._drain(operation, arguments["host"], asker, tell)
        if operation == "checkpoints":
            return {"checkpoints": await self._offered()}
        lease = await self._store.lease(arguments["lease"])
        if lease.tenant != asker.tenant.name and not asker.tenant.admin:
            raise TokenError(f"lease {lease.id} is of another tenant: use its token, or an admin's")
        if operation == "release":
            return await self._release(lease, asker)
        if operation == "migrate":
            # The client may go: a move that has begun is brought to its end.
            return await asyncio.shield(self._spawn(self._migrate(lease, arguments["to"], asker, tell)))
        if operation == "load_checkpoint":
            return await self._offer(lease, arguments["checkpoint"])
        if operation == "link":
            del arguments["lease"]
            return await self._link(lease, **arguments)
        if operation == "suspend":
            return await asyncio.shield(self._spawn(self._suspend(lease, asker, tell)))
        return await self._resume(lease, arguments["on"], asker, tell)

    def lost(self, host: str, lease: str, why: str, *, arriving: bool) -> None:
        """The process of a lease on a host has died, or the process that the lease was moving to."""
        if not self._moving.lost(lease, arriving=arriving) and not arriving:
            self._spawn(self._lose(host, lease, why))

    def arrived(self, lease: str) -> None:
        """A lease that was moving now runs at its target."""
        self._moving.arrived(lease)

    async def seen(self, lease: str, memory: int | None) -> None:
        """The client of a lease is connected."""
        with suppress(UsageError):
            await self._store.seen(lease, memory_used=memory)

    async def tick(self) -> None:
        """End the leases whose clients or hosts are gone, and place waiting leases in the free room."""
        for busy in list(self._busy):  # its client waits for it, too
            await self.seen(busy, None)
        for lease in await self._store.tick():
            self._audit.note("reclaimed", tenant=lease.tenant, lease=lease.id, why=lease.reason)
            self._spawn(self._leave(lease))
        await self._settle()
        if not self._background:
            self._spawn(self._make_room())

    async def close(self) -> None:
        """Cancel all running requests."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # Leases

    async def _lease(self, arguments: dict[str, Any], asker: Asker, tell: Tell) -> dict[str, Any]:
        tenant = asker.tenant.name
        quota = Quota(arguments.pop("memory"), float(arguments.pop("share")))
        lease = await self._store.request(tenant, quota, **arguments)
        try:
            gpu = await self._place(lease, tell)
            memory, share = quota.memory, quota.share
            order = Order(
                lease.id, new_key(), tenant, gpu, memory, share, priority=lease.priority, movable=lease.movable
            )
            answer = await self._start(order)
        except BaseException as error:
            await self._give_up(lease.id, "it was not started")
            self._audit.note("refused", tenant=tenant, address=asker.address, lease=lease.id, why=str(error))
            raise
        self._audit.note(
            "lease",
            tenant=tenant,
            address=asker.address,
            lease=lease.id,
            gpu=gpu,
            memory=quota.memory,
            share=quota.share,
        )
        return answer

    async def _place(self, lease: Lease, tell: Tell) -> str:
        """Wait until a lease has a GPU, and return the name of the GPU."""
        waiting = self._waiting.get(lease.tenant, 0)
        if lease.state == "queued" and waiting >= self._most:
            raise QueueFullError(f"tenant {lease.tenant} waits for {waiting} leases already: try again later")
        self._waiting[lease.tenant] = waiting + 1
        reported = None
        try:
            while lease.state == "queued":
                queue = (await self._store.status())["queue"]
                place, why = next(
                    ((n, each["why"]) for n, each in enumerate(queue, 1) if each["id"] == lease.id), (0, "")
                )
                if place and (place, why) != reported:
                    reported = place, why
                    tell({"queued": place, "why": why})
                self._placed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._placed.wait(), _SECONDS)
                lease = await self._store.seen(lease.id)
        finally:
            self._waiting[lease.tenant] -= 1
            if not self._waiting[lease.tenant]:
                del self._waiting[lease.tenant]
        assert lease.gpu is not None
        return lease.gpu

    async def _start(self, order: Order) -> dict[str, Any]:
        await self._left.wait()  # memory that the broker has given anew may still be in use
        async with self._alone(order.lease, "started"):
            address = await (await self._machine(_host(order.gpu))).receive(order)
        await self._store.seen(order.lease)
        return {"lease": order.lease, "key": order.key, "gpu": order.gpu, "address": address}

    async def _release(self, lease: Lease, asker: Asker) -> dict[str, Any]:
        async with self._alone(lease.id, "released"):
            if lease.state == "suspended":
                await self._forget(lease)
            elif lease.gpu is not None:
                await (await self._machine(_host(lease.gpu))).end(lease.id, "it was released")
            await self._store.release(lease.id)
        self._audit.note("release", tenant=lease.tenant, address=asker.address, lease=lease.id)
        await self._settle()
        return {"released": lease.id}

    async def _give_up(self, lease: str, why: str) -> None:
        with suppress(WarpbusError):
            entry = await self._store.lease(lease)
            if entry.gpu is not None:
                await (await self._machine(_host(entry.gpu))).end(lease, why)
                await self._store.lose(lease, why)
            else:
                await self._store.release(lease)
        await self._settle()

    async def _lose(self, host: str, lease: str, why: str) -> None:
        with suppress(UsageError):
            entry = await self._store.lease(lease)
            moves = entry.state == "moving"  # another daemon of a cluster sees to it
            if entry.gpu is not None and _host(entry.gpu) == host and lease not in self._busy and not moves:
                await self._store.lose(lease, why)
        await self._settle()

    async def _leave(self, lease: Lease) -> None:
        """End the processes of a lease that has ended in the broker, which counts its memory as free already."""
        self._leaving += 1
        self._left.clear()
        try:
            for host in await self._store.addresses():
                with suppress(WarpbusError):
                    await (await self._machine(host)).end(lease.id, lease.reason)
        finally:
            self._leaving -= 1
            if not self._leaving:
                self._left.set()

    async def _settle(self) -> None:
        """Place the waiting leases that fit now, and wake their requests."""
        if await self._store.place():
            self._placed.set()

    # Groups of leases

    async def _link(self, lease: Lease, to: str, **arguments: Any) -> dict[str, Any]:
        """Connect a lease to another one, whose owner has given its link key: that it is right, is checked by the
        machine that has the other lease. The address comes from the broker, so that no client sends a machine of the
        pool to another address."""
        other = await self._store.lease(to)
        if lease.gpu is None or other.gpu is None:
            raise UsageError(f"leases {lease.id} and {other.id} cannot be connected: one is not on a GPU now")
        address = (await self._store.addresses()).get(_host(other.gpu))
        if address is None:
            raise UnavailableError(f"host {_host(other.gpu)} is not in the pool now: wait until it joins again")
        async with self._alone(lease.id, "connected"):
            machine = await self._machine(_host(lease.gpu))
            return await machine.open_link(lease.id, to, address, **arguments)

    # Checkpoints

    async def _offered(self) -> list[dict[str, Any]]:
        """The checkpoints of all machines that answer."""
        found = []
        for host in await self._store.addresses():
            with suppress(WarpbusError):
                found += await (await self._machine(host)).offered()
        return found

    async def _offer(self, lease: Lease, checkpoint: str) -> dict[str, Any]:
        async with self._alone(lease.id, "given a checkpoint"):
            if lease.gpu is None:
                raise UsageError(f"lease {lease.id} is {lease.state}: it can load no checkpoint now")
            return await (await self._machine(_host(lease.gpu))).offer(lease.id, checkpoint)

    # Suspending

    async def _suspend(self, lease: Lease, asker: Asker, tell: Tell) -> dict[str, Any]:
        async with self._alone(lease.id, "suspended"):
            lease = await self._store.lease(lease.id)
            if lease.state != "placed" or not lease.movable or lease.gpu is None:
                state = lease.state if lease.movable else "not movable"
                raise UsageError(f"lease {lease.id} is {state}, it cannot be suspended: see warpbus pool status")
            done = await (await self._machine(_host(lease.gpu))).save(lease.id, tell)
            await self._store.suspend(lease.id)
        self._audit.note("suspended", tenant=lease.tenant, address=asker.address, lease=lease.id, gpu=lease.gpu)
        await self._settle()
        return {"suspended": lease.id, **done}

    async def _resume(self, lease: Lease, on: str | None, asker: Asker, tell: Tell) -> dict[str, Any]:
        home, order = await self._saved(lease)
        if on is not None and _host(on) != home:
            raise UsageError(f"lease {lease.id} was saved on {home}: resume it there, and then migrate it to {on}")
        entry = await self._store.resume(lease.id, on=on or home)
        try:
            gpu = await self._place(entry, tell)
            answer = await self._start(replace(order, gpu=gpu, saved=True))
        except BaseException:
            with suppress(WarpbusError):
                await self._store.suspend(lease.id)
            raise
        await (await self._machine(home)).forget(lease.id)
        self._audit.note("resumed", tenant=lease.tenant, address=asker.address, lease=lease.id, gpu=gpu)
        return answer

    async def _saved(self, lease: Lease) -> tuple[str, Order]:
        for host in await self._store.addresses():
            order = await (await self._machine(host)).order(lease.id)
            if order is not None:
                return host, order
        raise UnavailableError(f"lease {lease.id}: the machine that saved it is not in the pool: let it join again")

    async def _forget(self, lease: Lease) -> None:
        for host in await self._store.addresses():
            with suppress(WarpbusError):
                await (await self._machine(host)).forget(lease.id)

    # Moves

    async def _migrate(self, lease: Lease, to: str, asker: Asker, tell: Tell) -> dict[str, Any]:
        async with self._alone(lease.id, "moved"):
            return await self._moving.move(lease, to, tell, asker.tenant.name)

    async def _drain(self, do: str, host: str, asker: Asker, tell: Tell) -> dict[str, Any]:
        self._audit.note(
            "drain" if do == "drain" else "undrain", tenant=asker.tenant.name, address=asker.address, host=host
        )
        if do == "drain":
            moves = await self._store.drain(host)
        else:
            await self._store.undrain(host)
            moves = []
        failed: dict[str, str] = {}
        for number, move in enumerate(moves):
            tell({"phase": f"moving {move.lease[:8]} to {move.target}", "done": number, "total": len(moves)})
            error = await asyncio.shield(self._spawn(self._try(move.lease, move.target, asker.tenant.name)))
            if error is not None:
                failed[move.lease] = str(error)
        await self._settle()
        return {"drained" if do == "drain" else "undrained": host, "moves": len(moves) - len(failed), "failed": failed}

    async def _make_room(self) -> None:
        """Move leases so that the first lease of the queue fits, if it has waited for long."""
        queue = (await self._store.status())["queue"]
        if not queue or queue[0]["waited"] < _SECONDS_BEFORE_MOVES:
            return
        for move in await self._store.defragment():
            await self._try(move.lease, move.target, "the broker")

    async def _try(self, lease: str, to: str, who: str) -> WarpbusError | None:
        """Move a lease. Returns the error if the move fails."""
        try:
            async with self._alone(lease, "moved"):
                await self._moving.move(await self._store.lease(lease), to, lambda _: None, who)
        except WarpbusError as error:
            return error
        return None

    @asynccontextmanager
    async def _alone(self, lease: str, what: str) -> AsyncIterator[None]:
        """While it is open, other operations on the lease are refused."""
        if lease in self._busy:
            raise UsageError(
                f"lease {lease} is being {self._busy[lease]}, it cannot be {what}: wait until that is done"
            )
        self._busy[lease] = what
        try:
            yield
        finally:
            del self._busy[lease]

    def _spawn(self, work: Any) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, WarpbusError):
            _log.error("the pool's daemon met an error of its own", exc_info=error)


def _host(gpu: str) -> str:
    return gpu.partition("/")[0]

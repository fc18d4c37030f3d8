"""Swaps the leases of this machine between GPU memory and host memory, as `residency` decides.

Where GPUs are not oversubscribed, all leases are resident and nothing here has an effect.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import torch

from warpbus.cuda.devices import free_memory
from warpbus.cuda.memory_size import short_size
from warpbus.errors import LeaseLostError, PeerTimeoutError, WarpbusError
from warpbus.pool.broker.leases import PoolGpu
from warpbus.pool.broker.status import HostResidency, LeaseResidency
from warpbus.pool.daemon.audit import AuditLog, Happening
from warpbus.pool.daemon.residency import FULL, Residence, Residency
from warpbus.pool.protocol.control_channel import Tell

_log = logging.getLogger(__name__)

# While leases wait, time slices end.
_TICK = 0.05
# A client learns what its lease waits for after so many seconds.
_SECONDS_BEFORE_TELLING = 0.5
# A lease that moves to a GPU, or is resumed there, gets room within this time.
_SECONDS_FOR_ROOM = 120.0
# Of main memory that swapped leases do not take.
_LEFT = 1 << 30


class ResidentTenant(Protocol):
    """A lease on this machine (`warpbus.pool.daemon.tenancies.Tenancy`)."""

    residence: Residence


Work = Callable[[Any, str, dict[str, Any], str], Awaitable[dict[str, Any]]]
"""Lets the process of a tenancy do something: operation, arguments, and the event that ends it."""


class Swapper:
    """Swaps leases.

    Args:
        gpus: of this machine.
        limit: bytes of host memory for leases.
        time_slice: see `Residency`.
        audit: gets a line for each swap.
        work: swaps, in the tenant's process.
        say: sends a tenant's process a request that it does not answer.
    """

    def __init__(
        self,
        gpus: Iterable[PoolGpu],
        limit: int,
        time_slice: float,
        audit: AuditLog,
        work: Work,
        say: Callable[[Any, str, dict[str, Any]], Awaitable[None]],
    ) -> None:
        known = {gpu.name: gpu for gpu in gpus}
        self._on = any(gpu.oversubscribe > 1 for gpu in known.values())
        self._audit = audit
        self._work = work
        self._say = say
        self._residency = Residency({name: gpu.memory for name, gpu in known.items()}, limit, time_slice)
        self._tenants: dict[Residence, ResidentTenant] = {}
        self._reported: dict[Residence, str] = {}
        self._changed = asyncio.Event()
        self._swapped = asyncio.Event()  # set, and replaced, after each swap
        self._tasks: set[asyncio.Task[None]] = set()
        self._planner: asyncio.Task[None] | None = None

    async def admit(self, tenant: ResidentTenant, *, now_needed: bool) -> bool:
        """A lease comes to a GPU. Call `started` when its process can receive messages, and `leave` in any case when
        it has gone.

        Args:
            tenant: its tenancy.
            now_needed: it has memory at once: it moves there, or is resumed.

        Returns:
            Whether it is resident; else it may not execute until it is swapped in.

        Raises:
            PeerTimeoutError: no room was made for it in time.
        """
        if not self._on:
            return True
        residence = tenant.residence
        if self._planner is None:
            self._planner = asyncio.get_running_loop().create_task(self._plan())
        residence.held += 1
        self._residency.add(residence, time.monotonic(), wanted=now_needed)
        if now_needed:
            self._changed.set()
            await self._until_resident(tenant, lambda _: None)
        return residence.resident

    def started(self, tenant: ResidentTenant) -> None:
        """The process of a lease runs, and may be ordered to swap it out."""
        if self._on:
            self._tenants[tenant.residence] = tenant
            tenant.residence.held -= 1
            self._changed.set()

    def leave(self, tenant: ResidentTenant) -> None:
        """A lease has left its GPU."""
        self._residency.remove(tenant.residence)
        self._tenants.pop(tenant.residence, None)
        self._reported.pop(tenant.residence, None)
        self._wake()

    def wanted(self, tenant: ResidentTenant) -> None:
        """A lease that is not resident has work."""
        residence, now = tenant.residence, time.monotonic()
        if residence.resident:  # its process was given up on while it went out, and did so after all
            self._residency.swapped_out(residence, residence.why, residence.used, 0.0, now)
        self._residency.want(residence, now)
        self._changed.set()

    def heard(self, tenant: ResidentTenant, *, connected: bool, memory: int, worked: bool) -> None:
        """Handle the report of a lease's process: whether it has a client, its bytes, and whether it had work
        lately."""
        residence = tenant.residence
        residence.used = memory
        if worked:
            residence.worked = time.monotonic()
        if not connected:
            self._residency.unwant(residence)

    @asynccontextmanager
    async def resident(self, tenant: ResidentTenant, tell: Tell = lambda _: None) -> AsyncIterator[None]:
        """While it is open, a lease is resident.

        Raises:
            PeerTimeoutError: no room was made for it in time.
            LeaseLostError: it has ended meanwhile.
        """
        if not self._on:
            yield
            return
        residence = tenant.residence
        residence.held += 1
        try:
            self._residency.want(residence, time.monotonic())
            self._changed.set()
            await self._until_resident(tenant, tell)
            yield
        finally:
            residence.held -= 1
            self._changed.set()

    def report(self) -> HostResidency | None:
        """The location of each lease's memory; None if GPUs are not oversubscribed."""
        if not self._on:
            return None
        now, clock = time.monotonic(), time.time()
        return HostResidency(
            {
                each.lease: LeaseResidency(
                    each.state,
                    clock - (now - each.since),
                    each.nbytes,
                    None if each.waiting is None or each.resident else now - each.waiting,
                    each.why,
                    each.swaps,
                    each.seconds,
                    each.last_wait,
                )
                for each in self._residency.leases
            },
            self._residency.limit,
        )

    async def close(self) -> None:
        """Begin no swap any more. The processes are ended by others."""
        tasks = [*self._tasks, *([] if self._planner is None else [self._planner])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_resident(self, tenant: ResidentTenant, tell: Tell) -> None:
        residence, reported = tenant.residence, ""
        end = time.monotonic() + _SECONDS_FOR_ROOM
        while not residence.resident:
            if not any(each is residence for each in self._residency.leases):
                raise LeaseLostError(f"lease {residence.lease} has ended while it was to be swapped in")
            if time.monotonic() > end:
                raise PeerTimeoutError(
                    f"lease {residence.lease} needs {residence.why or f'room on {residence.gpu}'}: none within "
                    f"{_SECONDS_FOR_ROOM:g} s: try again later"
                )
            if residence.why != reported:
                reported = residence.why
                tell({"phase": f"waiting for {reported}", "done": 0, "total": 1})
            with suppress(TimeoutError):
                await asyncio.wait_for(self._swapped.wait(), _SECONDS_BEFORE_TELLING)

    async def _plan(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _TICK if self._residency.pending else None)
            self._changed.clear()
            try:
                self._begin()
                await self._tell_waiting()
            except Exception:
                _log.exception("the pool's daemon met an error of its own while it planned swaps")
                await asyncio.sleep(1.0)

    def _begin(self) -> None:
        free = free_memory(torch.device("cpu"))
        plan = self._residency.plan(time.monotonic(), None if free is None else max(0, free - _LEFT))
        for residence, why in plan.out:
            self._spawn(self._swap_out(residence, why))
        for residence in plan.back:
            self._spawn(self._swap_in(residence))

    async def _swap_out(self, residence: Residence, why: str) -> None:
        tenant = self._tenants.get(residence)
        if tenant is None:
            return  # it has left
        limit = self._residency.limit - self._residency.swapped + residence.used
        try:
            done = await self._work(tenant, "swap_out", {"limit": limit, "why": why}, "swapped_out")
        except WarpbusError as error:
            self._failed(residence, "swapped out", error)
        else:
            now = time.monotonic()
            self._residency.swapped_out(residence, why, done["bytes"], done["seconds"], now)
            self._note(residence, "swapped out", done, why)
        self._wake()

    async def _swap_in(self, residence: Residence) -> None:
        tenant = self._tenants.get(residence)
        done: dict[str, Any] = {"seconds": 0.0, "bytes": 0}
        try:
            if tenant is not None:  # else its process has not been started
                done = await self._work(tenant, "swap_in", {}, "swapped_in")
        except WarpbusError as error:
            self._failed(residence, "swapped in", error)
        else:
            self._residency.swapped_in(residence, done["seconds"], time.monotonic())
            self._reported.pop(residence, None)
            if done["bytes"]:
                self._note(residence, "swapped in", done, f"it waited for {residence.last_wait or 0.0:.2f} s")
        self._wake()

    def _failed(self, residence: Residence, what: str, error: WarpbusError) -> None:
        if not any(each is residence for each in self._residency.leases):
            return  # it has ended, of which others tell
        _log.warning("lease %s cannot be %s: %s", residence.lease, what, error)
        self._audit.note("swap failed", lease=residence.lease, gpu=residence.gpu, why=str(error))
        self._residency.failed(residence, str(error), time.monotonic())

    def _note(self, residence: Residence, event: Happening, done: dict[str, Any], why: str) -> None:
        seconds = round(done["seconds"], 3)
        self._audit.note(event, lease=residence.lease, gpu=residence.gpu, seconds=seconds, bytes=done["bytes"], why=why)
        _log.info("lease %s was %s: %s in %s s; %s", residence.lease, event, short_size(done["bytes"]), seconds, why)

    async def _tell_waiting(self) -> None:
        """Tell clients what their leases wait for: once, and again if host memory is full."""
        now = time.monotonic()
        for residence, tenant in list(self._tenants.items()):
            since, why = residence.waiting, residence.why
            if since is None or residence.state != "swapped out" or now - since < _SECONDS_BEFORE_TELLING:
                continue
            reported = self._reported.get(residence)
            if reported is None or (why != reported and why.startswith(FULL)):
                self._reported[residence] = why
                with suppress(WarpbusError):
                    await self._say(tenant, "waits", {"why": why})

    def _wake(self) -> None:
        self._changed.set()
        self._swapped.set()
        self._swapped = asyncio.Event()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

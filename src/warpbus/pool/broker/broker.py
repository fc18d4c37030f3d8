"""The broker of the pool: keeps the leases, assigns them to GPUs, and queues those that do not fit.

The broker uses no sockets, processes or clock: the caller reports events and their time (`now`, seconds since the
epoch) and carries out the decisions. `warpbus.pool.broker.placement` describes how GPUs are chosen.

    request -> queued -> placed -> released | expired
                ^         |  ^
                |         v  |
                |        moving
                +- suspended <- placed

An operation that raises has changed nothing. Only `place` places waiting leases; the caller calls it after each
operation that may have freed room, and so learns of every placement. `request` and `resume` may place their own lease
at once.
"""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from warpbus.cuda.memory_size import gigabytes
from warpbus.errors import QueueFullError, UsageError
from warpbus.pool.broker import ledger_file, status
from warpbus.pool.broker.leases import HIGHEST_PRIORITY, Lease, LeaseMove, Limits, PoolGpu
from warpbus.pool.broker.ledger import HostEntry, Ledger
from warpbus.pool.broker.moves import evacuate, make_room
from warpbus.pool.broker.placement import best_fit, outlook
from warpbus.pool.broker.request_checks import check_limits, check_possible, checked_gpus, left_of_limits, no_place
from warpbus.pool.quota import Quota


class Broker:
    """The leases of a pool.

    Args:
        grace: seconds without a sign of life after which a client or host counts as gone.
        aging: seconds of waiting that raise the priority of a lease by one.
        limits: of tenants, by name; "*" are the limits of each tenant that is not named.
        max_queued: the most leases that may wait.

    Raises:
        UsageError: a number is not positive.
    """

    def __init__(
        self,
        *,
        grace: float = 60.0,
        aging: float = 60.0,
        limits: Mapping[str, Limits] | None = None,
        max_queued: int = 1000,
    ) -> None:
        for name, value in (("grace", grace), ("aging", aging), ("max_queued", max_queued)):
            if not value > 0:
                raise UsageError(f"{name} is {value}: give more than 0")
        self._grace = grace
        self._aging = aging
        self._limits = dict(limits or {})
        self._max_queued = max_queued
        self._ledger = Ledger()
        self._loaded = float("-inf")
        self._measured: dict[str, status.GpuUsage] = {}
        self._residency: dict[str, status.HostResidency] = {}
        self._links: dict[str, status.LinkMemoryUsage] = {}

    # Hosts

    def join(self, host: str, gpus: Iterable[PoolGpu], now: float) -> list[Lease]:
        """Add a host and its GPUs, or update a known host, which keeps the leases of the GPUs that it still has.

        A host that had left comes back without leases: its processes must have ended.

        Returns:
            The leases that are lost with removed GPUs, in the state "expired".

        Raises:
            UsageError: the names of host and GPUs contradict each other, or a GPU has less memory than its leases.
        """
        offered = checked_gpus(host, gpus)
        before = self._ledger.hosts.get(host)
        for name, room in self._ledger.rooms().items():
            if name in offered and room.gpu.promised - room.memory > offered[name].promised:
                raise UsageError(
                    f"{name} joins with {gigabytes(offered[name].promised)}, but its leases have "
                    f"{gigabytes(room.gpu.promised - room.memory)}: free its memory, or let the host leave first"
                )
        gone = [] if before is None else [name for name in before.gpus if name not in offered]
        lost = self._lose(gone, f"{host} joined without this GPU", now)
        self._ledger.hosts[host] = HostEntry(host, offered, now, draining=before is not None and before.draining)
        if before is None or before.lost or before.gpus != offered:
            number = len(offered)
            self._ledger.record(
                now, "joined", source=host, text=f"{host} joined with {number} GPU{'s' * (number != 1)}"
            )
        return lost

    def leave(self, host: str, now: float) -> list[Lease]:
        """Remove a host. Leases that were moving to it stay where they are.

        If a move from the host is known to be complete, call `end_move` first: otherwise the lease counts as lost.

        Returns:
            The leases that are lost, in the state "expired".

        Raises:
            UsageError: there is no such host.
        """
        entry = self._host(host)
        if entry.lost:
            return []
        lost = self._lose(entry.gpus, f"{host} left the pool", now)
        self._ledger.hosts[host] = replace(entry, lost=True)
        self._ledger.record(now, "left", source=host, text=f"{host} left, {len(lost)} leases are lost")
        return lost

    def alive(self, host: str, now: float) -> None:
        """Record a sign of life of a host.

        Raises:
            UsageError: there is no such host, or it has left and has to join again.
        """
        entry = self._host(host)
        if entry.lost:
            raise UsageError(f"host {host} has left the pool: let it end what runs there and join again")
        self._ledger.hosts[host] = replace(entry, seen=now)

    def silent(self, now: float) -> list[str]:
        """The hosts without a sign of life for longer than the grace time; the caller calls `leave` for them."""
        return [host.name for host in self._ledger.hosts.values() if not host.lost and self._vanished(host.seen, now)]

    def measured(self, gpu: str, *, utilization: float | None, memory: int | None) -> None:
        """Record measurements of a GPU for `status`: its utilization, from 0 to 1, and the bytes in use.

        Raises:
            UsageError: there is no such GPU.
        """
        if self._ledger.gpu(gpu) is None:
            raise no_place(self._ledger, "GPU", gpu)
        self._measured[gpu] = status.GpuUsage(utilization, memory)

    def resident(self, host: str, found: status.HostResidency) -> None:
        """Record for `status` which leases of a host are in GPU memory, and which in host memory.

        Raises:
            UsageError: there is no such host.
        """
        self._host(host)
        self._residency[host] = found

    def linked(self, host: str, found: status.LinkMemoryUsage) -> None:
        """Record for `status` how much memory the leases of a host share.

        Raises:
            UsageError: there is no such host.
        """
        self._host(host)
        self._links[host] = found

    def drain(self, host: str, now: float) -> list[LeaseMove]:
        """Close a host for new leases.

        Returns:
            The moves that empty the host, without moves that have begun already.

        Raises:
            UsageError: there is no such host, or some of its leases fit nowhere else; the host stays open then.
        """
        entry = self._host(host)
        moves = evacuate(self._ledger, host)
        if not entry.draining:
            self._ledger.hosts[host] = replace(entry, draining=True)
            self._ledger.record(
                now, "draining", source=host, text=f"{host} is draining, {len(moves)} leases are to move"
            )
        return moves

    def undrain(self, host: str, now: float) -> None:
        """Open a drained host for leases again.

        Raises:
            UsageError: there is no such host.
        """
        entry = self._host(host)
        if entry.draining:
            self._ledger.hosts[host] = replace(entry, draining=False)
            self._ledger.record(now, "undrained", source=host, text=f"{host} takes leases again")

    # Leases

    def request(
        self,
        tenant: str,
        quota: Quota,
        *,
        priority: int = 0,
        on: str | None = None,
        near: str | None = None,
        movable: bool = True,
        now: float,
    ) -> Lease:
        """Request a lease.

        Args:
            tenant: the name of the tenant.
            quota: memory and share.
            priority: waiting leases with a higher priority are placed first.
            on: the required GPU or host, or None.
            near: the id of a lease of the same tenant; the new lease is placed on the same host.
            movable: whether the lease may be moved and suspended.

        Returns:
            The lease, "placed" or "queued".

        Raises:
            UsageError: no GPU of the pool could ever hold it, the tenant's limits forbid it, or an argument is wrong.
            QueueFullError: the lease would have to wait, and the queue is full.
        """
        if not tenant:
            raise UsageError("a lease needs a tenant: give its name")
        if abs(priority) > HIGHEST_PRIORITY:
            raise UsageError(f"priority is {priority}: give -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}")
        lease = Lease(
            id=secrets.token_hex(16),
            tenant=tenant,
            quota=quota,
            priority=priority,
            gpu=None,
            state="queued",
            created=now,
            since=now,
            seen=now,
            target=None,
            reason="",
            movable=movable,
            on=on,
            near=near,
        )
        check_possible(self._ledger, lease)
        check_limits(self._ledger, lease, self._limits)
        return self._enter(lease, now)

    def lease(self, id: str) -> Lease:
        """The present state of a lease.

        Raises:
            UsageError: there is no such lease, or it has ended; the message tells how.
        """
        lease = self._ledger.leases.get(id)
        if lease is not None:
            return lease
        ends = [event for event in self._ledger.events if event.lease == id]
        how = f"it has ended: {ends[-1].text}" if ends else "there is none"
        raise UsageError(f"lease {id}: {how}: request one, or see warpbus pool status")

    def place(self, now: float) -> list[Lease]:
        """Place the waiting leases that fit, in the order of the queue.

        Returns:
            The leases that were placed.
        """
        placed = []
        # A lease that must be near another one can be placed only after that one, so repeat until nothing fits.
        while placings := outlook(self._ledger, self._aging).placed:
            placed += [self._place(each.lease, each.gpu, each.reason, now) for each in placings]
        return placed

    def seen(self, id: str, now: float, *, memory_used: int | None = None) -> Lease:
        """Record a sign of life of a client, optionally with the bytes that it uses.

        Raises:
            UsageError: there is no such lease.
        """
        lease = self.lease(id)
        used = lease.memory_used if memory_used is None else memory_used
        return self._ledger.put(replace(lease, seen=now, memory_used=used))

    def release(self, id: str, now: float) -> Lease:
        """End a lease.

        Raises:
            UsageError: there is no such lease, or it moves.
        """
        lease = self.lease(id)
        self._check_still(lease, "released")
        return self._ledger.end(lease, "released", "released", "released by its client", now)

    def lose(self, id: str, why: str, now: float) -> Lease:
        """End a lease whose process has died. If the lease was moving, the move has failed.

        Raises:
            UsageError: there is no such lease.
        """
        return self._ledger.end(self.lease(id), "expired", "lost", why, now)

    def expire(self, now: float) -> list[Lease]:
        """End the leases whose clients gave no sign of life for longer than the grace time.

        A lease that is moving is left until the move ends; a suspended lease has no client.
        """
        vanished = [
            lease
            for lease in self._ledger.leases.values()
            if lease.state in ("queued", "placed") and self._vanished(lease.seen, now)
        ]
        return [
            self._ledger.end(lease, "expired", "expired", f"its client was not seen for {now - lease.seen:.0f} s", now)
            for lease in vanished
        ]

    def suspend(self, id: str, now: float) -> Lease:
        """Suspend a lease whose state has been saved, and free its GPU.

        Raises:
            UsageError: there is no such lease, it is not placed, or it cannot be moved.
        """
        lease = self.lease(id)
        self._check_movable(lease, "suspended")
        return self._ledger.change(
            lease, "suspended", now, state="suspended", gpu=None, reason="suspended", source=lease.gpu, memory_used=None
        )

    def resume(self, id: str, now: float, *, on: str | None = None) -> Lease:
        """Request a GPU for a suspended lease; `on` replaces the GPU or host that was required before.

        Returns:
            The lease, "placed" or "queued".

        Raises:
            UsageError: there is no such lease, it is not suspended, or see `request`.
            QueueFullError: see `request`.
        """
        lease = self.lease(id)
        if lease.state != "suspended":
            raise UsageError(f"lease {id} is {lease.state}, not suspended: there is nothing to resume")
        lease = replace(lease, on=on or lease.on)
        check_possible(self._ledger, lease)
        check_limits(self._ledger, lease, self._limits)
        return self._enter(replace(lease, state="queued", since=now, seen=now), now)

    # Moves

    def begin_move(self, id: str, to: str, now: float) -> Lease:
        """Reserve room for a lease on another GPU. The lease keeps its GPU until `end_move`.

        Args:
            id: of the lease.
            to: a GPU, or a host, whose GPU the broker chooses.
            now: the time.

        Raises:
            UsageError: no such lease or place, the lease is not placed or cannot be moved, or there is no room.
        """
        lease = self.lease(id)
        self._check_movable(lease, "moved")
        rooms = [room for room in self._ledger.rooms().values() if to in (room.gpu.name, room.gpu.host)]
        if not rooms:
            raise no_place(self._ledger, "GPU or host", to)
        if not self._ledger.hosts[rooms[0].gpu.host].open:
            raise UsageError(f"lease {id} cannot move to {to}: the host is draining: undrain it, or choose another one")
        own = self._ledger.gpu(lease.gpu)
        others = [room for room in rooms if room.gpu != own]
        if not others:
            raise UsageError(f"lease {id} is on {lease.gpu} already: choose another GPU")
        best = best_fit(others, lease.quota, model=own.model if own else None)
        if best is None:
            raise UsageError(
                f"lease {id} needs {lease.quota}, but on {to} is free only: {', '.join(map(str, others))}: choose "
                "another GPU, or wait"
            )
        return self._ledger.change(
            lease,
            "moving",
            now,
            state="moving",
            target=best.gpu.name,
            reason=f"moves from {lease.gpu} to {best.gpu.name}",
            source=lease.gpu,
        )

    def end_move(
        self, id: str, moved: bool, now: float, *, copied: int | None = None, pause: float | None = None
    ) -> Lease:
        """Complete a move: the lease is on the target, or still at the source, and the room on the other side is free.

        Args:
            id: of the lease.
            moved: whether it is on the target.
            now: the time, which counts as a sign of life, because the client may have had to wait.
            copied: bytes that the move copied, for the history.
            pause: seconds for which the lease executed nothing, for the history.

        Raises:
            UsageError: there is no such lease, or it does not move.
        """
        lease = self.lease(id)
        if lease.state != "moving":
            raise UsageError(f"lease {id} is {lease.state}, it does not move: there is no move to end")
        return self._ledger.end_move(lease, moved, "the move failed", now, copied=copied, pause=pause)

    def defragment(self) -> list[LeaseMove]:
        """The moves that would let the first lease of the queue in (`warpbus.pool.broker.moves.make_room`)."""
        return make_room(self._ledger, self._aging)

    # Information for others

    @property
    def changes(self) -> int:
        """Incremented by each change except signs of life; a dump with a lower number is outdated."""
        return self._ledger.changes

    def status(self, now: float, *, tenant: str | None = None) -> dict[str, Any]:
        """The pool as JSON; its schema is in `warpbus.pool.broker.status`.

        Args:
            now: the time.
            tenant: who asks; the answer then has what its limits leave.
        """
        found = status.report(self._ledger, self._aging, self._measured, self._residency, self._links, now)
        return found if tenant is None else {**found, "left": left_of_limits(self._ledger, tenant, self._limits)}

    def dump(self) -> dict[str, Any]:
        """The state that has to survive a restart, as JSON."""
        return ledger_file.dump(self._ledger)

    def load(self, state: object, now: float | None = None) -> None:
        """Replace the state of this broker by one that `dump` returned.

        Args:
            state: the result of `dump`.
            now: the time; clients and hosts have the grace time from then on to give a sign of life.

        Raises:
            DataError: `state` is malformed.
        """
        self._ledger = ledger_file.load(state)
        self._loaded = float("-inf") if now is None else now
        self._measured, self._residency, self._links = {}, {}, {}

    # Changes

    def _enter(self, lease: Lease, now: float) -> Lease:
        """Queue a lease, and place it at once if it fits together with the leases ahead of it."""
        leases = self._ledger.leases
        before = leases.get(lease.id)
        leases[lease.id] = lease
        queue = outlook(self._ledger, self._aging)
        for each in queue.placed:
            if each.lease.id == lease.id:
                return self._place(lease, each.gpu, each.reason, now)
        waiting = sum(each.state == "queued" for each in leases.values()) - 1
        if waiting >= self._max_queued:
            if before is None:
                del leases[lease.id]
            else:
                leases[lease.id] = before
            raise QueueFullError(f"{waiting} leases wait for a GPU already: try again later", retry_after=self._grace)
        return self._ledger.change(lease, "queued", now, reason=f"waits: {queue.why[lease.id]}")

    def _place(self, lease: Lease, gpu: str, reason: str, now: float) -> Lease:
        # The client has the grace time to learn of it.
        return self._ledger.change(
            lease, "placed", now, state="placed", gpu=gpu, target=None, reason=reason, seen=max(lease.seen, now)
        )

    def _lose(self, gpus: Iterable[str], why: str, now: float) -> list[Lease]:
        """End the leases of GPUs that are gone, and the moves to these GPUs."""
        lost, gone = [], set(gpus)
        for lease in self._ledger.on(gone):
            if lease.gpu in gone:
                lost.append(self._ledger.end(lease, "expired", "lost", why, now))
            else:
                self._ledger.end_move(lease, False, why, now)
        for name in gone:
            self._measured.pop(name, None)
            for reported in (self._residency, self._links):
                reported.pop(name.partition("/")[0], None)  # the host reports what it still has
        return lost

    # Checks

    def _vanished(self, seen: float, now: float) -> bool:
        return now - max(seen, self._loaded) > self._grace

    def _host(self, name: str) -> HostEntry:
        host = self._ledger.hosts.get(name)
        if host is None:
            raise no_place(self._ledger, "host", name)
        return host

    def _check_still(self, lease: Lease, what: str) -> None:
        if lease.state == "moving":
            raise UsageError(
                f"lease {lease.id} moves from {lease.gpu} to {lease.target}, it cannot be {what}: wait for the end of "
                "the move, or call it off"
            )

    def _check_movable(self, lease: Lease, what: str) -> None:
        self._check_still(lease, what)
        if lease.state != "placed":
            raise UsageError(f"lease {lease.id} is {lease.state}, it cannot be {what}: it has no GPU")
        if not lease.movable:
            raise UsageError(f"lease {lease.id} was requested as one that is not movable: it cannot be {what}")

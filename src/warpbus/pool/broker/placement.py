"""Chooses the GPU of each lease, and the reasons of those that wait. Reads the ledger without changing it.

A lease goes where the least memory is left over (best fit), so that GPUs that are whole stay whole; then where the
least share is left, then onto the GPU of the lowest index. A lease that is to be near another one goes to a GPU that
has NVLink to the other's, then to the same GPU, then to another one of that host.

The queue is served in order. The first lease in it that fits nowhere has one GPU kept for it: the one where the least
memory, then the least share, has to be given back before it fits. Those behind it may pass, but not onto that GPU, so
that it does not get later what it waits for. This is backfilling with one reservation, after EASY (Lifka, 1995). EASY
knows how long jobs last; nobody knows that of a lease, so the whole GPU is kept. Another GPU takes its place only
where less has to be given back: what the lease waits for never grows.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from warpbus.cuda.memory_size import gigabytes
from warpbus.pool.broker.leases import Lease, PoolGpu
from warpbus.pool.broker.ledger import Ledger, Room
from warpbus.pool.quota import Quota


@dataclass(frozen=True)
class Placement:
    """A lease, the GPU for it, and why that one."""

    lease: Lease
    gpu: str
    reason: str


@dataclass
class Outlook:
    """The outlook of the queue in the current state.

    Attributes:
        placed: those that have room, in order.
        first: the lease that has a GPU kept for it, and `kept`, that GPU's name; None where nobody waits for room.
        why: of each other lease, what it waits for.
        rooms: the free resources of the GPUs that may get leases, once `placed` are.
    """

    rooms: dict[str, Room]
    placed: list[Placement] = field(default_factory=list)
    first: Lease | None = None
    kept: str | None = None
    why: dict[str, str] = field(default_factory=dict)


def outlook(ledger: Ledger, aging: float) -> Outlook:
    """Go through the queue once."""
    found = Outlook(ledger.open_rooms())
    for lease in ledger.queue(aging):
        neighbour = ledger.neighbour(lease)
        if neighbour is not None and neighbour.state == "queued":
            found.why[lease.id] = f"waits for the lease that it is to be near to, {neighbour.id}"
            continue
        able = [
            room
            for room in found.rooms.values()
            if room.gpu.memory >= lease.quota.memory and ledger.suits(lease, room.gpu)
        ]
        fitting = [room for room in able if room.holds(lease.quota)]
        near = ledger.gpu(neighbour.gpu) if neighbour else None
        best = best_fit((room for room in fitting if room.gpu.name != found.kept), lease.quota, near)
        if best is not None:
            left = found.rooms[best.gpu.name] = best.without(lease.quota)
            found.placed.append(Placement(lease, best.gpu.name, _reason(lease, best, left, len(fitting), near)))
        elif not able:
            found.why[lease.id] = _nowhere(ledger, lease)
        elif fitting:
            found.why[lease.id] = f"{found.kept} has room, but is kept for {found.first and found.first.id}"
        else:
            largest = max(able, key=lambda room: (room.memory, room.share))
            found.why[lease.id] = f"needs {lease.quota}; most is free on {largest}"
            if found.first is None:
                found.first, found.kept = lease, _soonest(able, lease.quota).gpu.name
                found.why[lease.id] += f"; {found.kept} is kept for it"
    return found


def best_fit(rooms: Iterable[Room], quota: Quota, near: PoolGpu | None = None, model: str | None = None) -> Room | None:
    """The room where a lease of `quota` leaves the least; those near to `near` and of this model of GPU come first."""
    fitting = [room for room in rooms if room.holds(quota)]
    return min(fitting, key=lambda room: preference(room, quota, near, model), default=None)


def preference(
    room: Room, quota: Quota, near: PoolGpu | None = None, model: str | None = None
) -> tuple[float | str, ...]:
    """Of two rooms that fit, the one with the lower value is better."""
    left, gpu = room.without(quota), room.gpu
    distance = 0 if near is None or near.name in gpu.links else 1 if near.name == gpu.name else 2
    return model not in (None, gpu.model), distance, left.memory, round(left.share, 6), gpu.index, gpu.host


def _soonest(able: list[Room], quota: Quota) -> Room:
    """The room where the least has to be given back for a lease that does not fit."""

    def missing(room: Room) -> tuple[float | str, ...]:
        return (
            max(0, quota.memory - room.memory),
            round(max(0.0, quota.share - room.share), 6),
            room.gpu.index,
            room.gpu.host,
        )

    return min(able, key=missing)


def _reason(lease: Lease, best: Room, left: Room, fitting: int, near: PoolGpu | None) -> str:
    why = "the only GPU with room" if fitting == 1 else f"best fit of {fitting} GPUs with room"
    if lease.on is not None:
        why = f"requested on {lease.on}, {why}"
    if near is not None:
        how = "with NVLink" if near.name in best.gpu.links else "the GPU" if near == best.gpu else "on the host"
        why = f"near {near.name} ({how}), {why}"
    return f"{why}: {gigabytes(left.memory)} and share {max(left.share, 0.0):.2f} stay free"


def _nowhere(ledger: Ledger, lease: Lease) -> str:
    """Why no GPU that may get leases could hold one that waits, however empty."""
    held = [gpu for gpu in ledger.gpus() if gpu.memory >= lease.quota.memory and ledger.suits(lease, gpu)]
    if held:
        return f"{', '.join(sorted({gpu.host for gpu in held}))} would hold it, but is draining"
    where = "" if lease.on is None else f" of {lease.on}"
    return f"no GPU{where} that is here could hold {lease.quota}; it waits for one to join"

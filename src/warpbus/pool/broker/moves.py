"""Plans of moves: to empty a host, and to make room for a lease that waits. Plans change nothing.

All targets of a plan have room at once, without what its moves free: the moves can be made in any order, or together.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

from warpbus.errors import UsageError
from warpbus.pool.broker.leases import Lease, LeaseMove, PoolGpu
from warpbus.pool.broker.ledger import Ledger, Room
from warpbus.pool.broker.placement import outlook, preference

# Packing leases is as hard as any packing problem: after so many steps a plan counts as not found.
_STEPS = 10_000

Accepts = Callable[[Lease, PoolGpu], bool]


def evacuate(ledger: Ledger, host: str) -> list[LeaseMove]:
    """Moves of all leases that are placed on a host to others, onto the same model of GPU where there is room.

    Where the leases were requested, `on` and `near`, does not bind: the operator's wish to empty the host goes first.

    Raises:
        UsageError: leases that cannot be moved, that move to the host just now, or that fit nowhere else.
    """
    here = [lease for lease in ledger.leases.values() if _host(lease.gpu) == host and lease.state == "placed"]
    stuck = [f"{lease.id} ({lease.tenant}) cannot be moved" for lease in here if not lease.movable]
    stuck += [f"{lease.id} moves to it" for lease in ledger.leases.values() if _host(lease.target) == host]
    rooms = {name: room for name, room in ledger.open_rooms().items() if room.gpu.host != host}
    movable = [lease for lease in here if lease.movable]
    targets = pack(ledger, movable, rooms, lambda lease, gpu: True, iter(range(_STEPS)))
    if targets is None:
        alone = [lease for lease in movable if not any(room.holds(lease.quota) for room in rooms.values())]
        stuck += [f"{lease.id} ({lease.tenant}, {lease.quota}) fits nowhere else" for lease in alone]
        if not alone:
            names = ", ".join(lease.id for lease in movable)
            stuck.append(f"{names} fit elsewhere each, but not all of them")
    if stuck or targets is None:
        raise UsageError(
            f"host {host} cannot be drained: {'; '.join(stuck)}: release or suspend these leases, wait for their end, "
            "or add a GPU"
        )
    return [_move(lease, targets[lease.id]) for lease in movable]


def make_room(ledger: Ledger, aging: float) -> list[LeaseMove]:
    """The moves with which the first lease of the queue that waits for room gets in, with the fewest bytes to copy.

    No move hurts: a lease stays on its model of GPU and where it was requested (`on`); one that is near another or has
    another near it stays; so does one of higher priority than the lease that gets in.

    Returns:
        No moves, where nobody waits for room or no such plan was found.
    """
    queue = outlook(ledger, aging)
    first = queue.first
    if first is None:
        return []
    close = {lease.near for lease in ledger.leases.values()} | {first.near}

    def stays(lease: Lease) -> bool:
        return (
            lease.state != "placed"
            or not lease.movable
            or lease.priority > first.priority
            or lease.id in close
            or ledger.neighbour(lease) is not None
        )

    def accepts(lease: Lease, gpu: PoolGpu) -> bool:
        own = ledger.gpu(lease.gpu)
        return own is not None and gpu.model == own.model and ledger.suits(lease, gpu)

    steps = iter(range(_STEPS))

    def plan(room: Room, chosen: Sequence[Lease]) -> list[LeaseMove] | None:
        """The moves of these leases from their GPU, if that makes room enough."""
        if not _freed(room, chosen).holds(first.quota):
            return None
        others = {name: other for name, other in queue.rooms.items() if other is not room}
        targets = pack(ledger, chosen, others, accepts, steps)
        return None if targets is None else [_move(lease, targets[lease.id]) for lease in chosen]

    sources: list[tuple[Room, list[Lease]]] = []
    for room in queue.rooms.values():
        others = [other for other in queue.rooms.values() if other is not room]
        movers = [
            lease
            for lease in ledger.on([room.gpu.name])
            if not stays(lease) and any(other.holds(lease.quota) and accepts(lease, other.gpu) for other in others)
        ]
        if ledger.suits(first, room.gpu) and _freed(room, movers).holds(first.quota):
            sources.append((room, movers))
    # A plan for each GPU that is easily found; then, below their costs, all sets as long as the steps last.
    plans = [plan(room, _needed(room, movers, first)) for room, movers in sources]
    best = min((moves for moves in plans if moves is not None), key=_bytes, default=None)
    for room, movers in sources:
        for (total, chosen), _ in zip(cheapest_sets(movers), steps, strict=False):
            if best is not None and total >= _bytes(best):
                break
            moves = plan(room, chosen)
            if moves is not None:
                best = moves
                break
    return best or []


def _bytes(moves: Sequence[LeaseMove]) -> int:
    return sum(move.bytes for move in moves)


def _freed(room: Room, leases: Sequence[Lease]) -> Room:
    for lease in leases:
        room = room.with_back(lease.quota)
    return room


def _needed(room: Room, movers: Sequence[Lease], first: Lease) -> list[Lease]:
    """Of the leases that may go, some that suffice: the costliest stays as long as that leaves enough, and so on."""
    chosen = list(movers)
    for lease in sorted(movers, key=cost, reverse=True):
        rest = [each for each in chosen if each is not lease]
        if _freed(room, rest).holds(first.quota):
            chosen = rest
    return chosen


def pack(
    ledger: Ledger, leases: Sequence[Lease], rooms: Mapping[str, Room], accepts: Accepts, steps: Iterator[int]
) -> dict[str, str] | None:
    """A GPU for each lease so that all fit together, by lease id; the largest first, each by best fit, else the next.

    Returns:
        None where there is none, or where `steps` ran out before one was found.
    """
    order = sorted(leases, key=lambda lease: (-lease.quota.memory, -lease.quota.share, lease.id))
    left = dict(rooms)

    def options(lease: Lease) -> Iterator[Room]:
        own = ledger.gpu(lease.gpu)
        fitting = [room for room in left.values() if room.holds(lease.quota) and accepts(lease, room.gpu)]
        return iter(sorted(fitting, key=lambda room: preference(room, lease.quota, model=own.model if own else None)))

    chosen: list[Room] = []
    untried: list[Iterator[Room]] = []
    for _ in steps:
        if len(chosen) == len(order):
            return {lease.id: room.gpu.name for lease, room in zip(order, chosen, strict=True)}
        if len(untried) == len(chosen):
            untried.append(options(order[len(chosen)]))
        room = next(untried[-1], None)
        if room is not None:
            left[room.gpu.name] = room.without(order[len(chosen)].quota)
            chosen.append(room)
            continue
        untried.pop()
        if not chosen:
            return None
        undone = chosen.pop()
        left[undone.gpu.name] = undone
    return None


def cheapest_sets(leases: Sequence[Lease]) -> Iterator[tuple[int, list[Lease]]]:
    """All sets of leases and the bytes that moving them copies, the fewest first.

    With the costs in order, each set comes from exactly one other that costs no more: by adding the lease after its
    last one, or by putting that one in the place of the last.
    """
    ordered = sorted(leases, key=lambda lease: (cost(lease), lease.id))
    costs = [cost(lease) for lease in ordered]
    heap: list[tuple[int, tuple[int, ...]]] = [(costs[0], (0,))] if costs else []
    while heap:
        total, chosen = heapq.heappop(heap)
        yield total, [ordered[index] for index in chosen]
        last = chosen[-1]
        if last + 1 < len(ordered):
            heapq.heappush(heap, (total + costs[last + 1], (*chosen, last + 1)))
            heapq.heappush(heap, (total - costs[last] + costs[last + 1], (*chosen[:-1], last + 1)))


def cost(lease: Lease) -> int:
    """The bytes that a move of a lease copies: what it uses where that is known, else what it may use."""
    return lease.quota.memory if lease.memory_used is None else lease.memory_used


def _move(lease: Lease, target: str) -> LeaseMove:
    return LeaseMove(lease.id, lease.gpu or "", target, cost(lease))


def _host(gpu: str | None) -> str | None:
    return None if gpu is None else gpu.partition("/")[0]

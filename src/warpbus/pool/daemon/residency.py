"""Decides which leases of an oversubscribed GPU are in its memory; `swaps` carries the decisions out.

A GPU's memory and compute are promised to more leases than can be in its memory together. A lease that is not resident
is in host memory and executes nothing. One that has work *waits*, and may displace resident leases:

- those of lower priority, at any time, between two of their batches;
- idle ones, whatever their priority: they have had no work for `IDLE_SECONDS`;
- those of the same priority that have been resident for a time slice.

Of these the ones of the lowest priority go first, then those that were used least recently. A slice is at least
`SLICE_OF_SWAPS` times what exchanging the two leases takes, so that leases that alternate spend a bounded part of the
time on it. Leases that wait are served by priority, then by how long they have waited; one that fits may pass another
that has to wait, which can displace it later.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from warpbus.cuda.memory_size import short_size
from warpbus.pool.broker.ledger import TOLERANCE
from warpbus.pool.broker.status import ResidencyState

IDLE_SECONDS = 2.0
"""A tenant's process reports each second whether it had work."""

SLICE_OF_SWAPS = 4.0

FULL = "room in host memory, which is full"
"""How the reason begins why a lease has to wait for more than other leases."""

_SECONDS_AFTER_FAILURE = 5.0
_BYTES_TO_MEASURE = 1 << 20  # less says nothing of the speed


@dataclass(eq=False)
class Residence:
    """A lease on an oversubscribed GPU. Times are seconds of one clock.

    Attributes:
        lease: its id.
        gpu: the GPU that it is on.
        memory, share: its quota.
        priority: of the lease.
        movable: it may be swapped out.
        state: "swapping" states have room in the GPU's memory.
        since: when it came into its state.
        worked: when it last had work.
        waiting: since when it has had work without being resident, or None.
        held: how many operations need it resident.
        used: bytes of its storages.
        nbytes: in host memory.
        why: it was swapped out, or what it waits for.
        swaps: times that it was swapped out.
        seconds: of all swaps, out and in.
        last_wait: seconds from its work to its return, the last time.
        tried: when a swap last failed.
    """

    lease: str
    gpu: str
    memory: int
    share: float
    priority: int = 0
    movable: bool = True
    state: ResidencyState = "resident"
    since: float = 0.0
    worked: float = 0.0
    waiting: float | None = None
    held: int = 0
    used: int = 0
    nbytes: int = 0
    why: str = ""
    swaps: int = 0
    seconds: float = 0.0
    last_wait: float | None = None
    tried: float = float("-inf")

    @property
    def resident(self) -> bool:
        """It may execute."""
        return self.state == "resident"


@dataclass
class _ResidentRoom:
    """Memory and compute of a GPU: `free` now, and `coming` from leases that are being swapped out."""

    free: tuple[int, float]
    coming: tuple[int, float]

    def holds(self, lease: Residence) -> bool:
        return lease.memory <= self.free[0] and lease.share <= self.free[1] + TOLERANCE

    def will_hold(self, lease: Residence) -> bool:
        memory, share = self.free[0] + self.coming[0], self.free[1] + self.coming[1]
        return lease.memory <= memory and lease.share <= share + TOLERANCE

    def take(self, lease: Residence) -> None:
        """Keep room for a lease: of what is coming, as far as that suffices."""
        memory, share = min(self.coming[0], lease.memory), min(self.coming[1], lease.share)
        self.coming = (self.coming[0] - memory, self.coming[1] - share)
        self.free = (self.free[0] - (lease.memory - memory), self.free[1] - (lease.share - share))

    def come(self, lease: Residence) -> None:
        self.coming = (self.coming[0] + lease.memory, self.coming[1] + lease.share)


@dataclass
class SwapPlan:
    """The swaps to start now: leases to swap out, each with the reason for its client, and leases to swap in."""

    out: list[tuple[Residence, str]] = field(default_factory=list)
    back: list[Residence] = field(default_factory=list)


class Residency:
    """The leases of a host.

    Args:
        memory: bytes of each GPU, by name.
        limit: bytes of host memory for leases that are swapped out.
        time_slice: seconds that a lease with work stays before one of its priority may displace it.

    Attributes:
        leases: all of them.
    """

    def __init__(self, memory: Mapping[str, int], limit: int, time_slice: float) -> None:
        self.limit = limit
        self.leases: list[Residence] = []
        self._memory = dict(memory)
        self._slice = time_slice
        self._pace = 0.0  # seconds per byte of the last swap

    def add(self, lease: Residence, now: float, *, wanted: bool = False) -> None:
        """A lease comes to a GPU. It is resident if there is room at once; else it is out, and `wanted` lets it wait
        for room."""
        fits = self._room(lease.gpu).holds(lease) and not any(
            each.waiting is not None for each in self._on(lease.gpu) if each.priority >= lease.priority
        )
        lease.state, lease.since, lease.worked = "resident" if fits else "swapped out", now, now
        if not fits:
            lease.why = "it had no room in the GPU's memory yet"
            lease.waiting = now if wanted else None
        self.leases.append(lease)

    def remove(self, lease: Residence) -> None:
        """A lease has left. Nothing happens if it had left before."""
        self.leases = [each for each in self.leases if each is not lease]

    def want(self, lease: Residence, now: float) -> None:
        """A lease has work."""
        if not lease.resident and lease.waiting is None:
            lease.waiting = now

    def unwant(self, lease: Residence) -> None:
        """The client of a lease that waits is gone."""
        if not lease.held:
            lease.waiting = None

    @property
    def swapped(self) -> int:
        """Bytes of host memory that leases use, or are about to."""
        return sum(max(each.nbytes, each.used if each.state == "swapping out" else 0) for each in self.leases)

    @property
    def pending(self) -> bool:
        """Leases wait: `plan` has to be asked again after a while."""
        return any(each.waiting is not None for each in self.leases)

    def plan(self, now: float, available: int | None = None) -> SwapPlan:
        """The swaps to start now, which the states of the leases then show as started.

        Args:
            now: the time.
            available: bytes of main memory that are free, or None if that is not known.
        """
        plan = SwapPlan()
        for gpu in self._memory:
            room = self._room(gpu)
            for lease in self._waiting(gpu, now):
                if room.holds(lease):
                    room.coming, coming = (0, 0.0), room.coming
                    room.take(lease)
                    room.coming = coming
                    lease.state, lease.since = "swapping in", now
                    plan.back.append(lease)
                    continue
                if not room.will_hold(lease):
                    victims = self._victims(gpu, room, lease, now, available)
                    if not victims:
                        continue  # what there is may serve one behind it, which it can displace
                    for victim in victims:
                        plan.out.append((victim, _reason(victim, lease, now)))
                        victim.state, victim.since = "swapping out", now
                        room.come(victim)
                lease.why = f"room on {gpu}: other leases are being swapped out"
                room.take(lease)
        return plan

    def swapped_out(self, lease: Residence, why: str, nbytes: int, seconds: float, now: float) -> None:
        """A swap to host memory is complete."""
        lease.state, lease.since, lease.nbytes, lease.why = "swapped out", now, nbytes, why
        lease.swaps += 1
        lease.seconds += seconds
        self._pace = seconds / max(nbytes, _BYTES_TO_MEASURE)
        if lease.held:
            self.want(lease, now)

    def swapped_in(self, lease: Residence, seconds: float, now: float) -> None:
        """A swap to the GPU's memory is complete."""
        if lease.waiting is not None:
            lease.last_wait = now - lease.waiting
        lease.seconds += seconds
        if lease.nbytes:
            self._pace = seconds / max(lease.nbytes, _BYTES_TO_MEASURE)
        lease.state, lease.since, lease.nbytes, lease.why = "resident", now, 0, ""
        lease.worked, lease.waiting = now, None

    def failed(self, lease: Residence, why: str, now: float) -> None:
        """A swap has failed: the lease is where it was."""
        out = lease.state == "swapping in"
        lease.state, lease.since, lease.tried = "swapped out" if out else "resident", now, now
        if out:
            lease.why = f"another try, because the last one failed: {why}"

    def _on(self, gpu: str) -> Iterator[Residence]:
        return (each for each in self.leases if each.gpu == gpu)

    def _room(self, gpu: str) -> _ResidentRoom:
        there = [each for each in self._on(gpu) if each.state != "swapped out"]
        free = self._memory[gpu] - sum(each.memory for each in there), 1.0 - sum(each.share for each in there)
        leaving = [each for each in there if each.state == "swapping out"]
        return _ResidentRoom(free, (sum(each.memory for each in leaving), sum(each.share for each in leaving)))

    def _waiting(self, gpu: str, now: float) -> list[Residence]:
        found = [
            (-each.priority, each.waiting, index, each)
            for index, each in enumerate(self._on(gpu))
            if each.waiting is not None and each.state == "swapped out" and now - each.tried >= _SECONDS_AFTER_FAILURE
        ]
        return [each for *_, each in sorted(found, key=lambda entry: entry[:3])]

    def _victims(
        self, gpu: str, room: _ResidentRoom, lease: Residence, now: float, available: int | None
    ) -> list[Residence]:
        """The leases to swap out for one that waits; none if that would not make room. `lease.why` tells then why."""
        there = [each for each in self._on(gpu) if each.state != "swapped out"]
        able = [each for each in there if each.resident and self._may_displace(lease, each, now)]
        able.sort(key=lambda each: (each.priority, each.worked))
        chosen: list[Residence] = []
        found = _ResidentRoom(room.free, room.coming)
        for each in able:
            if found.will_hold(lease):
                break
            found.come(each)
            chosen.append(each)
        if not found.will_hold(lease):
            lease.why = f"room on {gpu}: {_obstacles(lease, there, able)}"
            return []
        for each in list(reversed(chosen)):  # those that were taken first may be of no use any more
            rest = _ResidentRoom(room.free, room.coming)
            for other in chosen:
                if other is not each:
                    rest.come(other)
            if rest.will_hold(lease):
                chosen.remove(each)
        nbytes = sum(each.used for each in chosen)
        left = self.limit - self.swapped
        if nbytes > left or (available is not None and nbytes > available):
            full = f"{short_size(self.swapped)} of {short_size(self.limit)} is used"
            if nbytes <= left:
                full = f"only {short_size(available or 0)} of the machine's memory is free"
            lease.why = f"{FULL}: {short_size(nbytes)} have to be swapped out to make room on {gpu}, and {full}"
            return []
        return chosen

    def _may_displace(self, lease: Residence, other: Residence, now: float) -> bool:
        if other.held or not other.movable or now - other.tried < _SECONDS_AFTER_FAILURE:
            return False
        if other.priority < lease.priority:
            return True
        if _idle(other, now):
            return True
        exchange = self._pace * (other.used + lease.nbytes)
        return other.priority == lease.priority and now - other.since >= max(self._slice, SLICE_OF_SWAPS * exchange)


def _idle(lease: Residence, now: float) -> bool:
    return now - lease.worked >= IDLE_SECONDS


def _reason(victim: Residence, lease: Residence, now: float) -> str:
    if victim.priority < lease.priority:
        return f"a lease of priority {lease.priority} has work on {victim.gpu}"
    if _idle(victim, now):
        return f"it was idle, and another lease has work on {victim.gpu}"
    return f"its time slice on {victim.gpu} is over, and another lease of its priority has work"


def _obstacles(lease: Residence, there: Iterable[Residence], able: Iterable[Residence]) -> str:
    """Why the leases of a GPU cannot make room for another."""
    rest = [each for each in there if each not in able]
    causes = {
        "that are being swapped": sum(not e.resident for e in rest),
        "that cannot be swapped out": sum(e.resident and not e.movable for e in rest),
        "with work and a higher priority": sum(e.priority > lease.priority for e in rest if e.resident and e.movable),
        "whose time slice is not over": sum(e.priority == lease.priority for e in rest if e.resident and e.movable),
    }
    text = ", ".join(f"{count} {what}" for what, count in causes.items() if count)
    return f"it is taken by leases: {text}" if text else "it is taken by leases that are being moved"

"""The pool as JSON, for the dashboard and `warpbus pool status`.

Memory is in bytes, times are seconds since the epoch, durations seconds, shares parts of one GPU:

    {"version": 1,                                             of this schema: more may be added without a new one
     "now": float,
     "gpus": [{"name": "host/0", "host": str, "index": int, "model": str, "memory": int,
               "used": int, "free": int, "share_used": float,    what leases have of it, reservations of moves included
               "oversubscribe": float, "promised": int,          bytes that leases may have together: used + free
               "resident": int | null, "swapped": int | null,    bytes of quotas in its memory; bytes in host memory
               "state": "open" | "draining" | "lost",
               "leases": [id, ...],                              on it, moving from it or to it
               "utilization": float | null,                      measured: part of the time that it computes, 0 to 1
               "measured_memory": int | null}],                  measured: bytes in use, by whomever
     "leases": [{"id": str, "tenant": str, "memory": int, "memory_used": int | null, "share": float, "priority": int,
                 "gpu": str | null, "target": str | null,        where it is, and where it moves to
                 "state": "queued" | "placed" | "moving" | "suspended",
                 "since": float,                                 when it came into this state
                 "idle": float,                                  for how long its client was not heard of
                 "reason": str,                                  why it is where it is, or what it waits for
                 "residency": null |                             null where the GPU is not oversubscribed
                     {"state": "resident" | "swapping out" | "swapped out" | "swapping in",
                      "since": float, "bytes": int,              in host memory
                      "waits": float | null, "why": str,         for room; why it is out, or what it waits for
                      "swaps": int, "swap_seconds": float,       to host memory and back, and what all of that took
                      "last_wait": float | null}}],              of its client: from its work to the lease's return
 "host_memory": [{"host": str, "swapped": int, "limit": int}],   of hosts that oversubscribe: used for swapped leases
     "link_memory": [{"host": str,                               host memory that leases of a host share in groups
                      "used": int, "limit": int,
                      "unshared": int}],                         groups that use sockets instead, since its start
     "queue": [{"id", "tenant", "memory", "share",               the next one first
                "priority": int,                                 with what waiting has added
                "waited": float, "why": str}],
     "events": [{"time": float, "kind": str, "lease": str | null, "tenant": str | null, "source": str | null,
                 "target": str | null, "seconds": float | null, "bytes": int | null,
                 "pause": float | null,                          of a move: for how long the lease executed nothing
                 "text": str}],
     "left": {"memory": int | null, "share": float | null}}      what the limits of the tenant that asks leave for one
                                                                 lease more; null: no limit

A tenant gets this with its own leases alone (`seen_by`): of others it sees that so much memory and share is taken, as
leases "other-1", "other-2"... of the tenant "(other)".

Leases that have ended are in the events alone, of which the last 1,000 are kept, the oldest first.
`warpbus.pool.broker.leases.Event` lists their kinds.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from warpbus.pool.broker.leases import Lease
from warpbus.pool.broker.ledger import Ledger
from warpbus.pool.broker.placement import outlook

VERSION = 1

ResidencyState = Literal["resident", "swapping out", "swapped out", "swapping in"]

_LEASE = re.compile(r"[0-9a-f]{32}")
_OTHER = "(other)"  # no tenant can have this name
_HIDDEN = ("memory_used", "residency")


@dataclass(frozen=True)
class GpuUsage:
    """Measurements of a GPU: the fraction of its time that it computes, and bytes in use; None if unknown."""

    utilization: float | None = None
    memory: int | None = None


@dataclass(frozen=True)
class LeaseResidency:
    """The location of a lease's memory, as its host reports it; the attributes are those of the schema above."""

    state: ResidencyState
    since: float
    bytes: int
    waits: float | None
    why: str
    swaps: int
    swap_seconds: float
    last_wait: float | None


@dataclass(frozen=True)
class HostResidency:
    """The leases of a host whose GPUs are oversubscribed, by id, and the bytes of host memory for those swapped out."""

    leases: Mapping[str, LeaseResidency]
    limit: int


@dataclass(frozen=True)
class LinkMemoryUsage:
    """The memory that leases of a host share; the attributes are those of the schema above."""

    used: int
    limit: int
    unshared: int


def report(
    ledger: Ledger,
    aging: float,
    measured: Mapping[str, GpuUsage],
    residency: Mapping[str, HostResidency],
    links: Mapping[str, LinkMemoryUsage],
    now: float,
) -> dict[str, Any]:
    """The pool at a time, as JSON of the schema above."""
    where = {id: found for host in residency.values() for id, found in host.leases.items()}
    waiting = _why(ledger, aging)
    return {
        "version": VERSION,
        "now": now,
        "gpus": _gpus(ledger, measured, where),
        "leases": [_lease(lease, waiting.get(lease.id), where.get(lease.id), now) for lease in ledger.leases.values()],
        "host_memory": [
            {"host": host, "swapped": sum(each.bytes for each in found.leases.values()), "limit": found.limit}
            for host, found in residency.items()
        ],
        "link_memory": [{"host": host, **asdict(found)} for host, found in links.items()],
        "queue": [
            {
                "id": lease.id,
                "tenant": lease.tenant,
                "memory": lease.quota.memory,
                "share": lease.quota.share,
                "priority": lease.priority + int(max(0.0, now - lease.since) / aging),
                "waited": max(0.0, now - lease.since),
                "why": waiting[lease.id],
            }
            for lease in ledger.queue(aging)
        ],
        "events": [asdict(event) for event in ledger.events],
    }


def _why(ledger: Ledger, aging: float) -> dict[str, str]:
    queue = outlook(ledger, aging)
    return queue.why | {each.lease.id: f"has room on {each.gpu} and is placed next" for each in queue.placed}


def _gpus(
    ledger: Ledger, measured: Mapping[str, GpuUsage], where: Mapping[str, LeaseResidency]
) -> list[dict[str, Any]]:
    rooms = ledger.rooms()
    listed = []
    for host in ledger.hosts.values():
        state = "lost" if host.lost else "draining" if host.draining else "open"
        for gpu in sorted(host.gpus.values(), key=lambda gpu: gpu.index):
            room, found = rooms.get(gpu.name), measured.get(gpu.name, GpuUsage())
            used = 0 if room is None else gpu.promised - room.memory
            there = [(lease, where[lease.id]) for lease in ledger.on([gpu.name]) if lease.id in where]
            known = gpu.oversubscribe > 1
            listed.append(
                {
                    "name": gpu.name,
                    "host": gpu.host,
                    "index": gpu.index,
                    "model": gpu.model,
                    "memory": gpu.memory,
                    "used": used,
                    "free": 0 if room is None else room.memory,
                    "share_used": 0.0 if room is None else round(gpu.oversubscribe - room.share, 6),
                    "oversubscribe": gpu.oversubscribe,
                    "promised": gpu.promised,
                    "resident": sum(lease.quota.memory for lease, at in there if at.state != "swapped out")
                    if known
                    else None,
                    "swapped": sum(at.bytes for _, at in there) if known else None,
                    "state": state,
                    "leases": [lease.id for lease in ledger.on([gpu.name])],
                    "utilization": found.utilization,
                    "measured_memory": found.memory,
                }
            )
    return listed


def _lease(lease: Lease, waiting: str | None, where: LeaseResidency | None, now: float) -> dict[str, Any]:
    return {
        "id": lease.id,
        "tenant": lease.tenant,
        "memory": lease.quota.memory,
        "memory_used": lease.memory_used,
        "share": lease.quota.share,
        "priority": lease.priority,
        "gpu": lease.gpu,
        "target": lease.target,
        "state": lease.state,
        "since": lease.since,
        "idle": max(0.0, now - lease.seen),
        "reason": lease.reason if waiting is None else f"waits: {waiting}",
        "residency": None if where is None else asdict(where),
    }


def seen_by(whole: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """The part of `report`'s answer that a tenant may see, without names of other tenants and ids of their leases."""
    own = {lease["id"] for lease in whole["leases"] if lease["tenant"] == tenant}
    own |= {event["lease"] for event in whole["events"] if event["tenant"] == tenant and event["lease"]}
    others = [lease["id"] for lease in whole["leases"] if lease["id"] not in own]
    names = dict(zip(others, (f"other-{number}" for number in range(1, len(others) + 1)), strict=True))

    def known(text: str) -> str:
        return _LEASE.sub(lambda found: found[0] if found[0] in own else "another lease", text)

    return {
        **whole,
        "gpus": [{**gpu, "leases": [names.get(id, id) for id in gpu["leases"]]} for gpu in whole["gpus"]],
        "leases": [
            {**lease, "reason": known(lease["reason"])}
            if lease["id"] in own
            else {**lease, "id": names[lease["id"]], "tenant": _OTHER, "reason": "", **dict.fromkeys(_HIDDEN)}
            for lease in whole["leases"]
        ],
        "queue": [
            {**each, "why": known(each["why"])}
            if each["id"] in own
            else {**each, "id": names[each["id"]], "tenant": _OTHER, "why": ""}
            for each in whole["queue"]
        ],
        "events": [
            {**event, "text": known(event["text"])} for event in whole["events"] if event["tenant"] in (None, tenant)
        ],
    }

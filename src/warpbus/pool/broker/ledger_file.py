"""The ledger as JSON, so that leases outlive the process of the broker. What is read is checked field by field."""

import dataclasses
import math
import re
from collections import deque
from types import NoneType
from typing import Any

from warpbus.errors import DataError, UsageError
from warpbus.pool.broker.leases import Event, Lease, PoolGpu
from warpbus.pool.broker.ledger import EVENTS, TOLERANCE, HostEntry, Ledger
from warpbus.pool.broker.request_checks import checked_gpus
from warpbus.pool.quota import Quota

VERSION = 1

_Kinds = dict[str, tuple[type, ...]]
_TEXT, _NUMBER, _WHOLE, _FLAG, _LIST = (str,), (int, float), (int,), (bool,), (list,)

_TOP: _Kinds = {"version": _WHOLE, "changes": _WHOLE, "hosts": _LIST, "leases": _LIST, "events": _LIST}
_HOST: _Kinds = {"name": _TEXT, "gpus": _LIST, "seen": _NUMBER, "draining": _FLAG, "lost": _FLAG}
_GPU: _Kinds = {"index": _WHOLE, "model": _TEXT, "memory": _WHOLE, "links": _LIST, "oversubscribe": _NUMBER}
_LEASE: _Kinds = {
    "id": _TEXT,
    "tenant": _TEXT,
    "memory": _WHOLE,
    "share": _NUMBER,
    "priority": _WHOLE,
    "gpu": (str, NoneType),
    "state": _TEXT,
    "created": _NUMBER,
    "since": _NUMBER,
    "seen": _NUMBER,
    "target": (str, NoneType),
    "reason": _TEXT,
    "movable": _FLAG,
    "on": (str, NoneType),
    "near": (str, NoneType),
    "memory_used": (int, NoneType),
}
_EVENT: _Kinds = {
    "time": _NUMBER,
    "kind": _TEXT,
    "lease": (str, NoneType),
    "tenant": (str, NoneType),
    "source": (str, NoneType),
    "target": (str, NoneType),
    "seconds": (int, float, NoneType),
    "bytes": (int, NoneType),
    "pause": (int, float, NoneType),
    "text": _TEXT,
}


def dump(ledger: Ledger) -> dict[str, Any]:
    """A ledger as JSON."""
    return {
        "version": VERSION,
        "changes": ledger.changes,
        "hosts": [_dump_host(host) for host in ledger.hosts.values()],
        "leases": [_dump_lease(lease) for lease in ledger.leases.values()],
        "events": [dataclasses.asdict(event) for event in ledger.events],
    }


def load(state: object) -> Ledger:
    """The ledger that `dump` wrote.

    Raises:
        DataError: it is something else, or leases in it have more of a GPU than there is.
    """
    top = _fields(state, _TOP, "the pool's state")
    if top["version"] != VERSION:
        raise _wrong("the pool's state, version", f"is {top['version']}", f"{VERSION}")
    ledger = Ledger(changes=top["changes"])
    for index, record in enumerate(top["hosts"]):
        host = _host(record, f"hosts[{index}]")
        ledger.hosts[host.name] = host
    for index, record in enumerate(top["leases"]):
        lease = _lease(record, f"leases[{index}]", ledger)
        ledger.leases[lease.id] = lease
    if len(ledger.hosts) < len(top["hosts"]) or len(ledger.leases) < len(top["leases"]):
        raise _wrong("the pool's state", "has a host or a lease twice", "each once")
    for name, room in ledger.rooms().items():
        if room.memory < 0 or room.share < -TOLERANCE:
            raise _wrong(f"the pool's state, {name}", "is leased to more than it has", "less")
    events = [Event(**_fields(record, _EVENT, f"events[{index}]")) for index, record in enumerate(top["events"])]
    ledger.events = deque(events, maxlen=EVENTS)
    return ledger


def _dump_host(host: HostEntry) -> dict[str, Any]:
    gpus = [
        {
            "index": gpu.index,
            "model": gpu.model,
            "memory": gpu.memory,
            "links": list(gpu.links),
            "oversubscribe": gpu.oversubscribe,
        }
        for gpu in host.gpus.values()
    ]
    return {"name": host.name, "gpus": gpus, "seen": host.seen, "draining": host.draining, "lost": host.lost}


def _dump_lease(lease: Lease) -> dict[str, Any]:
    record = dataclasses.asdict(lease)
    return {**record.pop("quota"), **record}


def _host(record: object, where: str) -> HostEntry:
    found = _fields(record, _HOST, where)
    name, gpus = found["name"], []
    for index, each in enumerate(found["gpus"]):
        place = f"{where}, gpus[{index}]"
        gpu = _fields({"oversubscribe": 1.0, **each} if isinstance(each, dict) else each, _GPU, place)
        if not all(isinstance(link, str) for link in gpu["links"]):
            raise _wrong(f"{place}, links", "has something that is no string", "names of GPUs")
        gpu["links"] = tuple(gpu["links"])
        gpus.append(PoolGpu(name=f"{name}/{gpu['index']}", host=name, **gpu))
    try:
        offered = checked_gpus(name, gpus)
    except UsageError as error:
        raise DataError(f"{where}: {error}: start without the file of the pool's state") from error
    return HostEntry(name, offered, found["seen"], found["draining"], found["lost"])


def _lease(record: object, where: str, ledger: Ledger) -> Lease:
    found = _fields(record, _LEASE, where)
    if not re.fullmatch("[0-9a-f]{32}", found["id"]):
        raise _wrong(f"{where}, id", f"is {found['id']!r}", "32 hexadecimal digits")
    try:
        quota = Quota(found.pop("memory"), found.pop("share"))
    except UsageError as error:
        raise DataError(f"{where}: {error}: start without the file of the pool's state") from error
    lease = Lease(quota=quota, **found)
    if lease.state not in ("queued", "placed", "moving", "suspended"):
        raise _wrong(f"{where}, state", f"is {lease.state!r}", "queued, placed, moving or suspended")
    has = (ledger.gpu(lease.gpu) is not None, ledger.gpu(lease.target) is not None)
    named = (lease.gpu is not None, lease.target is not None)
    expected = (lease.state in ("placed", "moving"), lease.state == "moving")
    if not has == named == expected or (lease.target and lease.target == lease.gpu):
        raise _wrong(
            f"{where}", f"is {lease.state} on {lease.gpu} with target {lease.target}", "GPUs that go with that"
        )
    return lease


def _fields(record: object, kinds: _Kinds, where: str) -> dict[str, Any]:
    """A JSON object with exactly these fields, each of one of these types."""
    if not isinstance(record, dict) or set(record) != set(kinds):
        raise _wrong(where, "has other fields", ", ".join(kinds))
    for name, value in record.items():
        allowed = kinds[name]
        wrong = not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)
        if wrong or (isinstance(value, float) and not math.isfinite(value)):
            names = " or ".join("null" if kind is NoneType else kind.__name__ for kind in allowed)
            raise _wrong(f"{where}, {name}", f"is {value!r:.40}", names)
    return dict(record)


def _wrong(where: str, found: str, expected: str) -> DataError:
    return DataError(f"{where} {found}: expected {expected}: start without the file of the pool's state")

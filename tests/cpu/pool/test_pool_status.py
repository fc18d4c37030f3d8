"""What others see of the broker: its status, its history, and what survives a restart."""

import json
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
from pool_brokers import GB, ask, pool

from warpbus.errors import DataError, UsageError
from warpbus.pool.broker.broker import Broker
from warpbus.pool.broker.leases import Event, Limits, PoolGpu
from warpbus.pool.broker.status import seen_by
from warpbus.pool.quota import Quota

SCHEMA = json.loads((Path(__file__).parents[3] / "examples/kubernetes/pool_status.schema.json").read_text())


def test_status_has_what_the_limits_of_the_tenant_leave():
    limits = {"ann": Limits(memory=50 * GB, share=0.5), "*": Limits(share=1.5)}
    broker = Broker(limits=limits)
    broker.join("a", [PoolGpu("a/0", "a", 0, "model", 80 * GB)], 0.0)
    for memory, share in ((20, 0.1), (10, 0.2)):
        broker.request("ann", Quota(memory * GB, share), now=1.0)
    for tenant, left in (
        ("ann", {"memory": 20 * GB, "share": 0.2}),
        ("ben", {"memory": None, "share": 1.5}),
    ):
        status = broker.status(2.0, tenant=tenant)
        assert status["left"] == left
        jsonschema.validate(seen_by(status, tenant), SCHEMA)
        # No lease more than that is accepted.
        broker.request(tenant, Quota(left["memory"] or GB, min(1.0, left["share"])), now=3.0)
    assert broker.status(4.0, tenant="ann")["left"] == {"memory": 0, "share": 0.0}


def test_status_is_json_and_has_its_schema():
    broker = pool(a=(80,))
    placed = ask(broker, 60, 0.25, now=1.5)
    waits = ask(broker, 30, 0.5, now=2.5)
    broker.measured("a/0", utilization=0.75, memory=123)
    broker.seen(placed.id, 3.5, memory_used=42)
    status = broker.status(10.0)
    assert json.loads(json.dumps(status)) == status
    jsonschema.validate(status, SCHEMA)
    jsonschema.validate(seen_by(status, "ann"), SCHEMA)
    for asker in ("ann", "ben"):
        assert broker.status(10.0, tenant=asker) == status | {"left": {"memory": None, "share": None}}
    for part in ("gpus", "leases", "queue", "events"):
        assert set(SCHEMA["properties"][part]["items"]["properties"]) == set(status[part][0])
    assert set(status) == {"version", "now", "gpus", "leases", "queue", "events", "host_memory", "link_memory"}
    assert status["gpus"] == [
        {
            "name": "a/0",
            "host": "a",
            "index": 0,
            "model": "H200",
            "memory": 80 * GB,
            "used": 60 * GB,
            "free": 20 * GB,
            "share_used": 0.25,
            "oversubscribe": 1.0,
            "promised": 80 * GB,
            "resident": None,
            "swapped": None,
            "state": "open",
            "leases": [placed.id],
            "utilization": 0.75,
            "measured_memory": 123,
        }
    ]
    assert status["leases"][0] == {
        "id": placed.id,
        "tenant": "ann",
        "memory": 60 * GB,
        "memory_used": 42,
        "share": 0.25,
        "priority": 0,
        "gpu": "a/0",
        "target": None,
        "state": "placed",
        "since": 1.5,
        "idle": 6.5,
        "reason": placed.reason,
        "residency": None,
    }
    why = "needs 30.00 GB and 50% of the GPU; most is free on a/0 with 20.00 GB and share 0.75; a/0 is kept for it"
    assert status["leases"][1]["reason"] == f"waits: {why}"
    assert status["queue"] == [
        {
            "id": waits.id,
            "tenant": "ann",
            "memory": 30 * GB,
            "share": 0.5,
            "priority": 0,
            "waited": 7.5,
            "why": why,
        }
    ]
    assert [event["kind"] for event in status["events"]] == ["joined", "placed", "queued"]
    reported = {"time", "kind", "lease", "tenant", "source", "target", "seconds", "bytes", "text"}
    assert reported <= set(status["events"][0]) == {field.name for field in fields(Event)}
    broker.release(placed.id, 11)
    broker.drain("a", 11)
    assert broker.status(11)["gpus"][0]["state"] == "draining"
    with pytest.raises(UsageError, match="the pool has no GPU a/7"):
        broker.measured("a/7", utilization=None, memory=None)


def test_a_tenant_sees_others_as_room_that_is_taken():
    broker = pool(a=(80,))
    own = ask(broker, 30, 0.25, tenant="ann", now=1)
    other = ask(broker, 40, 0.25, tenant="bob", now=2)
    waits = ask(broker, 50, 0.25, tenant="bob", now=3)
    small = ask(broker, 45, 0.25, tenant="ann", now=4)
    gone = ask(broker, 1, 0.1, tenant="bob", now=5)
    broker.release(gone.id, 6)
    whole = broker.status(10.0)
    seen = seen_by(whole, "ann")
    assert not any(secret in json.dumps(seen) for secret in (other.id, waits.id, gone.id, "bob"))
    assert [each["id"] for each in seen["leases"]] == [own.id, "other-1", "other-2", small.id]
    assert [each["id"] for each in seen["queue"]] == ["other-2", small.id]
    assert seen["gpus"][0]["leases"] == [own.id, "other-1"]
    assert seen["gpus"][0]["used"] == 70 * GB
    assert (seen["leases"][1]["memory"], seen["leases"][1]["share"]) == (40 * GB, 0.25)
    assert seen["leases"][0] == whole["leases"][0]
    assert {event["lease"] for event in seen["events"]} == {None, own.id, small.id}
    assert [each["reason"] for each in seen["leases"][1:3]] == ["", ""]


def test_what_a_lease_waits_for_does_not_name_others():
    whole = {
        "gpus": [],
        "queue": [{"id": "a" * 32, "tenant": "ann", "why": f"a/0 has room, but is kept for {'b' * 32}"}],
        "leases": [{"id": "a" * 32, "tenant": "ann", "reason": f"waits: {'b' * 32} and {'a' * 32}"}],
        "events": [],
    }
    seen = seen_by(whole, "ann")
    assert seen["queue"][0]["why"] == "a/0 has room, but is kept for another lease"
    assert seen["leases"][0]["reason"] == f"waits: another lease and {'a' * 32}"


def test_the_history_is_bounded():
    broker = pool(a=(80,))
    for now in range(700):
        broker.release(ask(broker, 1, now=now).id, now)
    events = broker.status(700)["events"]
    assert (len(events), events[-1]["time"], broker.changes) == (1000, 699, 1401)


def test_a_restart_gives_clients_time():
    broker = pool(a=(80,))
    lease = ask(broker, 10)
    again = Broker(grace=60)
    again.load(json.loads(json.dumps(broker.dump())), 1000)
    assert again.dump() == broker.dump()
    assert again.expire(1060) == []
    assert again.silent(1060) == []
    assert again.silent(1061) == ["a"]
    assert [each.id for each in again.expire(1061)] == [lease.id]


def spoil(path: tuple[object, ...], value: object) -> dict[str, object]:
    broker = pool(a=(80, 80))
    ask(broker, 50)
    ask(broker, 50)
    state = json.loads(json.dumps(broker.dump()))
    place = state
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return state


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 2, "the pool's state, version is 2: expected 1"),
        (("more",), 2, "the pool's state has other fields: expected version, changes"),
        (("changes",), True, "changes is True: expected int"),
        (("hosts",), None, "hosts is None: expected list"),
        (("hosts", 0, "seen"), float("nan"), "seen is nan: expected int or float"),
        (("hosts", 0, "gpus", 0, "index"), 1, "offers a GPU twice"),
        (("hosts", 0, "gpus", 0, "links"), [1], r"gpus\[0\], links has something that is no string"),
        (("hosts", 0, "lost"), True, r"leases\[0\] is placed on a/0 with target None: expected GPUs"),
        (("leases", 0, "id"), "../x", r"leases\[0\], id is '../x': expected 32 hexadecimal digits"),
        (("leases", 0, "state"), "expired", "state is 'expired': expected queued, placed"),
        (("leases", 0, "gpu"), None, "is placed on None"),
        (("leases", 0, "target"), "a/1", "is placed on a/0 with target a/1"),
        (("leases", 0, "gpu"), "a/1", "a/1 is leased to more than it has"),
        (("leases", 0, "memory"), -1, "memory is -1 bytes"),
        (("leases", 0, "share"), "1", "share is '1': expected int or float"),
        (("leases", 0), [], r"leases\[0\] has other fields"),
        (("events", 0, "bytes"), 0.5, r"events\[0\], bytes is 0.5: expected int or null"),
    ],
)
def test_a_damaged_state_is_refused(path, value, message):
    broker = pool(b=(80,))
    before = broker.dump()
    with pytest.raises(DataError, match=message):
        broker.load(spoil(path, value))
    assert broker.dump() == before

"""The broker promises more of a GPU than it has, where its host says so."""

import copy
import json
from dataclasses import asdict, replace

import pytest
from pool_brokers import GB, ask, why

from warpbus.errors import DataError, UsageError
from warpbus.pool.broker.broker import Broker
from warpbus.pool.broker.leases import Limits, PoolGpu
from warpbus.pool.broker.status import HostResidency, LeaseResidency, LinkMemoryUsage, seen_by
from warpbus.pool.daemon.remote_host import read_report, residency_value

GPU = PoolGpu("mill/0", "mill", 0, "H100", 80 * GB, (), 1.5)
OUT = LeaseResidency("swapped out", 2.0, 40 * GB, 1.5, "room on mill/0", 1, 1.25, None)


def broker(gpu: PoolGpu = GPU) -> Broker:
    found = Broker()
    found.join("mill", [gpu], 0)
    return found


def test_memory_and_compute_are_promised_up_to_the_factor() -> None:
    pool = broker()
    assert [ask(pool, 60, 0.75).state for _ in range(2)] == ["placed", "placed"]
    third = ask(pool, 1, 0.1)
    assert third.state == "queued"
    assert "most is free on mill/0 with 0.00 GB and share 0.00" in why(pool, third)
    (gpu,) = pool.status(0)["gpus"]
    assert (gpu["used"], gpu["free"], gpu["promised"], gpu["share_used"]) == (120 * GB, 0, 120 * GB, 1.5)


def test_one_lease_is_never_more_than_a_gpu() -> None:
    pool = broker()
    with pytest.raises(UsageError, match=r"mill/0, has 80.00 GB: ask for that at most"):
        ask(pool, 81)
    assert ask(pool, 80).state == "placed"


def test_a_restarted_broker_knows_what_is_promised() -> None:
    pool = broker()
    ask(pool, 60)
    ask(pool, 60)
    again = Broker()
    again.load(json.loads(json.dumps(pool.dump())))
    assert again.dump() == pool.dump()
    older = copy.deepcopy(pool.dump())
    del older["hosts"][0]["gpus"][0]["oversubscribe"]
    with pytest.raises(DataError, match="leased to more than it has"):
        again.load(older)
    older["leases"] = older["leases"][:1]
    again.load(older)
    assert again.status(0)["gpus"][0]["promised"] == 80 * GB


def test_a_host_that_comes_back_with_less_must_still_hold_its_leases() -> None:
    pool = broker()
    ask(pool, 60)
    ask(pool, 60)
    with pytest.raises(UsageError, match=r"joins with 80.00 GB, but its leases have 120.00 GB"):
        pool.join("mill", [replace(GPU, oversubscribe=1.0)], 1)
    for factor in (0.5, 17.0, float("nan")):
        with pytest.raises(UsageError, match="oversubscribed"):
            pool.join("mill", [replace(GPU, oversubscribe=factor)], 1)


def test_status_tells_where_memory_is_and_hides_it_of_others() -> None:
    pool = broker()
    first, second = ask(pool, 60), ask(pool, 60, tenant="bob")
    assert pool.status(0)["leases"][0]["residency"] is None  # the host has not reported
    resident = LeaseResidency("resident", 1.0, 0, None, "", 0, 0.0, None)
    pool.resident("mill", HostResidency({first.id: resident, second.id: OUT}, 200 * GB))
    status = pool.status(10.0)
    (gpu,) = status["gpus"]
    assert (gpu["resident"], gpu["swapped"]) == (60 * GB, 40 * GB)
    assert [lease["residency"] for lease in status["leases"]] == [asdict(resident), asdict(OUT)]
    assert status["host_memory"] == [{"host": "mill", "swapped": 40 * GB, "limit": 200 * GB}]
    assert [lease["residency"] for lease in seen_by(status, "bob")["leases"]] == [None, asdict(OUT)]
    usage = LinkMemoryUsage(1 << 25, 1 << 30, 2)
    pool.linked("mill", usage)
    assert pool.status(10.0)["link_memory"] == [{"host": "mill", **asdict(usage)}]
    pool.leave("mill", 11.0)
    assert (pool.status(12.0)["host_memory"], pool.status(12.0)["link_memory"]) == ([], [])
    with pytest.raises(UsageError, match="no host dam"):
        pool.resident("dam", HostResidency({}, 0))
    with pytest.raises(UsageError, match="no host dam"):
        pool.linked("dam", usage)


def test_a_report_carries_it_between_machines() -> None:
    found = HostResidency({"ab": OUT}, 200 * GB)
    report = {"address": "warpbuss://mill:7700", "gpus": [{**asdict(GPU), "links": []}], "leases": [], "news": []}
    shared = {"used": 1 << 25, "limit": 1 << 30, "unshared": 2}
    report |= {"measured": [], "residency": residency_value(found), "link_memory": shared}
    read = read_report(report)
    assert (read.residency, read.gpus) == (found, [GPU])
    assert asdict(read.link_memory) == shared
    assert read_report({**report, "residency": residency_value(None)}).residency is None
    for wrong in ({"leases": {}}, {"leases": {"ab": {"state": 1}}, "limit": 1}, {"leases": [], "limit": 1}):
        with pytest.raises(UsageError):
            read_report({**report, "residency": wrong})
    with pytest.raises(UsageError, match="unshared"):
        read_report({**report, "link_memory": {"used": 0, "limit": 1}})


def test_a_tenant_may_be_kept_from_preempting_others() -> None:
    pool = Broker(limits={"ann": Limits(priority=0)})
    pool.join("mill", [GPU], 0)
    with pytest.raises(UsageError, match="tenant ann asks for priority 1, but may have 0 at most"):
        ask(pool, 10, priority=1)
    assert ask(pool, 10, priority=-1).state == ask(pool, 10, tenant="bob", priority=100).state == "placed"

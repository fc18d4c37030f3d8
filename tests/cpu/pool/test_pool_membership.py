"""The pool over a Ray cluster: two nodes on this machine, and a third that dies."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from warpbus.errors import UnavailableError, UsageError
from warpbus.pool.broker import membership
from warpbus.pool.broker.leases import Limits, PoolGpu
from warpbus.pool.broker.membership import RayMembership
from warpbus.pool.daemon.broker_store import RayBrokerStore
from warpbus.pool.quota import Quota

SPACE = "pool-test"


def gpus(host: str, memory: int = 100) -> list[PoolGpu]:
    return [PoolGpu(f"{host}/0", host, 0, "H200", memory)]


def until(true: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture
def pool(two_nodes: str) -> Iterator[RayMembership]:
    ray.shutdown()
    with RayMembership(address=two_nodes, namespace=SPACE, grace=5.0, limits={"bob": Limits(leases=0)}) as joined:
        yield joined
        ray.kill(ray.get_actor("broker", namespace=SPACE))
    assert not ray.is_initialized()


def nodes() -> list[str]:
    return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])


def test_two_hosts_one_broker(pool: RayMembership) -> None:
    one, other = nodes()
    pool.offer("a", gpus("a"), "warpbus://10.0.0.1:7700", node=one)
    member = pool.offer("b", gpus("b", 200), "warpbus://10.0.0.2:7700", node=other)
    assert [each.host for each in pool.members()] == ["a", "b"]
    assert pool.members()[1] == member
    assert pool.tick() == membership.Tick()  # nothing has changed

    lease = asyncio.run(RayBrokerStore(pool).request("ann", Quota(150, 0.5)))
    assert (lease.state, lease.gpu) == ("placed", "b/0")
    assert abs(lease.created - time.time()) < 60
    waits = asyncio.run(RayBrokerStore(pool).request("ann", Quota(80, 0.5), on="b"))
    assert waits.state == "queued"
    with pytest.raises(UsageError, match=r"tenant bob asks .* may have 0 leases"):
        asyncio.run(RayBrokerStore(pool).request("bob", Quota(1, 0.1)))
    with pytest.raises(UsageError, match="host c offers GPU b/0"):
        pool.offer("c", gpus("b"), "")

    # The broker dies, and goes on elsewhere or here with what the agents kept.
    before = asyncio.run(RayBrokerStore(pool).status())
    ray.kill(ray.get_actor("broker", namespace=SPACE), no_restart=False)

    def back() -> bool:
        try:
            return bool(asyncio.run(RayBrokerStore(pool).status())["gpus"])
        except UnavailableError:
            return False

    until(back)
    after = asyncio.run(RayBrokerStore(pool).status())
    assert {**after, "now": 0, "leases": 0, "queue": 0} == {**before, "now": 0, "leases": 0, "queue": 0}
    assert [each["id"] for each in after["leases"]] == [lease.id, waits.id]
    joined: list[str] = []

    def both() -> bool:
        joined.extend(pool.tick().joined)  # who does not answer in time is asked again
        return len(joined) >= 2

    until(both)
    assert sorted(joined) == ["a", "b"]
    assert asyncio.run(RayBrokerStore(pool).lease(lease.id)) == lease

    asyncio.run(RayBrokerStore(pool).release(lease.id))
    assert [each.id for each in pool.tick().placed] == [waits.id]
    assert [each.id for each in pool.withdraw("b")] == [waits.id]
    with pytest.raises(UsageError, match="host b is not offered by this process"):
        pool.withdraw("b")
    assert [gpu["state"] for gpu in asyncio.run(RayBrokerStore(pool).status())["gpus"]] == ["open", "lost"]


def test_hosts_that_fail(pool: RayMembership, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(nodes())
    added = ray_cluster.add_node(num_cpus=0, object_store_memory=80 * 2**20, include_dashboard=False)
    until(lambda: len(nodes()) == 3)
    (third,) = set(nodes()) - before
    pool.offer("a", gpus("a"), "", node=sorted(before)[0])
    pool.offer("c", gpus("c", 200), "", node=third)
    lost = asyncio.run(RayBrokerStore(pool).request("ann", Quota(200, 0.5)))
    stays = asyncio.run(RayBrokerStore(pool).request("ann", Quota(100, 0.5)))
    assert (lost.gpu, stays.gpu) == ("c/0", "a/0")

    monkeypatch.setattr(membership, "_SECONDS_FOR_THE_NAME", 0.5)
    with (
        RayMembership(namespace=SPACE) as other,
        pytest.raises(UsageError, match="host a is offered by another process of the cluster: give this machine"),
    ):
        other.offer("a", gpus("a"), "")

    ray_cluster.remove_node(added)  # its node dies: at once
    ticks: list[membership.Tick] = []
    until(lambda: (ticks.append(pool.tick()), ticks[-1].left == ["c"])[1])
    assert [each.id for each in ticks[-1].lost] == [lost.id]
    assert asyncio.run(RayBrokerStore(pool).lease(stays.id)).gpu == "a/0"

    ray.kill(ray.get_actor("agent:a", namespace=SPACE))  # its agent dies: after the grace time
    assert pool.tick().left == []
    until(lambda: (ticks.append(pool.tick()), ticks[-1].left == ["a"])[1])
    # Its client was silent for as long, and may have been given up for that first.
    assert {each.id for tick in ticks for each in tick.lost + tick.expired} >= {stays.id}
    assert pool.members() == []


def test_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"a cluster needs Ray: pip install 'warpbus\[cluster\]'"):
        RayMembership()

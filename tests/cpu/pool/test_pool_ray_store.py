"""The pool over a Ray cluster: two nodes on this machine, and a third that dies."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from warpbus.errors import UsageError
from warpbus.pool.broker import ray_store
from warpbus.pool.broker.leases import Lease, Limits, PoolGpu
from warpbus.pool.broker.ray_store import RayBrokerStore
from warpbus.pool.quota import Quota

SPACE = "pool-test"


def gpus(host: str, memory: int = 100) -> list[PoolGpu]:
    return [PoolGpu(f"{host}/0", host, 0, "H200", memory)]


def until(true: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def process_of(actor: Any) -> Any:
    return actor.__ray_call__.remote(lambda _: os.getpid())


@pytest.fixture
def pool(two_nodes: str) -> Iterator[RayBrokerStore]:
    ray.shutdown()
    with RayBrokerStore(address=two_nodes, namespace=SPACE, grace=5.0, limits={"bob": Limits(leases=0)}) as joined:
        assert asyncio.run(joined.addresses()) == {}  # the broker runs on one of the two nodes
        yield joined
        ray.kill(ray.get_actor("broker", namespace=SPACE))
    assert not ray.is_initialized()


def nodes() -> list[str]:
    return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])


def test_two_hosts_one_broker(pool: RayBrokerStore) -> None:
    one, other = nodes()
    pool.offer("a", gpus("a"), "warpbus://10.0.0.1:7700", node=one)
    pool.offer("b", gpus("b", 200), "warpbus://10.0.0.2:7700", node=other)
    addresses = {"a": "warpbus://10.0.0.1:7700", "b": "warpbus://10.0.0.2:7700"}
    assert asyncio.run(pool.addresses()) == addresses
    assert asyncio.run(pool.tick()) == []
    assert asyncio.run(pool.addresses()) == addresses  # nothing has changed

    lease = asyncio.run(pool.request("ann", Quota(150, 0.5)))
    assert (lease.state, lease.gpu) == ("placed", "b/0")
    assert abs(lease.created - time.time()) < 60
    waits = asyncio.run(pool.request("ann", Quota(80, 0.5), on="b"))
    assert waits.state == "queued"
    with pytest.raises(UsageError, match=r"tenant bob asks .* may have 0 leases"):
        asyncio.run(pool.request("bob", Quota(1, 0.1)))
    with pytest.raises(UsageError, match="host c offers GPU b/0"):
        pool.offer("c", gpus("b"), "")

    # The broker dies, and goes on elsewhere or here with what the agents kept.
    before = asyncio.run(pool.status())
    broker = ray.get_actor("broker", namespace=SPACE)
    killed = ray.get(process_of(broker))
    ray.kill(broker, no_restart=False)
    found = asyncio.run(pool.status())["gpus"]  # asked again until the new one answers
    assert [gpu["name"] for gpu in found] == ["a/0", "b/0"]

    def back() -> bool:
        try:
            return ray.get(process_of(broker), timeout=30) != killed
        except ray.exceptions.RayError:
            return False

    until(back)
    after = asyncio.run(pool.status())
    assert {**after, "now": 0, "leases": 0, "queue": 0} == {**before, "now": 0, "leases": 0, "queue": 0}
    assert [each["id"] for each in after["leases"]] == [lease.id, waits.id]

    def both() -> bool:
        assert asyncio.run(pool.tick()) == []  # who does not answer in time is asked again
        return asyncio.run(pool.addresses()) == addresses

    until(both)
    assert asyncio.run(pool.lease(lease.id)) == lease

    asyncio.run(pool.release(lease.id))
    assert [each.id for each in asyncio.run(pool.place())] == [waits.id]
    assert [each.id for each in pool.withdraw("b")] == [waits.id]
    with pytest.raises(UsageError, match="host b is not offered by this process"):
        pool.withdraw("b")
    assert [gpu["state"] for gpu in asyncio.run(pool.status())["gpus"]] == ["open", "lost"]


def test_hosts_that_fail(pool: RayBrokerStore, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(nodes())
    added = ray_cluster.add_node(num_cpus=0, object_store_memory=80 * 2**20, include_dashboard=False)
    until(lambda: len(nodes()) == 3)
    (third,) = set(nodes()) - before
    pool.offer("a", gpus("a"), "", node=sorted(before)[0])
    pool.offer("c", gpus("c", 200), "", node=third)
    lost = asyncio.run(pool.request("ann", Quota(200, 0.5)))
    stays = asyncio.run(pool.request("ann", Quota(100, 0.5)))
    assert (lost.gpu, stays.gpu) == ("c/0", "a/0")

    monkeypatch.setattr(ray_store, "_SECONDS_FOR_THE_NAME", 0.5)
    with (
        RayBrokerStore(namespace=SPACE) as other,
        pytest.raises(UsageError, match="host a is offered by another process of the cluster: give this machine"),
    ):
        other.offer("a", gpus("a"), "")

    ray_cluster.remove_node(added)  # its node dies: at once
    ended: list[Lease] = []

    def left(host: str) -> bool:
        ended.extend(asyncio.run(pool.tick()))
        return host not in asyncio.run(pool.addresses())

    until(lambda: left("c"))
    assert [each.id for each in ended] == [lost.id]
    assert asyncio.run(pool.lease(stays.id)).gpu == "a/0"

    ray.kill(ray.get_actor("agent:a", namespace=SPACE))  # its agent dies: after the grace time
    assert not left("a")
    until(lambda: left("a"))
    # Its client was silent for as long, and may have been given up for that first.
    assert stays.id in {each.id for each in ended}
    assert asyncio.run(pool.addresses()) == {}


def test_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"a cluster needs Ray: pip install 'warpbus\[cluster\]'"):
        RayBrokerStore()

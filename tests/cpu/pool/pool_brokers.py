"""Small pools of GPUs and leases in them, for the tests of the broker."""

from typing import Any

from warpbus.pool.broker.broker import Broker
from warpbus.pool.broker.leases import Lease, PoolGpu
from warpbus.pool.quota import Quota

GB = 10**9
NONE: dict[int, tuple[int, ...]] = {}


def gpus(host: str, *memory: int, model: str = "H200", links: dict[int, tuple[int, ...]] = NONE) -> list[PoolGpu]:
    return [
        PoolGpu(f"{host}/{index}", host, index, model, size * GB, tuple(f"{host}/{k}" for k in links.get(index, ())))
        for index, size in enumerate(memory)
    ]


def pool(**hosts: tuple[int, ...]) -> Broker:
    broker = Broker(grace=60, aging=60)
    for host, memory in hosts.items():
        broker.join(host, gpus(host, *memory), 0)
    return broker


def ask(broker: Broker, memory: int, share: float = 0.1, now: float = 0, tenant: str = "ann", **wishes: Any) -> Lease:
    return broker.request(tenant, Quota(memory * GB, share), now=now, **wishes)


def why(broker: Broker, lease: Lease, now: float = 0) -> str:
    return next(each["why"] for each in broker.status(now)["queue"] if each["id"] == lease.id)

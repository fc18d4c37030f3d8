"""The metrics of a pool: what Prometheus reads is what the broker's status says."""

import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

sys.path.insert(0, str(Path(__file__).parents[1] / "pool"))
from pool_brokers import GB, ask

from warpbus.pool.broker.broker import Broker
from warpbus.pool.broker.leases import PoolGpu
from warpbus.pool.broker.status import HostResidency, LeaseResidency, LinkMemoryUsage
from warpbus.server.options import ServerOptions
from warpbus.server.pool_page import create_pool_app


def test_prometheus_reads_memory_residency_and_swaps():
    broker = Broker()
    broker.join("mill", [PoolGpu("mill/0", "mill", 0, "H100", 80 * GB, (), 1.5)], 0)
    first, second = ask(broker, 70, 1.0), ask(broker, 50, 0.5)
    ask(broker, 60, 0.5)
    broker.resident(
        "mill",
        HostResidency(
            {
                first.id: LeaseResidency("resident", 1.0, 0, None, "", 2, 3.5, 0.25),
                second.id: LeaseResidency("swapped out", 2.0, 40 * GB, 1.5, "room", 1, 1.25, None),
            },
            200 * GB,
        ),
    )
    broker.measured("mill/0", utilization=0.5, memory=30 * GB)
    broker.linked("mill", LinkMemoryUsage(1 << 25, 8 * GB, 3))

    async def status():
        return broker.status(10.0)

    client = TestClient(create_pool_app(status, ServerOptions()), "http://localhost")
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {
        (sample.name.removeprefix("warpbus:pool_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert found["gpu_memory_bytes", "mill/0"] == 80 * GB
    assert found["gpu_promised_bytes", "mill/0"] == found["gpu_reserved_bytes", "mill/0"] == 120 * GB
    assert found["gpu_resident_bytes", "mill/0"] == 70 * GB
    assert found["gpu_swapped_bytes", "mill/0"] == 40 * GB
    assert found["gpu_share", "mill/0"] == 1.5
    assert (found["gpu_utilization", "mill/0"], found["gpu_measured_bytes", "mill/0"]) == (0.5, 30 * GB)
    assert (found["leases", "placed"], found["leases", "queued"]) == (2, 1)
    assert (found["lease_residency", "resident"], found["lease_residency", "swapped out"]) == (1, 1)
    assert found["leases_waiting_for_memory",] == 1
    assert found["lease_swaps_total", first.id[:8]] == 2
    assert found["lease_swap_seconds_total", second.id[:8]] == 1.25
    assert found["host_memory_limit_bytes", "mill"] == 200 * GB
    assert (found["link_memory_bytes", "mill"], found["link_memory_limit_bytes", "mill"]) == (1 << 25, 8 * GB)
    assert found["unshared_groups_total", "mill"] == 3

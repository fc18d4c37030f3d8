"""The Prometheus metrics of a pool, made of its status at the moment of the request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from warpbus.server.metrics import PREFIX

_LEASE_STATES = ("queued", "placed", "moving", "suspended")
_RESIDENCY = ("resident", "swapping out", "swapped out", "swapping in")

_GPU_METRICS = (
    ("gpu_memory_bytes", "memory", "bytes of a GPU for leases"),
    ("gpu_promised_bytes", "promised", "bytes that leases of a GPU may have together"),
    ("gpu_reserved_bytes", "used", "bytes that its leases may use"),
    ("gpu_resident_bytes", "resident", "of these, bytes of leases in GPU memory, if the GPU is oversubscribed"),
    ("gpu_swapped_bytes", "swapped", "bytes of its leases in host memory"),
    ("gpu_share", "share_used", "compute that its leases may use, in GPUs"),
    ("gpu_utilization", "utilization", "part of the time that it computes, 0 to 1"),
    ("gpu_measured_bytes", "measured_memory", "bytes in use, by whomever"),
)


def pool_metrics(status: dict[str, Any]) -> bytes:
    """The metrics in Prometheus' text format.

    Args:
        status: of the pool, see `warpbus.pool.broker.status`.
    """
    registry = CollectorRegistry()
    registry.register(_StatusReadings(status))
    return generate_latest(registry)


class _StatusReadings:
    def __init__(self, status: dict[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """The metrics of one status."""
        status, named = self._status, f"{PREFIX}pool_"
        for metric, field, help_text in _GPU_METRICS:
            family = GaugeMetricFamily(named + metric, help_text, labels=("gpu",))
            for gpu in status["gpus"]:
                if gpu.get(field) is not None and gpu["state"] != "lost":
                    family.add_metric((gpu["name"],), gpu[field])
            yield family
        states = GaugeMetricFamily(f"{named}leases", "leases of the pool", labels=("state",))
        for state in _LEASE_STATES:
            states.add_metric((state,), sum(lease["state"] == state for lease in status["leases"]))
        yield states
        yield from self._residency(named)
        memory = GaugeMetricFamily(
            f"{named}host_memory_limit_bytes", "host memory for leases that are swapped out", labels=("host",)
        )
        for host in status.get("host_memory", ()):
            memory.add_metric((host["host"],), host["limit"])
        yield memory
        yield from self._link_memory(named)

    def _link_memory(self, named: str) -> Iterable[Metric]:
        label = ("host",)
        used = GaugeMetricFamily(f"{named}link_memory_bytes", "host memory that leases share in groups", labels=label)
        limit = GaugeMetricFamily(f"{named}link_memory_limit_bytes", "the limit of this memory", labels=label)
        unshared = CounterMetricFamily(f"{named}unshared_groups", "groups that use sockets instead", labels=label)
        for host in self._status.get("link_memory", ()):
            used.add_metric((host["host"],), host["used"])
            limit.add_metric((host["host"],), host["limit"])
            unshared.add_metric((host["host"],), host["unshared"])
        yield used
        yield limit
        yield unshared

    def _residency(self, named: str) -> Iterable[Metric]:
        found = [(lease, lease.get("residency")) for lease in self._status["leases"]]
        known = [(lease, where) for lease, where in found if where is not None]
        states = GaugeMetricFamily(f"{named}lease_residency", "leases of oversubscribed GPUs", labels=("state",))
        for state in _RESIDENCY:
            states.add_metric((state,), sum(where["state"] == state for _, where in known))
        yield states
        waiting = sum(where["waits"] is not None for _, where in known)
        yield GaugeMetricFamily(f"{named}leases_waiting_for_memory", "leases with work in host memory", value=waiting)
        label = ("lease",)
        swaps = CounterMetricFamily(f"{named}lease_swaps", "times that a lease went to host memory", labels=label)
        seconds = CounterMetricFamily(f"{named}lease_swap_seconds", "copying a lease out and back", labels=label)
        for lease, where in known:
            swaps.add_metric((lease["id"][:8],), where["swaps"])
            seconds.add_metric((lease["id"][:8],), where["swap_seconds"])
        yield swaps
        yield seconds

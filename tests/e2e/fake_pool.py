"""A pool that exists only as a status, which a test writes."""

import copy
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fake_chat_server import serving

from warpbus.errors import DeviceError
from warpbus.server.options import ServerOptions
from warpbus.server.pool_page import History, create_pool_app

GB = 10**9


def gpu(name: str, model: str = "NVIDIA H100 80GB HBM3", memory: int = 80 * GB) -> dict[str, Any]:
    host, _, index = name.rpartition("/")
    return {
        "name": name,
        "host": host,
        "index": int(index),
        "model": model,
        "memory": memory,
        "used": 0,
        "free": memory,
        "share_used": 0.0,
        "state": "open",
        "leases": [],
        "utilization": None,
        "measured_memory": None,
    }


def lease(number: int, tenant: str, gpu: str | None, memory: float, share: float, **others: Any) -> dict[str, Any]:
    return {
        "id": f"{number:02x}9f86d081884c7d659a2feaa0c55ad0"[:32],
        "tenant": tenant,
        "memory": round(memory * GB),
        "memory_used": None,
        "share": share,
        "priority": 0,
        "gpu": gpu,
        "target": None,
        "state": "placed",
        "since": time.time() - 754,
        "idle": 0.4,
        "reason": f"most of {gpu} was free",
        **others,
    }


def event(age: float, kind: str, **others: Any) -> dict[str, Any]:
    named = dict.fromkeys(("lease", "tenant", "source", "target", "seconds", "bytes"))
    return {"time": time.time() - age, "kind": kind, **named, "text": "", **others}


class FakePool:
    """`gpus`, `leases`, `queue` and `events` are what a test makes them; `failure` is what the pool says instead."""

    def __init__(self) -> None:
        self.url = ""
        self.reset()

    def reset(self) -> None:
        """As new, for the next test: two GPUs of one machine, two tenants."""
        self.failure: str | None = None
        self.gpus = {name: gpu(name) for name in ("mill/0", "mill/1")}
        self.leases = [
            lease(1, "alice", "mill/0", 24, 0.5, memory_used=18 * GB),
            lease(2, "bob", "mill/0", 40, 0.25, memory_used=11 * GB),
        ]
        self.queue: list[dict[str, Any]] = []
        self.events = [event(900, "joined", source="mill", text="mill joined with 2 GPUs")]

    def moved(self, which: int, target: str, *, seconds: float, pause: float, copied: int) -> None:
        """A lease is elsewhere now."""
        moving = self.leases[which]
        self.events.append(
            event(
                0.0,
                "moved",
                lease=moving["id"],
                tenant=moving["tenant"],
                source=moving["gpu"],
                target=target,
                seconds=seconds,
                pause=pause,
                bytes=copied,
            )
        )
        moving["gpu"] = target

    async def status(self) -> dict[str, Any]:
        if self.failure:
            raise DeviceError(self.failure)
        now = time.time()
        gpus = copy.deepcopy(self.gpus)
        for each in self.leases:
            for name in {each["gpu"], each["target"]} & gpus.keys():
                there = gpus[name]
                there["leases"].append(each["id"])
                there["used"] += each["memory"]
                there["free"] -= each["memory"]
                there["share_used"] += each["share"]
                if name == each["gpu"]:
                    there["measured_memory"] = (there["measured_memory"] or 0) + (each["memory_used"] or 0)
                    there["utilization"] = min(1.0, (there["utilization"] or 0.0) + 0.9 * each["share"])
        return {
            "now": now,
            "gpus": list(gpus.values()),
            "leases": copy.deepcopy(self.leases),
            "queue": copy.deepcopy(self.queue),
            "events": copy.deepcopy(self.events),
        }


def remembered(hour: list[tuple[str, int, float]], moves: list[dict[str, Any]]) -> History:
    """An hour of samples: GPUs with the bytes reserved of them and how busy they are, on the whole."""
    history, now = History(), time.time()
    for age in range(3600, 0, -5):
        gpus = []
        for which, (name, reserved, busy) in enumerate(hour):
            wave = 0.5 + 0.5 * math.sin(age / (90 + 40 * which)) * math.cos(age / 370)
            used = round(reserved * (0.45 + 0.5 * wave))
            part = max(0.0, min(1.0, busy * (0.5 + 0.6 * wave)))
            gpus.append({"name": name, "used": reserved, "measured_memory": used, "utilization": part})
        history.add({"now": now - age, "gpus": gpus, "events": [m for m in moves if m["time"] <= now - age]})
    return history


@contextmanager
def fake_pool(
    fake: FakePool, options: ServerOptions | None = None, history: History | None = None
) -> Iterator[FakePool]:
    with serving(create_pool_app(fake.status, options or ServerOptions(), history or History(0.5))) as fake.url:
        yield fake

"""A machine's daemon in this process, with tenants' processes that hold nothing, and what its clients do."""

import asyncio
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from warpbus.pool.daemon.daemon import Daemon
from warpbus.pool.daemon.options import PoolOptions
from warpbus.pool.protocol.address import address
from warpbus.pool.protocol.channel import Channel, connect
from warpbus.pool.protocol.control_channel import ControlChannel
from warpbus.pool.protocol.frames import PROTOCOL, Kind
from warpbus.pool.protocol.wire import decode, encode

MEMORY = 10_000_000


class Served:
    """A daemon that runs in a thread of its own."""

    def __init__(self, options: PoolOptions, gpus: int, program: str) -> None:
        self.options = options
        self._program = program
        self._gpus = gpus
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.daemon = self.run(self._start())
        self.address = address(self.daemon.address)

    async def _start(self) -> Daemon:
        daemon = Daemon(self.options, program=self._program)
        first = daemon._gpus.gpus[0]  # a machine without GPUs has one
        daemon._gpus.gpus = [replace(first, name=f"{first.host}/{index}", index=index) for index in range(self._gpus)]
        await daemon.start()
        return daemon

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self.run(self.daemon.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def control(self, token: str | None = None) -> ControlChannel:
        return ControlChannel(self.address, token)

    def audit(self) -> list[dict]:
        return [json.loads(line) for line in (self.options.directory / "audit.jsonl").read_text().splitlines()]


@contextmanager
def serving(directory: Path, gpus: int = 1, program: str = "pool_fake_tenant", **options):
    given = {"name": "mill", "port": 0, "cpu_memory": "1GB", "spare": 2, "directory": directory, "max_lease_rate": 6e4}
    given |= options
    served = Served(PoolOptions(**given), gpus, program)
    try:
        yield served
    finally:
        served.close()


def lease(control: ControlChannel, wrong: int = 0, **options) -> dict:
    return control.ask("lease", {"memory": MEMORY + wrong, "share": 0.1, **options}, timeout=60)


def say_hello(where, granted: dict, **hello) -> tuple[Channel, Kind, dict]:
    channel = connect(where, bytes.fromhex(granted["lease"]), granted["key"])
    channel.send(Kind.HELLO, 0, encode({"protocol": PROTOCOL, "key": granted["key"], **hello}))
    frame = channel.receive(90)
    return channel, frame.kind, decode(frame.payload)


def entry(control: ControlChannel, granted: dict) -> dict | None:
    leases = control.ask("status")["leases"]
    return next((each for each in leases if each["id"] == granted["lease"]), None)


def until(condition, seconds: float = 90.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found

"""A daemon whose GPU is oversubscribed, with real tenants' processes: who is resident, moves, faults, the status."""

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from pool_daemons import entry, serving, until

from warpbus.errors import ConnectionLostError, LeaseLostError, UsageError
from warpbus.pool.broker.leases import PoolGpu
from warpbus.pool.client.connection import Connection
from warpbus.pool.daemon.audit import AuditLog
from warpbus.pool.daemon.options import PoolOptions
from warpbus.pool.daemon.residency import Residence
from warpbus.pool.daemon.sharing import SharedGpus
from warpbus.pool.daemon.swaps import Swapper
from warpbus.pool.protocol.geometry import contiguous
from warpbus.pool.protocol.instructions import Writer, call_prefix, layout
from warpbus.pool.protocol.signature import Input, Same, Signature

SIZE = 1 << 20
VECTOR = contiguous(torch.float32, (SIZE,))
ADD = Signature("aten::add_.Tensor", (Input(0), Input(1)), (), (VECTOR, VECTOR), (), (Same(0),))
MEMORY = 40_000_000
SCHEMA = json.loads((Path(__file__).parents[3] / "examples/kubernetes/pool_status.schema.json").read_text())


class Counter:
    """A client whose lease counts: two storages of 4 MiB, and batches that add one to the other."""

    def __init__(self, served, control, **wishes) -> None:
        asked = {"memory": MEMORY, "share": 0.3, **wishes}
        self.granted = control.ask("lease", asked, timeout=120)
        self.lease = self.granted["lease"]
        self.served = served
        self.control = control
        self.connection = Connection(served.address, bytes.fromhex(self.lease), self.granted["key"], patience=5.0)
        self.counted = 0
        writer = Writer()
        writer.define(0, ADD.encode())
        for handle in (1, 2):
            writer.new(handle, 4 * SIZE)
        writer.write(2, 0, torch.ones(SIZE).numpy().tobytes())
        self.connection.send(writer.take())

    def count(self) -> None:
        writer = Writer()
        writer.buffer += call_prefix(0) + layout(2, (), 0).pack(1, 2)
        self.counted += 1
        self.connection.send(writer.take())

    def check(self) -> None:
        """Count, and compare a number at each end of the storage."""
        self.count()
        for offset in (0, 4 * SIZE - 4):
            data = bytearray(4)
            self.connection.read(1, offset, memoryview(data))
            assert data == torch.full((1,), float(self.counted)).numpy().tobytes()

    @property
    def where(self) -> str:
        return self.served.daemon.host.tenancies[self.lease].residence.state

    @property
    def pid(self) -> int:
        return self.served.daemon.host.tenancies[self.lease].process.pid

    def close(self) -> None:
        self.connection.close()
        self.control.ask("release", {"lease": self.lease}, timeout=120)


TENANT = "warpbus.pool.tenant.process"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Two GPUs, on each of which one lease has room of three that it promises."""
    directory = tmp_path_factory.mktemp("mill")
    options = {"cpu_memory": "50MB", "oversubscribe": 3.0, "swap_memory": "1GB", "swap_time_slice": 0.5, "spare": 0}
    with serving(directory, gpus=2, program=TENANT, **options) as found:
        yield found


@pytest.fixture(scope="module")
def control(served):
    with served.control() as found:
        yield found


@pytest.fixture(scope="module")
def pair(served, control):
    """Two leases of one GPU."""
    both = [Counter(served, control, on="mill/0"), Counter(served, control, on="mill/0", priority=1)]
    yield both
    for each in both:
        each.close()


@pytest.fixture
def first(pair):
    """In host memory."""
    pair[0].check()
    pair[1].check()
    # The daemon hears of it after the client. Until then the other one's bytes count in host memory.
    until(lambda: [each.where for each in pair] == ["swapped out", "resident"])
    return pair[0]


@pytest.fixture
def second(pair):
    return pair[1]


def moved(control, counter, to):
    """Where a lease is after a move."""
    watch = counter.connection.watch
    return control.ask("migrate", {"lease": counter.lease, "to": to}, timeout=120, watch=watch)["moved"]


def test_leases_take_turns_and_the_status_tells_it(first, second, control, served, caplog):
    for each in (first, second, first, second):
        each.check()
    for each in (first, second):
        swaps = each.connection.swaps
        assert swaps.out >= 1
        assert swaps.back >= 1
        assert swaps.waits_for == ""
        assert swaps.waited >= swaps.last_wait > 0
    assert f"lease {first.lease[:8]} is in GPU memory again: it was in host memory for" in caplog.text
    assert "because a lease of priority 1 has work on mill/0" in caplog.text
    until(lambda: first.where == "swapped out")
    status = until(lambda: (s := control.ask("status"))["gpus"][0]["swapped"] > 8 * SIZE and s)
    jsonschema.validate(status, SCHEMA)
    gpu = status["gpus"][0]
    assert (gpu["oversubscribe"], gpu["promised"], gpu["used"]) == (3.0, 150_000_000, 2 * MEMORY)
    assert gpu["resident"] == MEMORY
    assert status["host_memory"] == [{"host": "mill", "swapped": gpu["swapped"], "limit": 1_000_000_000}]

    def residencies():
        return [entry(control, each.granted)["residency"] for each in (first, second)]

    # The status shows what the machine reported last.
    until(lambda: [each["state"] for each in residencies()] == ["swapped out", "resident"])
    found = residencies()
    assert found[0]["swaps"] >= 2
    assert found[0]["swap_seconds"] > 0
    with pytest.raises(UsageError, match="no GPU of the pool on mill/0 can hold"):
        control.ask("lease", {"memory": 60_000_000, "share": 0.1, "on": "mill/0"}, timeout=120)
    events = [line for line in served.audit() if line["what"] in ("swapped out", "swapped in")]
    assert {"lease", "gpu", "seconds", "bytes", "why"} <= set(events[0])


def test_a_higher_priority_preempts_a_busy_lease_between_two_batches(first, second):
    for _ in range(20):
        first.count()
    first.check()
    for _ in range(20):
        first.count()
    second.check()  # at once: the time slice of the first one is not over
    until(lambda: first.where == "swapped out")
    first.check()


def test_a_lease_in_host_memory_moves_to_another_gpu_and_back_to_one_whose_memory_is_taken(first, second, control):
    assert moved(control, first, "mill/1") == "mill/1"
    assert second.where == "swapped out"  # for the move
    first.check()
    second.check()
    until(lambda: (first.where, second.where) == ("resident", "resident"))  # the daemon hears of it after the client
    assert moved(control, first, "mill/0") == "mill/0"
    first.check()
    second.check()
    until(lambda: (first.where, second.where) == ("swapped out", "resident"))


def test_a_lease_in_host_memory_is_suspended_to_disk_and_comes_back(first, second, control):
    control.ask("suspend", {"lease": first.lease}, timeout=120)
    second.check()
    control.ask("resume", {"lease": first.lease, "on": None}, timeout=120)
    first.check()
    second.check()


@pytest.mark.parametrize("moment", ["out", "moving out", "moving in"])
def test_a_process_that_is_killed_loses_its_lease_and_no_other(pair, first, second, served, control, moment):
    pid = first.pid
    if moment == "moving out":
        first.check()
        os.kill(pid, signal.SIGSTOP)
        second.count()
        until(lambda: first.where == "swapping out")
    elif moment == "moving in":
        os.kill(pid, signal.SIGSTOP)
        served.run(_want(served, first.lease))  # stopped, it cannot say so itself
        until(lambda: first.where == "swapping in")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LeaseLostError, match="SIGKILL"):
        first.check()
    for _ in range(2):
        second.check()
    until(lambda: second.where == "resident")
    assert first.lease not in [each.lease for each in served.daemon.host.swaps._residency.leases]
    pair[0] = Counter(served, control, on="mill/0")


async def _want(served, lease: str) -> None:
    served.daemon.host.swaps.wanted(served.daemon.host.tenancies[lease])


def test_a_client_that_goes_frees_the_host_memory(pair, first, second, served, control):
    first.close()
    until(lambda: served.daemon.host.swaps._residency.swapped == 0)
    second.check()
    pair[0] = Counter(served, control, on="mill/0")


def test_host_memory_that_is_full_is_reported_and_waited_for(first, second, served, control):
    residency = served.daemon.host.swaps._residency
    limit, residency.limit = residency.limit, residency.swapped  # as if others had the rest
    try:
        first.count()
        facts = until(
            lambda: (found := entry(control, first.granted)["residency"])["why"].startswith("room in host") and found
        )
        assert (
            "room in host memory, which is full: 8.4 MB have to be swapped out to make room on mill/0" in facts["why"]
        )
        assert facts["waits"] > 0
        until(lambda: first.connection.watch() or first.connection.swaps.waits_for == facts["why"])
        second.check()  # nothing happened to it
    finally:
        residency.limit = limit
    first.check()


def test_a_client_waits_for_longer_than_its_grace_and_a_daemon_that_ends_amid_a_swap_leaves_nothing(tmp_path):
    options = {"cpu_memory": "50MB", "oversubscribe": 2.0, "swap_memory": "1GB", "grace": 1.5, "spare": 0}
    with serving(tmp_path, program=TENANT, **options) as short, short.control() as control:
        low, high = Counter(short, control), Counter(short, control, priority=1)
        low.check()
        high.check()
        low.count()
        waits = threading.Event()
        end = time.monotonic() + 3
        while time.monotonic() < end:
            high.check()
            waits.wait(0.05)
        low.check()
        pids = [low.pid, high.pid]
        os.kill(low.pid, signal.SIGSTOP)
        high.count()
        until(lambda: low.where == "swapping out")
    for pid in pids:
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
    with pytest.raises(LeaseLostError):
        high.check()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"oversubscribe": 0.5}, "--oversubscribe is 0.5: give 1 to 16"),
        ({"oversubscribe": float("nan")}, "--oversubscribe is nan"),
        ({"swap_time_slice": 0.0}, "--swap-time-slice is 0.0"),
    ],
)
def test_options_that_cannot_be_meant(options, why):
    with pytest.raises(UsageError, match=why):
        PoolOptions(**options)


def test_more_than_host_memory_can_take_is_not_promised():
    with pytest.raises(UsageError, match=r"promises 100.0 MB more than there is, and --swap-memory 10MB is 10.0 MB"):
        SharedGpus(PoolOptions(oversubscribe=2.0, cpu_memory="100MB", swap_memory="10MB"))
    assert SharedGpus(PoolOptions(cpu_memory="100MB", swap_memory="10MB")).swap_limit == 0


def test_a_process_that_was_given_up_on_and_went_out_after_all_comes_back():
    done = []

    async def work(tenant, operation, arguments, end):
        done.append((operation, tenant.residence.lease))
        if operation == "swap_out" and tenant is slow:
            raise ConnectionLostError("it says nothing of its move for 120 s")
        return {"seconds": 0.1, "bytes": 6}

    async def say(tenant, operation, arguments):
        pass

    async def scenario():
        gpu = PoolGpu("mill/0", "mill", 0, "H100", 10, (), 2.0)
        swaps = Swapper([gpu], 10**9, 0.01, AuditLog(None), work, say)
        for each in (slow, other):
            await swaps.admit(each, now_needed=False)
            swaps.started(each)
        assert (slow.residence.state, other.residence.state) == ("resident", "swapped out")
        swaps.wanted(other)
        async with asyncio.timeout(60):
            while ("swap_out", "slow") not in done:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            assert slow.residence.resident  # as far as is known
            swaps.wanted(slow)  # its process says otherwise
            while not (slow.residence.swaps and slow.residence.resident):
                await asyncio.sleep(0.01)
        await swaps.close()

    slow, other = (SimpleNamespace(residence=Residence(name, "mill/0", 6, 0.5, used=6)) for name in ("slow", "other"))
    asyncio.run(scenario())
    assert done[-1] == ("swap_in", "slow")

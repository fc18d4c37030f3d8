"""A lease goes to host memory and back in its own process: nothing of it changes, and its client is informed."""

import os
import threading

import pytest
import torch
from pool_migration_work import contents, execute, lease
from pool_tenants import acknowledged, ask, started, write

from warpbus.errors import StorageError
from warpbus.pool.protocol.frames import Kind
from warpbus.pool.protocol.geometry import contiguous
from warpbus.pool.protocol.instructions import call_prefix, layout
from warpbus.pool.protocol.signature import Input, Same, Signature
from warpbus.pool.protocol.wire import decode, encode
from warpbus.pool.tenant.suspension import suspend_to_memory

CPU = torch.device("cpu")
LARGE = 9 * 2**20 + 5  # more than two chunks
VECTOR = contiguous(torch.float32, (1024,))
ADD = Signature("aten::add_.Tensor", (Input(0), Input(1)), (), (VECTOR, VECTOR), (), (Same(0),))


def worked(batches: int):
    executor = lease(CPU)
    for number in range(1, batches + 1):
        execute(executor, number, LARGE)
    return executor


def test_an_executor_goes_on_as_if_it_had_never_been_away():
    executor = worked(4)
    for number in range(5, 9):
        failures = list(executor.failures)
        saved = suspend_to_memory(executor, 1 << 30)
        assert saved.used == executor.storages.used > 0
        executor.clear()
        assert (executor.storages.used, len(executor.storages.live)) == (0, 0)
        assert list(executor.failures) == failures  # for a client that comes back meanwhile
        saved.resume(executor)
        saved.close()
        assert list(executor.failures) == failures
        execute(executor, number, LARGE)
    assert contents(executor) == contents(worked(8))


def test_a_lease_that_does_not_fit_stays_as_it_was():
    executor = worked(3)
    before, descriptors = contents(executor), len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        StorageError, match=r"host memory is full: the lease has 9,[\d,]+ bytes, and 1,000,000 are left"
    ):
        suspend_to_memory(executor, 1_000_000)
    assert contents(executor) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_lease_that_cannot_be_written_stays_as_it_was(monkeypatch):
    executor = worked(3)
    before, descriptors = contents(executor), len(os.listdir("/proc/self/fd"))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(executor.storages, "stream", full)
        with pytest.raises(StorageError, match="No space left"):
            suspend_to_memory(executor, 1 << 30)
    assert contents(executor) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_return_that_finds_no_room_can_be_tried_again():
    executor = worked(3)
    before = contents(executor)
    saved = suspend_to_memory(executor, 1 << 30)
    executor.clear()
    memory, executor.storages.memory = executor.storages.memory, 5 * 2**20
    with pytest.raises(torch.OutOfMemoryError):
        saved.resume(executor)
    executor.clear()
    executor.storages.memory = memory
    saved.resume(executor)
    assert contents(executor) == before


@pytest.fixture(scope="module")
def daemon():
    with started(memory=1 << 24) as daemon:
        assert daemon.hear("ready", "failed").operation == "ready"
        yield daemon


@pytest.fixture
def session(daemon):
    """A client of a lease with a counter, and the number of its last batch."""
    channel, welcome = daemon.client()
    start = decode(welcome.payload)["executed"]

    def begin(writer):
        writer.define(0, ADD.encode())
        for handle in (1, 2):
            writer.new(handle, 4096)
        writer.write(2, 0, torch.ones(1024).numpy().tobytes())

    channel.send(Kind.BATCH, start + 1, write(begin))
    acknowledged(channel, start + 1)
    yield channel, start + 1
    again, welcome = daemon.client()
    number = decode(welcome.payload)["executed"] + 1
    again.send(Kind.BATCH, number, write(lambda writer: writer.free([1, 2])))
    acknowledged(again, number)
    again.close()


def count(writer):
    writer.buffer += call_prefix(0) + layout(2, (), 0).pack(1, 2)


def swap_out(daemon, channel, limit=1 << 30):
    daemon.tell("swap_out", limit=limit, why="a test wants it")
    event = daemon.hear("swapped_out", "failed")
    if event.operation == "swapped_out" and channel is not None:
        frame = channel.receive(90)
        facts = decode(frame.payload)
        assert (frame.kind, facts["state"], facts["why"]) == (Kind.SWAP, "out", "a test wants it")
    return event


def come_back(daemon, channel):
    daemon.tell("swap_in")
    assert daemon.hear("swapped_in", "failed").operation == "swapped_in"
    frame = channel.receive(90)
    facts = decode(frame.payload)
    assert (frame.kind, facts["state"]) == (Kind.SWAP, "in")
    return facts


def test_work_waits_for_the_return_and_its_client_is_reported(daemon, session):
    channel, number = session
    event = swap_out(daemon, channel)
    assert event.arguments["bytes"] > 8192
    assert event.arguments["seconds"] > 0
    channel.send(Kind.BATCH, number + 1, write(count))
    channel.send(Kind.ASK, 5, encode(["read", 1, 0, 4]))
    daemon.hear("wanted")
    daemon.tell("waits", why="a test")
    frame = channel.receive(90)
    assert (frame.kind, decode(frame.payload)) == (Kind.SWAP, {"state": "waits", "why": "a test"})
    facts = come_back(daemon, channel)
    assert facts["bytes"] == event.arguments["bytes"]
    assert facts["waited"] >= facts["seconds"] > 0
    assert facts["away"] > 0
    while (frame := channel.receive(90)).kind is Kind.ACK:
        pass
    assert (frame.kind, bytes(frame.payload)) == (Kind.DATA, torch.ones(1).numpy().tobytes())


def test_a_lease_that_is_out_is_charged_and_does_not_say_that_it_is_empty(daemon, session):
    channel, _ = session
    swap_out(daemon, channel)
    while (said := daemon.hear("clients").arguments)["memory"] != 8192:
        pass
    assert said["connected"] == 1
    come_back(daemon, channel)


def test_a_limit_of_host_memory_leaves_it_where_it_is(daemon, session):
    channel, number = session
    event = swap_out(daemon, channel, limit=4096)
    assert (event.operation, event.arguments["type"]) == ("failed", "StorageError")
    assert "host memory is full" in event.arguments["message"]
    channel.send(Kind.BATCH, number + 1, write(count))
    assert ask(channel, "read", 1, 0, 4)[1] == torch.ones(1).numpy().tobytes()


def test_a_client_that_breaks_off_meanwhile_comes_back_and_counts_once(daemon, session):
    channel, number = session
    swap_out(daemon, channel)
    channel.send(Kind.BATCH, number + 1, write(count))
    daemon.hear("wanted")
    channel.close()
    while daemon.hear("clients").arguments["connected"]:  # noticed although nothing is read from it
        pass
    again, welcome = daemon.client()
    assert decode(welcome.payload)["executed"] == number
    again.send(Kind.BATCH, number + 1, write(count))
    daemon.hear("wanted")
    come_back(daemon, again)
    assert ask(again, "read", 1, 0, 4)[1] == torch.ones(1).numpy().tobytes()
    again.close()


def test_what_does_not_fit_the_state_of_the_lease_is_refused(daemon, session):
    channel, _ = session
    daemon.tell("swap_in")
    assert "swapped, or was" in daemon.hear("failed").arguments["message"]
    swap_out(daemon, channel)
    daemon.tell("suspend", path="/nowhere")
    assert "swapped, or was" in daemon.hear("failed").arguments["message"]
    daemon.tell("swap_out", limit=1 << 30, why="again")
    assert "swapped, or was" in daemon.hear("failed").arguments["message"]
    come_back(daemon, channel)


def test_a_new_lease_may_begin_without_room():
    with started(swapped_out=True) as daemon:
        daemon.hear("ready")
        channel, welcome = daemon.client()
        assert welcome.kind is Kind.WELCOME
        channel.send(Kind.BATCH, 1, write(lambda writer: writer.new(1, 4096)))
        daemon.hear("wanted")
        facts = come_back(daemon, channel)
        assert facts["bytes"] == 0
        assert ask(channel, "usage")[1]["used"] == 4096
        channel.close()


def test_batches_and_swaps_in_any_order_give_what_they_give_without_swaps(daemon, session):
    channel, number = session
    done = threading.Event()

    def swap():
        while not done.is_set():
            daemon.tell("swap_out", limit=1 << 30, why="a test wants it")
            if daemon.hear("swapped_out", "failed").operation == "swapped_out":
                daemon.tell("swap_in")
                daemon.hear("swapped_in")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for index in range(1, 201):
            channel.send(Kind.BATCH, number + index, write(count))
            if index % 20 == 0:
                channel.send(Kind.ASK, index, encode(["read", 1, 0, 4]))
                while (frame := channel.receive(90)).kind is not Kind.DATA:
                    assert frame.kind in (Kind.ACK, Kind.SWAP)
                assert bytes(frame.payload) == torch.full((1,), float(index)).numpy().tobytes()
    finally:
        done.set()
        thread.join()

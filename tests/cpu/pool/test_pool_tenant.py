"""The process of a lease, started as its daemon does, with clients that come, go, lie and say nothing."""

import os
import select
import threading
import time

import pytest
import torch
from pool_tenants import SETUP, Daemon, acknowledged, ask, ended, started, write

from warpbus.pool.protocol import process_messages
from warpbus.pool.protocol.frames import PROTOCOL, READ, Kind
from warpbus.pool.protocol.geometry import contiguous
from warpbus.pool.protocol.instructions import call_prefix, layout
from warpbus.pool.protocol.signature import Input, New, Signature
from warpbus.pool.protocol.wire import decode
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.native_calls import NativeCallsLoader
from warpbus.pool.tenant.server import TenantServer

VECTOR = contiguous(torch.float32, (4,))
NEG = Signature("aten::neg", (Input(0),), (), (VECTOR,), (), (New(VECTOR, 16),))


@pytest.fixture(scope="module")
def daemon():
    with started() as daemon:
        assert daemon.hear("ready", "failed").operation == "ready"
        yield daemon


def test_a_session(daemon):
    channel, welcome = daemon.client()
    said = decode(welcome.payload)
    assert welcome.kind is Kind.WELCOME
    assert said.items() >= {"device": "cpu", "name": "a CPU", "gpu": "mill/0", "memory": 1 << 20}.items()
    start = said["executed"]
    while not daemon.hear("clients").arguments["connected"]:
        pass

    def first(writer):
        writer.define(0, NEG.encode())
        writer.new(1, 16)
        writer.write(1, 0, torch.arange(4.0).numpy().tobytes())
        writer.buffer += call_prefix(0) + layout(1, (), 1).pack(1, 2)

    channel.send(Kind.BATCH, start + 1, write(first))
    assert acknowledged(channel, start + 1) == start + 1
    for number in range(start + 2, start + 50):
        channel.send(Kind.BATCH, number, write(lambda writer: writer.seed(3)))
    assert acknowledged(channel, start + 49) == start + 49
    kind, data = ask(channel, "read", 2, 0, 16)
    assert (kind, data) == (Kind.DATA, (-torch.arange(4.0)).numpy().tobytes())
    assert ask(channel, "sync") == (Kind.ANSWER, None)
    assert ask(channel, "usage")[1]["used"] == 32

    channel.close()
    while daemon.hear("clients").arguments["connected"]:
        pass
    channel, welcome = daemon.client()
    assert decode(welcome.payload)["executed"] == start + 49
    channel.send(Kind.BATCH, start + 1, write(first))  # once more: it is skipped
    assert acknowledged(channel, 0) == start + 49
    assert ask(channel, "read", 2, 0, 16)[1] == data
    channel.send(Kind.BATCH, start + 50, write(lambda writer: writer.free([1, 2])))
    acknowledged(channel, start + 50)
    channel.send(Kind.BYE)
    while daemon.hear("clients").arguments["connected"]:
        pass
    channel.close()


def test_bytes_are_read_by_a_question_of_24_bytes(daemon):
    channel, welcome = daemon.client()
    start = decode(welcome.payload)["executed"]

    def fill(writer):
        writer.new(600, 16)
        writer.write(600, 0, bytes(range(16)))

    channel.send(Kind.BATCH, start + 1, write(fill), more=True)
    channel.send(Kind.READ, 78, READ.pack(600, 4, 8))
    frames = [channel.receive(90) for _ in range(2)]
    assert [(frame.kind, frame.number) for frame in frames] == [(Kind.ACK, start + 1), (Kind.DATA, 78)]
    assert bytes(frames[1].payload) == bytes(range(4, 12))
    for wrong in ((600, 12, 8), (600, 2**64 - 1, 8), (600, 0, 2**64 - 1), (2**64 - 1, 0, 4)):
        channel.send(Kind.READ, 79, READ.pack(*wrong))
        frame = channel.receive(90)
        assert (frame.kind, frame.number, decode(frame.payload)["type"]) == (Kind.ERROR, 79, "ProtocolError")
    channel.send(Kind.READ, 80, bytes(READ.size - 1))
    frame = channel.receive(90)
    assert frame.kind is Kind.ERROR
    assert "a READ frame of 23 bytes: expected 24" in decode(frame.payload)["message"]
    assert ended(channel)
    again, _ = daemon.client(acknowledged=start + 1)
    again.send(Kind.BATCH, start + 2, write(lambda writer: writer.free([600])))
    acknowledged(again, start + 2)
    again.close()


def test_failures_are_reported_and_reported_again_to_who_has_not_heard(daemon):
    channel, welcome = daemon.client()
    start = decode(welcome.payload)["executed"]

    def fails(writer):
        writer.define(1, NEG.encode())
        writer.buffer += call_prefix(1) + layout(1, (), 1).pack(999, 1000)

    channel.send(Kind.BATCH, start + 1, write(fails))
    frame = channel.receive(90)
    failure = decode(frame.payload)
    assert (frame.kind, frame.number, failure["batch"]) == (Kind.ERROR, 0, start + 1)
    assert "999" in failure["message"]
    assert ask(channel, "read", 1000, 0, 4) == (Kind.ERROR, failure)
    kind, why = ask(channel, "read", 5, 0, 4)
    assert (kind, why["type"]) == (Kind.ERROR, "ProtocolError")
    channel.close()
    again, _ = daemon.client(acknowledged=start)
    assert decode(again.receive(90).payload) == failure
    again.send(Kind.BATCH, start + 2, write(lambda writer: writer.free([1000])))
    acknowledged(again, start + 2)
    again.close()
    third, _ = daemon.client(acknowledged=start + 2)
    assert ask(third, "sync")[0] is Kind.ANSWER
    third.close()


def test_a_gap_ends_the_connection_but_not_the_lease(daemon):
    channel, welcome = daemon.client()
    start = decode(welcome.payload)["executed"]
    channel.send(Kind.BATCH, start + 2, b"")
    frame = channel.receive(90)
    assert frame.kind is Kind.ERROR
    assert "missing" in decode(frame.payload)["message"]
    assert channel.receive(90).kind is Kind.BYE
    assert ended(channel)
    other, welcome = daemon.client()
    assert decode(welcome.payload)["executed"] == start
    other.send(Kind.BATCH, start + 1, b"\xff")
    assert "no instruction" in decode(other.receive(90).payload)["message"]
    other.close()
    last, welcome = daemon.client()
    assert decode(welcome.payload)["executed"] == start + 1
    last.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": bytes(32)}, "not the key"),
        ({"key": None}, "not the key"),
        ({"protocol": 9}, f"protocol {PROTOCOL}"),
        ({"migration_token": b"x"}, "no lease is to move"),
    ],
)
def test_strangers_are_refused(daemon, changes, message):
    channel, answer = daemon.client(**changes)
    assert answer.kind is Kind.REFUSED
    assert message in decode(answer.payload)["message"]
    channel.close()


def test_silence_and_nonsense_hold_nobody_up(daemon):
    silent = [daemon.socket() for _ in range(4)]
    nonsense = daemon.socket()
    nonsense.send(b"GET / HTTP/1.1\r\n\r\n")
    channel, welcome = daemon.client()
    assert welcome.kind is Kind.WELCOME
    wrong, _ = daemon.client(key=bytes(32))  # it does not replace the client
    wrong.close()
    assert ask(channel, "sync")[0] is Kind.ANSWER
    assert nonsense.recv(1) == b""
    second, welcome = daemon.client()  # one with the key does
    assert welcome.kind is Kind.WELCOME
    assert ended(channel)
    assert ask(second, "sync")[0] is Kind.ANSWER
    for each in (*silent, nonsense):
        each.close()
    second.close()


def test_a_lease_that_cannot_be_set_up():
    with started(saved="/nowhere/state") as daemon:
        said = daemon.hear("failed", "ready")
        assert (said.operation, said.arguments["type"]) == ("failed", "StorageError")
        assert daemon.process.wait(90) == 1


def test_suspended_resumed_and_ended(tmp_path):
    path = tmp_path / "state"
    with started() as daemon:
        daemon.hear("ready")
        channel, _ = daemon.client()

        def first(writer):
            writer.new(1, 16)
            writer.write(1, 0, b"0123456789abcdef")

        channel.send(Kind.BATCH, 1, write(first))
        acknowledged(channel, 1)
        process_messages.send(daemon.end, "suspend", {"path": str(path)})
        assert daemon.hear("suspended", "failed").operation == "suspended"
        channel.send(Kind.BATCH, 2, write(lambda writer: writer.free([1])))
        channel.close()
        late, answer = daemon.client()
        assert answer.kind is Kind.REFUSED
        assert "suspended" in decode(answer.payload)["message"]
        late.close()
        daemon.end.close()  # its daemon is gone
        assert daemon.process.wait(90) == 0
    with started(saved=str(path)) as daemon:
        daemon.hear("ready")
        channel, welcome = daemon.client()
        assert decode(welcome.payload)["executed"] == 1
        assert ask(channel, "read", 1, 0, 16)[1] == b"0123456789abcdef"
        process_messages.send(daemon.end, "end", {"reason": "it was released"})
        assert channel.receive(90).kind is Kind.BYE
        channel.close()
        assert daemon.process.wait(90) == 0


def test_memory_that_no_quota_counts_is_limited_too(daemon):
    channel, welcome = daemon.client()
    start = decode(welcome.payload)["executed"]
    big = contiguous(torch.float32, (1,))
    # 16 GiB, known only afterwards.
    repeat = Signature("aten::repeat_interleave.self_int", (Input(0), 1 << 32), (), (big,), (), None)

    def greedy(writer):
        writer.define(0, repeat.encode())
        writer.new(1, 4)
        writer.buffer += call_prefix(0) + layout(1, (), repeat.results).pack(1, *range(10, 10 + repeat.results))
        writer.free([1, *range(10, 10 + repeat.results)])

    channel.send(Kind.BATCH, start + 1, write(greedy))
    assert decode(channel.receive(60).payload)["type"] == "OutOfMemoryError"
    assert ask(channel, "sync")[0] is Kind.ANSWER
    channel.close()


def test_a_gpu_that_has_failed(monkeypatch):
    def fails():
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    monkeypatch.setattr("warpbus.pool.tenant.server._SECONDS_TO_HEAR", 0.5)
    daemon = Daemon.__new__(Daemon)
    daemon.end, other = process_messages.pair()
    tenant = TenantServer(other, SETUP, Executor(torch.device("cpu"), Quota(1 << 20, 1.0)), NativeCallsLoader(None))
    serving = threading.Thread(target=tenant.serve)
    serving.start()
    channel, _ = daemon.client()
    tenant._meter.end = fails
    channel.send(Kind.BATCH, 1, b"")
    assert ended(channel)
    channel, answer = daemon.client()
    said = decode(answer.payload)
    assert (answer.kind, said["type"]) == (Kind.REFUSED, "LeaseLostError")
    assert said["message"].endswith("CUDA error: an illegal memory access was encountered")
    serving.join(90)
    assert not serving.is_alive()
    daemon.end.close()
    other.close()


def test_it_waits_without_working(daemon):
    """An idle tenant costs no time of a processor."""
    time.sleep(0.2)
    before = _cpu_seconds(daemon.process.pid)
    select.select([], [], [], 1.0)
    assert _cpu_seconds(daemon.process.pid) - before < 0.3


def _cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

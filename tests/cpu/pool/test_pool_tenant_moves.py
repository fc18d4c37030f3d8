"""A lease that moves from one process to another while its client goes on, and moves that do not come about."""

import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch
from pool_doors import read_preamble
from pool_tenants import acknowledged, ask, ended, started, write

from warpbus.errors import ConnectionLostError
from warpbus.pool.protocol import process_messages
from warpbus.pool.protocol.address import address
from warpbus.pool.protocol.frames import Kind
from warpbus.pool.protocol.geometry import contiguous
from warpbus.pool.protocol.instructions import call_prefix, layout
from warpbus.pool.protocol.signature import Input, Same, Signature
from warpbus.pool.protocol.wire import decode
from warpbus.pool.tenant.time_slices import GpuQueue

TOKEN, ARRIVAL_ID = b"t" * 32, b"d" * 16
VECTOR = contiguous(torch.float32, (1024,))
ADD = Signature("aten::add_.Tensor", (Input(0), Input(1)), (), (VECTOR, VECTOR), (), (Same(0),))


def start(writer):
    writer.define(0, ADD.encode())
    for handle in (1, 2):
        writer.new(handle, 4096)
    writer.write(2, 0, torch.ones(1024).numpy().tobytes())


def count(writer):
    writer.buffer += call_prefix(0) + layout(2, (), 0).pack(1, 2)


@contextmanager
def arrival_socket(path, daemon):
    """Where the destination's machine listens. Its address, and what it was asked for."""
    asked = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def hand_over():
        try:
            while True:
                sock, _ = listener.accept()
                with sock, suppress(ConnectionLostError):  # it has another migration_token
                    asked.append(read_preamble(sock, TOKEN))
                    process_messages.send(daemon.end, "client", {}, sock)
        except OSError:
            pass

    thread = threading.Thread(target=hand_over)
    thread.start()
    try:
        yield f"warpbus+unix://{path}", asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def move(daemon, to, migration_token=TOKEN):
    with socket.socket(socket.AF_UNIX) as sock:
        with suppress(FileNotFoundError):  # nobody is there
            sock.connect(address(to).path)
        process_messages.send(
            daemon.end,
            "migrate",
            {"to": to, "ca": None, "migration_token": migration_token, "lease_id": ARRIVAL_ID},
            sock,
        )


@contextmanager
def neighbour(path):
    """One that takes turns on the GPU, and has the turn for most of the time."""
    line, over = GpuQueue(path), threading.Event()

    def work():
        while not over.is_set():
            if line.advance():
                time.sleep(0.005)
                line.leave()
            time.sleep(0.0005)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        line.close()


@pytest.mark.parametrize("in_slices", [False, True])
def test_a_lease_moves(in_slices, tmp_path):
    ready = {"migration_token": TOKEN, "gpu": "mill/1"}
    line = tmp_path / "line"
    line.touch()
    with ExitStack() as stack:
        if in_slices:
            stack.enter_context(neighbour(line))
        old = stack.enter_context(started(queue_file=str(line), share=0.5))
        new, small = (stack.enter_context(started(**ready, **changes)) for changes in ({}, {"memory": 4096}))
        for each in (old, new, small):
            assert each.hear("ready", "failed").operation == "ready"
        old.tell("neighbours", count=int(in_slices))
        channel, _ = old.client()
        early, answer = new.client()
        assert (answer.kind, decode(answer.payload)["type"]) == (Kind.REFUSED, "ConnectionLostError")
        early.close()
        channel.send(Kind.BATCH, 1, write(start))
        for number in range(2, 12):
            channel.send(Kind.BATCH, number, write(count))
        acknowledged(channel, 11)

        # Nobody is there, the migration token is wrong, it does not fit: the lease stays each time.
        with arrival_socket(tmp_path / "small", small) as (to, _):
            for where, migration_token in ((f"{to}-nobody", TOKEN), (to, b"x" * 32), (to, TOKEN)):
                move(old, where, migration_token)
                assert old.hear("moved", "failed").operation == "failed"
        channel.send(Kind.BATCH, 12, write(count))
        acknowledged(channel, 12)

        number, moved = 12, []
        with arrival_socket(tmp_path / "new", new) as (to, asked):
            move(old, to)
            while not moved or not moved[-1]["final"]:
                frame = channel.receive(0.02)
                if frame is None:
                    number += 1
                    channel.send(Kind.BATCH, number, write(count))
                elif frame.kind is Kind.MOVED:
                    moved.append(decode(frame.payload))
            assert old.hear("moved", "failed").operation == "moved"
        assert moved == [{"address": to, "final": False}, {"address": to, "final": True}]
        assert new.hear("arrived")
        assert asked == [ARRIVAL_ID]
        late, answer = old.client()
        assert (answer.kind, decode(answer.payload)) == (Kind.MOVED, moved[-1])
        late.close()
        process_messages.send(old.end, "end", {"reason": "it has moved"})
        channel.close()

        channel, welcome = new.client()
        welcome = decode(welcome.payload)
        assert (welcome["gpu"], 12 <= welcome["executed"] <= number) == ("mill/1", True)
        for again in range(max(welcome["executed"] - 2, 1), number + 1):
            channel.send(Kind.BATCH, again, write(count))
        acknowledged(channel, number)
        total = torch.frombuffer(bytearray(ask(channel, "read", 1, 0, 4096)[1]), dtype=torch.float32)
        assert total.tolist() == [number - 1] * 1024
        channel.close()


def test_a_client_claims_its_lease_when_the_source_has_died(tmp_path):
    with started(migration_token=TOKEN) as new, arrival_socket(tmp_path / "lease_id", new) as (to, _):
        new.hear("ready")
        with started() as old:
            old.hear("ready")
            channel, _ = old.client()
            channel.send(Kind.BATCH, 1, write(start))
            acknowledged(channel, 1)
            move(old, to)
            while channel.receive(90).kind is not Kind.MOVED:
                pass
            old.process.kill()
            old.process.wait()
        assert ended(channel)
        channel, answer = new.client(claim=True)
        said = decode(answer.payload)
        if answer.kind is Kind.WELCOME:  # all was there
            assert new.hear("arrived")
            channel.send(Kind.BATCH, 2, write(count))
            acknowledged(channel, 2)
            assert ask(channel, "read", 1, 0, 4)[1] == torch.ones(1).numpy().tobytes()
        else:
            assert (answer.kind, said["type"]) == (Kind.REFUSED, "LeaseLostError")
            assert new.hear("failed")
        channel.close()

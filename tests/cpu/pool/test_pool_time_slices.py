"""Turns: tenants of one GPU in a line, by a fake clock on a fake GPU, and as processes that are killed."""

import random
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from pool_tenants import acknowledged, started, write

from warpbus.pool.daemon.options import PoolOptions
from warpbus.pool.daemon.sharing import SharedGpus
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.frames import Kind
from warpbus.pool.protocol.wire import decode, encode
from warpbus.pool.tenant.time_slices import NAP, GpuQueue, TimeSlices

HOLDER = """
import sys, time
from pathlib import Path
from warpbus.pool.tenant.time_slices import GpuQueue
line = GpuQueue(Path(sys.argv[1]))
print(line.advance(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "line"
    path.touch()
    return path


@pytest.fixture
def line(file):
    """Makes places in one line."""
    with ExitStack() as stack:

        def another():
            found = GpuQueue(file)
            stack.callback(lambda: found.close())
            return found

        yield another


class Client:
    """A tenant as its process is: it launches what its client sends, and knows when the fake GPU is done.

    Args:
        batch: seconds that one takes, or a function that says so.
        window: batches after which the client waits for the GPU, and then for `think` seconds more; None: never.
    """

    def __init__(self, share, line, batch, window=None, think=0.0):
        self.share = share
        self.slices = TimeSlices(share, line, 0.0)
        self.line = line
        self.batch = batch if callable(batch) else lambda: batch
        self.window, self.think = window, think
        self.ends = []  # of what was launched
        self.worked = 0.0
        self.had = 0.0  # the GPU, with work or without
        self.last = 0.0
        self.sent = 0
        self.next = 0.0
        self.comes = 0.0
        self.longest = 0.0  # time that a batch waited
        self.naps = 0
        self.kept = False  # a batch is there that waits

    def step(self, now):
        """What the loop of a process does. Returns whether the GPU has work of this tenant."""
        self.had += now - self.last if self.line.first else 0.0
        self.last = now
        self.ends = [end for end in self.ends if end > now]
        if self.window and self.sent == self.window:
            if self.ends:
                self.comes = now + self.think
            else:
                self.sent = 0
        there = now >= self.comes and self.sent != self.window and len(self.ends) < 2
        if now >= self.next or (there and not self.kept):  # what comes from a client wakes its process
            self.slices.attend(now, waiting=self.kept, running=bool(self.ends))
            self.kept = there and not self.slices.may_execute(now)
            if there and not self.kept:
                took = self.batch()
                self.ends.append(max([now, *self.ends]) + took)
                self.worked += took
                self.sent += 1
                self.longest = max(self.longest, now - self.comes)
                self.comes = now
            patience = self.slices.patience(now, waiting=self.kept)
            self.next = now + (1.0 if patience is None else patience)
            self.naps += 1
        return bool(self.ends)


def run(clients, seconds=20.0):
    now, chance = 0.0, random.Random(1)
    while now < seconds:
        busy = [client for client in clients if client.step(now)]
        assert len(busy) <= 1, "two tenants have work on the GPU"
        now += NAP * chance.uniform(0.2, 0.6)
    return now


def fair(clients, what="worked"):
    got = [getattr(client, what) for client in clients]
    for client, seconds in zip(clients, got, strict=True):
        assert seconds / sum(got) == pytest.approx(client.share, abs=0.02)


@pytest.mark.parametrize("shares", [(0.25, 0.75), (0.5, 0.5), (0.1, 0.9), (0.2, 0.3, 0.5), (0.1, 0.1, 0.8)])
@pytest.mark.parametrize("batch", [0.0004, 0.0031, 0.0125])
def test_tenants_that_always_have_work_get_their_shares(shares, batch, line):
    clients = [Client(share, line(), batch) for share in shares]
    now = run(clients)
    fair(clients)
    assert sum(client.worked for client in clients) > 0.85 * now


@pytest.mark.parametrize("shares", [(0.25, 0.75), (0.2, 0.3, 0.5)])
def test_also_with_batches_of_all_sizes(shares, line):
    chance = random.Random(0)
    sizes = [lambda: chance.expovariate(1000), lambda: 0.03 * chance.random(), lambda: 0.007]
    clients = [Client(share, line(), size) for share, size in zip(shares, sizes, strict=False)]
    run(clients)
    fair(clients)


@pytest.mark.parametrize("shares", [(0.25, 0.75), (0.75, 0.25), (0.2, 0.3, 0.5)])
def test_also_when_clients_wait_for_results(shares, line):
    clients = [
        Client(share, line(), batch, window=1, think=think)
        for share, batch, think in zip(shares, (0.0125, 0.011, 0.002), (0.0003, 0.0002, 0.0003), strict=False)
    ]
    run(clients)
    fair(clients, "had")  # what a client does with its time is its own affair


@pytest.mark.parametrize("batch", [0.001, 0.2])
def test_batches_beyond_a_turn_are_made_up_for(batch, line):
    clients = [Client(0.25, line(), batch), Client(0.75, line(), 0.002)]
    run(clients, 60.0)
    fair(clients)


def test_shares_that_are_less_than_all_of_it(line):
    clients = [Client(0.25, line(), 0.004), Client(0.25, line(), 0.001)]
    now = run(clients)
    for client in clients:
        assert client.worked / now == pytest.approx(0.25, abs=0.02)


def test_alone_it_gets_its_share_and_no_more(line):
    client, _resting = Client(0.25, line(), 0.004), Client(0.75, line(), 0.004)
    now = run([client])
    assert client.worked / now == pytest.approx(0.25, abs=0.01)


def test_below_its_share_nobody_waits_for_who_rests(line):
    client, _resting = Client(0.5, line(), 0.002, window=1, think=0.01), Client(0.5, line(), 0.002)
    run([client], 10.0)
    assert client.longest < 4 * NAP


def test_one_that_waits_has_its_turn_when_the_other_one_is_over(line):
    small, large = Client(0.25, line(), 0.001, window=1, think=0.1), Client(0.75, line(), 0.002)
    run([small, large], 20.0)
    assert 0.01 < small.longest < 0.75 * 0.05 + 2 * 0.002 + 4 * NAP


def test_waiting_is_no_busy_waiting(line):
    small, large = Client(0.1, line(), 0.01), Client(0.9, line(), 0.002)
    now = run([small, large])
    assert small.naps < now / NAP


def test_in_a_line_nobody_is_overtaken(line):
    a, b, c = line(), line(), line()
    assert a.advance()
    assert not a.others()
    assert not b.advance()
    assert not c.advance()
    assert a.others()
    a.leave()
    assert not a.queued
    assert not a.advance()
    assert not c.advance()
    assert b.advance()
    b.leave()
    assert not a.advance()
    assert c.advance()
    c.leave()
    assert a.advance()


def test_a_line_that_is_full(line):
    many = [line() for _ in range(20)]
    assert [each.advance() for each in many].count(True) == 1
    assert not many[-1].queued
    for turn in range(20):
        first = [each for each in many if each.advance()]
        assert len(first) == 1, turn
        first[0].leave()
        many.remove(first[0])
    assert not many


def test_who_gives_up_its_place_is_not_waited_for(line):
    first, second, third = (TimeSlices(0.3, line(), 0.0) for _ in range(3))
    assert first.may_execute(0.0)
    assert not second.may_execute(0.001)
    assert not third.may_execute(0.001)
    second.attend(0.002, waiting=False, running=False)  # its client has gone
    first.give_up(0.003)
    assert third.may_execute(0.004)


def test_the_turn_goes_on_a_moment_without_work(line):
    slices, other = TimeSlices(0.5, line(), 0.0), TimeSlices(0.5, line(), 0.0)
    assert slices.may_execute(0.0)
    slices.attend(0.004, waiting=False, running=True)
    slices.attend(0.0045, waiting=False, running=False)
    assert not other.may_execute(0.0046)
    assert slices.patience(0.0046, waiting=False) == 0.001
    slices.attend(0.0056, waiting=False, running=False)
    assert other.may_execute(0.0057)
    assert slices.patience(0.0057, waiting=False) is None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_who_is_killed_leaves_the_line(how, file, line):
    mine = line()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(file)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "True\n"
        assert not mine.advance()
    finally:
        holder.send_signal(how)
        holder.wait()
        holder.stdout.close()
    assert mine.advance()


def test_processes_wait_for_their_turn_and_others_go_on(file, line):
    """The test has the turn; of two processes one is killed while it waits, the other one gets the turn."""
    mine = line()
    with ExitStack() as stack:
        tenants = [stack.enter_context(started(queue_file=str(file), share=0.5)) for _ in range(2)]
        channels = []
        for tenant in tenants:
            tenant.hear("ready")
            channel, welcome = tenant.client()
            assert decode(welcome.payload)["executed"] == 0
            channels.append(channel)
            tenant.tell("neighbours", count=1)
            channel.send(Kind.BATCH, 1, write(lambda writer: writer.new(1, 16)))
            assert acknowledged(channel, 1) == 1
        while not mine.advance():
            pass
        for tenant, channel in zip(tenants, channels, strict=True):
            channel.send(Kind.BATCH, 2, write(lambda writer: writer.write(1, 0, torch.ones(4).numpy().tobytes())))
            while not mine.others():
                pass
            assert not select.select([channel], [], [], 0.05)[0]
            if tenant is tenants[0]:
                tenant.process.kill()
                tenant.process.wait()
        mine.leave()
        assert acknowledged(channels[1], 2) == 2
        tenants[1].tell("neighbours", count=0)
        while not mine.advance():
            pass
        channels[1].send(Kind.BATCH, 3, write(lambda writer: writer.free([1])))
        assert acknowledged(channels[1], 3) == 3  # nobody is left to take turns with
        for channel in channels:
            channel.close()


def test_before_a_channel_waits_it_says_so():
    left, right = socket.socketpair()
    one, other = Channel(left), Channel(right)
    waits = []
    one.before_waiting = lambda: waits.append(True)
    assert one.receive(0.0) is None
    one.send(Kind.BATCH, 1, b"small")
    assert not waits
    assert one.receive(0.01) is None
    assert waits
    waits.clear()
    reader = threading.Thread(target=lambda: [other.receive(90) for _ in range(2)])
    one.before_waiting = lambda: (waits.append(True), reader.ident or reader.start())
    one.send(Kind.BATCH, 2, bytes(16 << 20))
    assert waits
    reader.join()
    one.close()
    other.close()


def test_who_waits_for_its_client_lets_others_have_the_gpu(file, line):
    mine = line()
    with started(queue_file=str(file), share=0.5) as tenant:
        tenant.hear("ready")
        channel, _ = tenant.client()
        tenant.tell("neighbours", count=1)
        channel.send(Kind.BATCH, 1, write(lambda writer: writer.new(1, 1 << 20)))
        assert acknowledged(channel, 1) == 1
        # Enough answers for the process to be stuck in one of them, and batches between, for each of which it needs
        # the turn: it is stuck where it has it.
        for number in range(2, 40):
            channel.send(Kind.BATCH, number, write(lambda writer: writer.seed(3)))
            channel.send(Kind.ASK, number, encode(["read", 1, 0, 1 << 20]))
        while not mine.advance():
            pass
        mine.leave()
        read = 0
        while read < 38 << 20:
            frame = channel.receive(90)
            read += len(frame.payload) if frame.kind is Kind.DATA else 0
        channel.close()


def test_to_be_suspended_no_turn_is_waited_for(file, line, tmp_path):
    """A batch waits for its turn meanwhile, not executed any more: its client sends it to where the lease goes on."""
    mine = line()
    with started(queue_file=str(file), share=0.5) as tenant:
        tenant.hear("ready")
        channel, _ = tenant.client()
        tenant.tell("neighbours", count=1)
        channel.send(Kind.BATCH, 1, write(lambda writer: writer.new(1, 16)))
        assert acknowledged(channel, 1) == 1  # it may have been read before the neighbours; the next one is not
        while not mine.advance():
            pass
        channel.send(Kind.BATCH, 2, write(lambda writer: writer.new(2, 16)))
        while not mine.others():
            pass
        tenant.tell("suspend", path=str(tmp_path / "state"))
        assert tenant.hear("suspended", "failed").operation == "suspended"
        while mine.others():
            pass
        mine.leave()
        channel.close()
        with started(saved=str(tmp_path / "state")) as resumed:
            resumed.hear("ready")
            again, welcome = resumed.client()
            assert decode(welcome.payload)["executed"] == 1
            again.close()


def test_a_gpu_has_one_line_and_a_cpu_none(tmp_path):
    gpus = SharedGpus(PoolOptions(directory=tmp_path, sharing="slices"))
    if torch.cuda.is_available():
        pytest.skip("it is for machines without a GPU")
    assert gpus.queue_file("a/0") is None
    gpus._installed = [None, None]  # as if it had two
    with gpus:
        one, again, other = (GpuQueue(Path(gpus.queue_file(gpu))) for gpu in ("a/0", "a/0", "a/1"))
        assert one.advance()
        assert not again.advance()
        assert other.advance()
        for each in (one, again, other):
            each.close()

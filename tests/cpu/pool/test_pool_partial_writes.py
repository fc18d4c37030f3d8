"""A migration copies the written part of a storage again, where calls write; the copy is the same to the bit."""

import random
import socket
import threading

import pytest
import torch
from pool_hand import Hand
from pool_migration_work import ask
from pool_random_lease import TOKEN

from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.wire import decode
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.migration_destination import ENDS, DestinationState, MigrationDestination
from warpbus.pool.tenant.migration_source import MigrationReport, MigrationSource

CPU = torch.device("cpu")
MEGABYTE = 1 << 20


class Move:
    """A move of an executor to another one, which works in a thread."""

    def __init__(self, here: Executor, little: int = MEGABYTE) -> None:
        self.here, self.there = here, Executor(CPU, Quota(64 * MEGABYTE, 1.0))
        ours, theirs = (Channel(sock) for sock in socket.socketpair())
        self.destination = MigrationDestination(self.there, migration_token=TOKEN)
        self.source = MigrationSource(here, ours, migration_token=TOKEN, little=little)
        self._thread = threading.Thread(target=self._arrive, args=(theirs,))
        self._thread.start()
        ask(self.source)

    def _arrive(self, channel: Channel) -> None:
        hello = channel.receive(10.0)
        assert hello is not None
        self.destination.admit(channel, decode(hello.payload))
        while self.destination.step(10.0) not in ENDS:
            pass

    def copy_ahead(self, budget: int | None = None) -> str:
        return self.source.copy_ahead(budget).stop_reason

    def finish(self) -> MigrationReport:
        report = self.source.finish()
        self._thread.join()
        assert self.destination.state is DestinationState.LIVING
        sizes = self.here.storages.sizes()
        assert self.there.storages.sizes() == sizes
        for handle, nbytes in sizes.items():
            assert self.there.storages.read(handle, 0, nbytes) == self.here.storages.read(handle, 0, nbytes)
        return report


@pytest.fixture
def hand() -> Hand:
    return Hand(Executor(CPU, Quota(64 * MEGABYTE, 1.0)))


def test_only_the_written_part_is_copied_in_the_pause(hand: Hand) -> None:
    cache = hand.put(torch.arange(2 * MEGABYTE, dtype=torch.float32))  # 8 MB
    part = hand.view(cache, (1000,), (1,), 500_000)
    hand.send()
    move = Move(hand.executor)
    while not move.copy_ahead():
        pass
    for _ in range(3):
        hand.call("aten::add_.Tensor", part, part)
        hand.send()
    while not move.copy_ahead():
        pass
    report = move.finish()
    assert report.ahead == 8 * MEGABYTE
    assert 4000 <= report.paused < 100_000


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_part_that_is_written_while_the_storage_is_copied(hand: Hand, pieces: int) -> None:
    cache = hand.put(torch.arange(3 * MEGABYTE // 4, dtype=torch.float32))
    parts = [hand.view(cache, (1000,), (1,), offset) for offset in (500, 700_000)]
    hand.send()
    move = Move(hand.executor, little=0)
    while move.source._precopy.sent < MEGABYTE:
        move.copy_ahead(1)
    for part in parts[:pieces]:
        hand.call("aten::add_.Tensor", part, part)
        hand.send()
    report = move.finish()
    assert report.ahead == MEGABYTE
    assert report.paused < 6 * MEGABYTE


def test_what_else_writes_has_all_of_the_storage_copied_again(hand: Hand) -> None:
    cache = hand.put(torch.zeros(MEGABYTE, dtype=torch.float32))
    part = hand.view(cache, (10,), (1,), 20)
    hand.send()
    move = Move(hand.executor)
    while not move.copy_ahead():
        pass
    hand.call("aten::add_.Tensor", part, part)
    hand.writer.write(cache, 3 * MEGABYTE, b"an upload, which is no call")
    hand.call("aten::add_.Tensor", part, part)
    hand.send()
    report = move.finish()
    assert report.paused >= 4 * MEGABYTE


@pytest.mark.parametrize("seed", range(20))
def test_random_writes_between_random_pieces(hand: Hand, seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    elements = [rng.choice((10, 1000, 700_000)) for _ in range(4)]
    tensors = [hand.put(torch.randn(n, generator=generator)) for n in elements]
    hand.send()
    move = Move(hand.executor, little=0)
    for _ in range(40):
        if rng.random() < 0.6:
            move.copy_ahead(rng.choice((1, 1000, 3 * MEGABYTE)))
            continue
        at = rng.randrange(len(tensors))
        length = rng.randrange(min(elements[at], 500) + 1)
        step = rng.choice((1, 2)) if 2 * length <= elements[at] else 1
        offset = rng.randrange(elements[at] - step * length + 1)
        part = hand.view(tensors[at], (length,), (step,), offset)
        if rng.random() < 0.8:
            hand.call("aten::mul_.Tensor", part, part)
        elif rng.random() < 0.5:
            hand.writer.write(tensors[at], 0, bytes(4))
        else:
            hand.writer.free([tensors[at]])
            tensors[at] = hand.put(torch.randn(elements[at], generator=generator))
        hand.send()
    move.finish()


def test_a_move_that_fails_ends_the_log_of_writes(hand: Hand) -> None:
    cache = hand.put(torch.zeros(10))
    hand.send()
    move = Move(hand.executor)
    assert hand.executor.storages.writes == {}
    move.source._channel.close()
    with pytest.raises(RuntimeError):
        move.source.finish()
    assert hand.executor.storages.writes is None
    hand.call("aten::add_.Tensor", cache, cache)
    assert not hand.send()
    move._thread.join()


@pytest.mark.parametrize("recorded", [False, True])
def test_what_a_call_wrote_before_it_failed_is_copied(hand: Hand, recorded: bool) -> None:
    """As with PyTorch, a tensor keeps what a call wrote until it met a wrong value."""
    kept = hand.put(torch.zeros(4))
    ones = hand.put(torch.ones(2))
    index = hand.put(torch.tensor([1, 9]))
    hand.send()
    move = Move(hand.executor, little=0)
    while not move.copy_ahead():
        pass
    if recorded:
        hand.writer.record(0)
    hand.call("aten::index_add_", kept, 0, index, ones)
    if recorded:
        hand.writer.stop()
        hand.writer.run(0)
    (failure,) = hand.send()
    assert failure.type == "IndexError"
    assert hand.get(kept).tolist() == torch.zeros(4).index_add_(0, torch.tensor([1]), torch.ones(1)).tolist()
    move.finish()

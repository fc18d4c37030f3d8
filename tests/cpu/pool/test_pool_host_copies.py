"""Reads that a GPU copies to pinned memory, by a stream that is none: the right bytes, in bounded memory."""

import pytest
import torch
from pool_daemons import serving
from pool_hand import Hand
from pool_host_copies import LaterCopies

import warpbus.pool
from warpbus.errors import ProtocolError
from warpbus.pool.client.transfers import fetch
from warpbus.pool.protocol.failures import PoisonedError
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.host_copies import FEW, MANY, HostCopies

CPU = torch.device("cpu")


@pytest.fixture
def stream():
    return LaterCopies()


@pytest.fixture
def hand(stream):
    found = Hand(Executor(CPU, Quota(64 << 20, 1.0)))
    found.executor.storages._copies = HostCopies(stream)
    return found


def arrived(copy):
    while not copy.arrived:
        pass
    return bytes(copy.take())


def test_bytes_are_as_they_were_when_they_were_asked_for(hand):
    data = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8)
    there = hand.put(data)
    hand.send()
    storages = hand.executor.storages
    for _ in range(2):
        copies = []
        for start, nbytes in ((5, 8), (100, 4096), (7, 1 << 19), (0, 1), (0, 0)):
            assert storages.has_room(nbytes)
            copies.append((storages.leave(there, start, nbytes), start, nbytes))
        storages.write(there, 0, b"later")
        assert not copies[0][0].arrived
        for copy, start, nbytes in copies:
            assert arrived(copy) == bytes(data[start : start + nbytes].numpy())
        storages.write(there, 0, bytes(data[:5].numpy()))


def test_a_view_with_an_offset_and_an_empty_storage(hand):
    there, empty = hand.put(torch.arange(6.0)), hand.put(torch.empty(0))
    hand.send()
    storages = hand.executor.storages
    storages.has_room(4)
    assert torch.frombuffer(bytearray(arrived(storages.leave(there, 8, 4))), dtype=torch.float32).item() == 2
    assert arrived(storages.leave(empty, 0, 0)) == b""


def test_bytes_that_are_not_inside(hand):
    there = hand.put(torch.zeros(4))
    hand.send()
    storages = hand.executor.storages
    storages.has_room(4)
    for offset, nbytes in ((16, 1), (0, 17), (1 << 63, 4)):
        with pytest.raises(ProtocolError, match="must be inside"):
            storages.leave(there, offset, nbytes)
    with pytest.raises(ProtocolError, match="no storage with the handle"):
        storages.leave(1 << 40, 0, 4)
    assert storages.has_room(4)


def test_what_was_never_computed(hand):
    x = hand.put(torch.zeros(2, 3))
    index = hand.put(torch.tensor([7]))
    broken = hand.call("aten::index_select", x, 0, index)
    hand.send()
    with pytest.raises(PoisonedError):
        hand.executor.storages.leave(int(broken), 0, 4)


@pytest.mark.parametrize("nbytes", [1, FEW, FEW + 1, MANY])
def test_pinned_memory_is_bounded(hand, stream, nbytes):
    there = hand.put(torch.arange(MANY, dtype=torch.int64).to(torch.uint8))
    hand.send()
    storages, copies = hand.executor.storages, []
    while storages.has_room(nbytes):
        copies.append(storages.leave(there, 0, nbytes))
    assert 4 <= len(copies) <= 16
    assert stream.allocated == len(copies) * (FEW if nbytes <= FEW else MANY)
    wanted = (bytes(range(256)) * (MANY // 256))[:nbytes]
    assert all(arrived(each) == wanted for each in copies)
    before = stream.allocated
    copies.pop()
    assert storages.has_room(nbytes)  # the dropped copy's slot, and no new memory
    assert stream.allocated == before


def test_a_copy_that_was_dropped_on_the_way_does_no_harm(hand):
    first, second = hand.put(torch.zeros(FEW, dtype=torch.uint8)), hand.put(torch.ones(FEW, dtype=torch.uint8))
    hand.send()
    storages = hand.executor.storages
    assert storages.has_room(FEW)
    storages.leave(first, 0, FEW)
    assert arrived(storages.leave(second, 0, FEW)) == b"\1" * FEW


@pytest.fixture(scope="module", params=["1", "3000"])
def lease(request, tmp_path_factory):
    """A lease whose process reads as on a GPU: the copies are there at once, or after other messages."""
    patch = pytest.MonkeyPatch()
    patch.setenv("LOOKS", request.param)
    with (
        serving(tmp_path_factory.mktemp("mill"), 1, "pool_host_copies", spare=0) as mill,
        warpbus.pool.connect(str(mill.address), memory="200MB") as gpu,
    ):
        yield gpu
    patch.undo()


def test_numbers_and_tensors_of_a_program(lease):
    torch.manual_seed(1)
    x = torch.randn(300, 1000)
    there = x.to(lease.device)
    for step in range(5):
        assert there[step, 7].item() == x[step, 7].item()
        assert torch.equal(there[step].cpu(), x[step])
    assert torch.equal(there.cpu(), x)
    there.mul_(2)
    value = there[0, 0]
    there.mul_(2)
    assert value.item() == 4 * x[0, 0].item()


def test_many_reads_on_their_way_together(lease):
    """More than pinned memory is for."""
    x = torch.arange(40 * 100_000, dtype=torch.int32).view(40, 100_000)
    there = x.to(lease.device)
    rows = [fetch(row) for row in there]
    numbers = [fetch(row[:3]) for row in there]
    there.zero_()
    for row, number, wanted in zip(rows, numbers, x, strict=True):
        assert torch.equal(number(), wanted[:3])
        assert torch.equal(row(), wanted)
    assert there.sum().item() == 0


def test_errors_of_values(lease):
    x = torch.zeros(3, 3, device=lease.device)
    broken = x.index_select(0, torch.tensor([9], device=lease.device))
    with pytest.raises(IndexError):
        broken[0, 0].item()
    assert x.sum().item() == 0

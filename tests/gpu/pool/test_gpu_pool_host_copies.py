"""Small reads of a GPU's memory by calls of the driver, in the order of its stream."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "cpu" / "pool"))
from pool_hand import Hand

from warpbus.cuda.read_back import ReadBack
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.host_copies import FEW, MANY

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GPU = torch.device("cuda", 0)


@pytest.fixture
def hand() -> Iterator[Hand]:
    yield Hand(Executor(GPU, Quota(256 << 20, 1.0)))
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def arrived(copy) -> bytes:
    while not copy.arrived:
        pass
    return bytes(copy.take())


@pytest.mark.parametrize("nbytes", [1, 4, FEW, FEW + 1, MANY])
def test_a_read_sees_what_was_launched_before_and_not_what_comes_after(hand, nbytes) -> None:
    data = torch.randint(0, 255, (MANY,), dtype=torch.uint8)
    there = hand.put(data)
    hand.send()
    storages = hand.executor.storages
    assert storages.has_room(nbytes)
    copies = []
    for start in (0, MANY - nbytes, 1 if nbytes < MANY else 0):
        torch.cuda._sleep(10_000_000)  # cycles: the host is ahead of the GPU
        copies.append((storages.leave(there, start, nbytes), start))
    assert not copies[-1][0].arrived
    storages.write(there, 0, bytes(MANY))
    for copy, start in copies:
        assert arrived(copy) == bytes(data[start : start + nbytes].numpy())


def test_pinned_memory_is_used_again(hand) -> None:
    there = hand.put(torch.arange(MANY, dtype=torch.int64).to(torch.uint8))
    hand.send()
    storages = hand.executor.storages
    for _ in range(3):
        copies = []
        while storages.has_room(FEW):
            copies.append(storages.leave(there, len(copies), FEW))
        assert [arrived(copy)[0] for copy in copies] == [*range(len(copies))]
        del copies
    pinned = storages._copies._few.unused[0].view
    assert torch.frombuffer(pinned, dtype=torch.uint8).is_pinned()


def test_a_read_in_another_stream(hand) -> None:
    """The stream that is current is the one that the operators were launched in."""
    there = hand.put(torch.zeros(4, dtype=torch.uint8))
    hand.send()
    storages = hand.executor.storages
    storages.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert storages.has_room(4)
        torch.cuda._sleep(50_000_000)
        storages.raw(int(there)).fill_(7)
        assert arrived(storages.leave(there, 0, 4)) == b"\7" * 4


def test_an_address_that_is_none(hand) -> None:
    stream = ReadBack(GPU)
    buffer, mark = stream.buffer(16), stream.mark()
    with pytest.raises(RuntimeError):
        stream.copy(buffer.data_ptr(), 64, 16, mark)

"""Forked children leave the parent's remote GPU alone: they get an error, and the parent goes on."""

import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from pool_direct import connected
from torch.utils.data import DataLoader, Dataset

from warpbus.errors import ConnectionLostError, StateError
from warpbus.pool.client.session import FORKED, Session
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.frames import Kind

REMOTE = "warpbus"
_SECONDS = 120


@pytest.fixture
def session() -> Iterator[Session]:
    with connected() as (found, _):
        yield found


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` gives in a forked child, or the text of the error that it raises there."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()

    def run() -> None:
        try:
            theirs.send(work())
        except Exception as error:
            theirs.send(f"{type(error).__name__}: {error}")

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    assert ours.poll(_SECONDS), "the child said nothing"
    said = ours.recv()
    child.join(_SECONDS)
    assert child.exitcode == 0
    return said


def test_a_forked_child_cannot_use_the_device(session: Session) -> None:
    x = torch.arange(4.0).to(REMOTE)
    waiting = x + 1  # said, and not sent yet
    for work in (
        lambda: x + 1,
        lambda: x.cpu(),
        lambda: torch.zeros(2, device=REMOTE),
        lambda: torch.ones(2).to(REMOTE),
        lambda: torch.warpbus.get_rng_state(),
        lambda: torch.warpbus.synchronize(),
        lambda: torch.save(x, os.devnull),
    ):
        assert in_child(work) == f"StateError: {FORKED}"
    assert torch.equal(waiting.cpu(), torch.arange(4.0) + 1)


def test_a_forked_child_goes_on_with_the_cpu(session: Session) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()

    def draw() -> list[Any]:
        torch.manual_seed(3)
        with torch.random.fork_rng():
            found = torch.rand(2).tolist()
        module = torch.warpbus  # type: ignore[attr-defined]
        return [found, module._is_in_bad_fork(), module.is_available(), module.device_count(), module._initialized]

    assert in_child(draw) == [expected, True, False, 0, False]
    assert not torch.warpbus._is_in_bad_fork()  # type: ignore[attr-defined]


def test_a_forked_child_may_connect_for_itself(session: Session) -> None:
    x = torch.ones(3, device=REMOTE)

    def compute() -> list[float]:
        with connected():
            return (torch.arange(3.0).to(REMOTE) * 2).tolist()

    assert in_child(compute) == [0.0, 2.0, 4.0]
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_a_child_of_a_process_without_a_gpu_is_reported_to_connect() -> None:
    with connected():
        pass
    assert "no remote GPU is connected" in in_child(lambda: torch.zeros(2, device=REMOTE))


def test_an_abandoned_channel_closes_one_descriptor_alone() -> None:
    mine, peer = socket.socketpair()
    of_child, of_parent, other = Channel(mine.dup(), "peer"), Channel(mine, "peer"), Channel(peer, "us")
    of_child.abandon("it is the parent's")
    for use in (lambda: of_child.send(Kind.BYE), lambda: of_child.receive(0.0)):
        with pytest.raises(ConnectionLostError, match="it is the parent's"):
            use()
    of_parent.send(Kind.ACK, 7)
    frame = other.receive(_SECONDS)
    assert frame is not None
    assert (frame.kind, frame.number) == (Kind.ACK, 7)
    of_parent.close()
    other.close()


class Numbers(Dataset):
    """Ten of them; `item` makes each."""

    def __init__(self, item: Callable[[int], torch.Tensor]) -> None:
        self._item = item

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._item(index)


def loaded(item: Callable[[int], torch.Tensor]) -> DataLoader:
    return DataLoader(Numbers(item), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=_SECONDS)


def test_data_loaders_whose_workers_use_the_device_end_with_the_error(session: Session) -> None:
    table = torch.arange(10.0).to(REMOTE)
    for item in (lambda index: table[index] * 2, lambda index: torch.full((2,), float(index), device=REMOTE)):
        with pytest.raises(StateError, match="is a forked child of one with a remote GPU"):
            list(loaded(item))
    assert torch.equal(table.cpu(), torch.arange(10.0))


def test_data_loaders_whose_workers_do_not_work_as_ever(session: Session) -> None:
    torch.manual_seed(4)
    batches = list(loaded(lambda index: torch.rand(1) + index))
    torch.manual_seed(4)
    for batch, expected in zip(batches, loaded(lambda index: torch.rand(1) + index), strict=True):
        assert torch.equal(batch.to(REMOTE).cpu(), expected)
    assert len(batches) == 3


def test_a_tensor_of_the_device_is_not_sent_to_another_process(session: Session) -> None:
    """A view needs no message, so that a worker can make one: but there are no bytes in it to send."""
    table = torch.arange(10.0).to(REMOTE)
    with pytest.raises(StateError, match="40 bytes on a remote GPU was sent to another process"):
        pickle.loads(ForkingPickler.dumps(table))
    with pytest.raises(StateError, match=r"send tensor\.cpu"):
        list(DataLoader(Numbers(lambda index: table[index]), batch_size=None, num_workers=1, timeout=_SECONDS))
    assert pickle.loads(ForkingPickler.dumps(torch.ones(3))).tolist() == [1.0, 1.0, 1.0]

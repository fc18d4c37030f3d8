"""Recorded calls: what a run computes, where, and what it is charged with."""

import pytest
import torch
from pool_hand import Hand

from warpbus.errors import ProtocolError
from warpbus.pool.protocol import wire
from warpbus.pool.protocol.failures import PoisonedError
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor

CPU = torch.device("cpu")


@pytest.fixture
def hand():
    return Hand(Executor(CPU, Quota(1 << 16, 1.0)))


def recorded(hand, program=1):
    """x -> y = 2 (x + w) + w, with x's mean beside; x is counted up in place. Returns x, w, y and the sum."""
    x, w = hand.put(torch.arange(8.0)), hand.put(torch.ones(8))
    hand.send()
    hand.writer.record(program)
    inner = hand.call("aten::add.Tensor", x, w)
    doubled = hand.call("aten::mul.Scalar", inner, 2.0)
    hand.writer.free([inner])
    y = hand.call("aten::add.Tensor", doubled, w)
    hand.writer.free([doubled])
    total = hand.call("aten::sum", x)
    hand.call("aten::add_.Scalar", x, 1.0)
    hand.writer.stop()
    return x, w, y, total


def used(hand):
    return hand.executor.storages.used


def test_a_program_runs_when_it_is_reported_to(hand):
    x, w, y, total = recorded(hand)
    assert hand.get(x).tolist() == list(range(8))  # nothing was executed
    assert used(hand) == 64
    version = hand.executor.storages.version
    for run in range(3):
        before = version(x), version(w)
        hand.writer.run(1)
        expected = 2 * (torch.arange(8.0) + run + 1) + 1
        assert torch.equal(hand.get(y), expected)
        assert hand.get(total).item() == 28 + 8 * run
        assert used(hand) == 64 + 32 + 4
        assert version(x) > before[0]
        assert version(w) == before[1]
    # Two sums at a time are there while it runs, and no more.
    assert hand.executor.storages.peak == 64 + 36 + 64
    (usage,) = hand.executor.answer(["usage"])
    assert (usage["programs"], usage["captured"]) == (1, 0)


def test_results_stay_where_they_are(hand):
    _, _, y, _ = recorded(hand)
    hand.writer.run(1)
    hand.send()
    address = hand.executor.storages.raw(y).data_ptr()
    hand.writer.run(1)
    hand.send()
    assert hand.executor.storages.raw(y).data_ptr() == address


def test_dropping_frees_what_the_client_has_let_go_of(hand):
    x, w, y, total = recorded(hand)
    hand.writer.run(1)
    hand.writer.free([total])
    hand.send()
    assert used(hand) == 100
    hand.writer.run(1)  # it still has its place
    hand.writer.drop(1)
    hand.send()
    assert used(hand) == 96
    assert hand.get(y).shape == (8,)
    hand.writer.free([x, w, y])
    hand.send()
    assert (used(hand), hand.executor.storages.live) == (0, {})


def test_storages_made_while_recording_live_as_long_as_the_program(hand):
    x = hand.put(torch.ones(4))
    hand.send()
    hand.writer.record(1)
    constant = hand.put(torch.full((4,), 5.0))
    y = hand.call("aten::add.Tensor", x, constant)
    hand.writer.free([constant])
    hand.writer.stop()
    hand.writer.run(1)
    assert hand.get(y).tolist() == [6] * 4
    hand.writer.drop(1)
    hand.send()
    assert used(hand) == 32


def test_a_program_that_does_not_fit_runs_not_at_all(hand):
    x, _, y, _ = recorded(hand)
    hand.empty((16384 - 64 - 36 - 64 + 1,), torch.uint8)
    filler = hand.empty(((1 << 16) - 64 - (16384 - 164 + 1) - 64,), torch.uint8)
    hand.writer.run(1)
    (failure,) = hand.send()
    assert failure.type == "OutOfMemoryError"
    with pytest.raises(PoisonedError):
        list(hand.executor.answer(["read", y, 0, 4]))
    hand.writer.free([filler])
    hand.writer.run(1)
    assert hand.get(y)[0] == 3
    assert hand.get(x)[0] == 1


def test_what_a_run_reads_must_be_there(hand):
    x, w, y, _ = recorded(hand)
    hand.writer.run(1)
    hand.writer.free([w])
    hand.writer.run(1)
    (failure,) = hand.send()
    assert f"no storage with the handle {w}" in failure.message
    assert hand.get(x)[0] == 1
    with pytest.raises(PoisonedError):
        list(hand.executor.answer(["read", y, 0, 4]))


def test_poison_goes_through_a_program(hand):
    bad = hand.call("aten::embedding", hand.put(torch.ones(2, 4)), hand.put(torch.tensor([7])))
    hand.send()
    hand.writer.record(1)
    y = hand.call("aten::neg", bad)
    hand.writer.stop()
    hand.writer.run(1)
    assert hand.send() == []
    with pytest.raises(PoisonedError, match="embedding"):
        list(hand.executor.answer(["read", y, 0, 4]))


def test_dynamic_calls_cannot_be_in_a_program(hand):
    x = hand.put(torch.ones(4))
    hand.send()
    hand.writer.record(1)
    hand.call("aten::nonzero", x)
    hand.writer.stop()
    hand.writer.run(1)
    (failure,) = hand.send()
    assert (failure.operator, "only after it ran" in failure.message) == ("aten::nonzero", True)


def test_programs_that_are_not_there(hand):
    for wrong in (lambda: hand.writer.run(5), lambda: hand.writer.drop(5), hand.writer.stop):
        wrong()
        (failure,) = hand.send()
        assert failure.type == "StateError"
    hand.writer.record(1)
    hand.writer.record(2)
    hand.writer.run(1)
    assert len(hand.send()) == 2


@pytest.mark.parametrize("when", ["recorded", "run", "recording"])
def test_programs_move(hand, when):
    if when == "recording":
        x = hand.put(torch.ones(4))
        hand.send()
        hand.writer.record(1)
        gone = hand.call("aten::neg", x)
        y = hand.call("aten::neg", gone)
        hand.writer.free([gone])
        expected = [1.0] * 4
    else:
        _, _, y, total = recorded(hand)
        expected = [3.0, 5, 7, 9, 11, 13, 15, 17]
    if when == "run":
        hand.writer.run(1)
        hand.writer.free([total])
        expected = [each + 2 for each in expected]
    hand.send()
    old = hand.executor
    state = wire.decode(wire.encode(old.state()))
    new = Executor(CPU, Quota(1 << 16, 1.0))
    for handle, nbytes in old.storages.sizes().items():
        new.storages.create(handle, nbytes)
        new.storages.write(handle, 0, old.storages.read(handle, 0, nbytes))
    new.restore(state)
    hand.executor = new
    assert wire.encode(new.state()) == wire.encode(state)
    if when == "recording":
        hand.writer.stop()
    hand.writer.run(1)
    assert hand.get(y).tolist() == expected
    hand.writer.drop(1)
    hand.send()
    assert new.storages.used == sum(new.storages.sizes().values())


def test_malformed_states():
    for programs in ([[1]], [[1, False, [[b"x"], []], [], []]], [[1, False, [[], [[0, b""]]], [], []]]):
        executor = Executor(CPU, Quota(100, 1.0))
        with pytest.raises(ProtocolError):
            executor.restore({**Executor(CPU, Quota(100, 1.0)).state(), "programs": programs})

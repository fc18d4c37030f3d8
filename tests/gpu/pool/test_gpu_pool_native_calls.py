"""`execution.cpp` on a GPU leaves the same lease behind as `Executor._call`."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "cpu" / "pool"))
from pool_hand import Hand
from pool_native_calls import CALLS, same, values

from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture
def hands():
    """Two leases: the second one does all calls in Python."""
    yield (found := [Hand(Executor(torch.device("cuda", 0), Quota(64 << 20, 1.0))) for _ in range(2)])
    del found
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def in_python(monkeypatch):
    """The executors that called an operator by Python."""
    found, original = [], Executor._call

    def call(self, definition, operands):
        found.append(self)
        original(self, definition, operands)

    monkeypatch.setattr(Executor, "_call", call)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_done_without_python(hands, in_python, name):
    hands[1].executor._native = None

    def work(hand):
        a, b = hand.put(values(3, 4)), hand.put(values(3, 4) + 1)
        for _ in range(3):
            CALLS[name](hand, a, b)

    assert same(hands, work) == []
    # Python makes the first tensor of a new place, and so does the first of the calls.
    assert in_python.count(hands[0].executor) <= 2
    assert in_python.count(hands[1].executor) == 3


def test_operators_that_fail(hands):
    hands[1].executor._native = None

    def work(hand):
        negative = hand.put(-torch.eye(3))
        for _ in range(2):
            wrong = hand.call("aten::linalg_cholesky_ex", negative, check_errors=True)
            hand.call("aten::neg", wrong[0])
        hand.call("aten::neg", negative)

    assert [each.type for each in same(hands, work)] == ["RuntimeError"] * 2

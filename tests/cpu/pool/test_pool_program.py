"""Programs: recorded once, run with what the tensors contain."""

from collections.abc import Iterator

import pytest
import torch
from pool_direct import connected
from pool_training import MODELS, Training, assert_equal_weights

from warpbus.errors import UsageError
from warpbus.pool.client.program import recorded
from warpbus.pool.client.session import Session
from warpbus.pool.tenant.execution import Executor

REMOTE = "warpbus"


@pytest.fixture
def both() -> Iterator[tuple[Session, Executor]]:
    with connected() as found:
        yield found


def test_a_program_computes_with_what_is_there(both: tuple[Session, Executor]) -> None:
    x, total = torch.ones(4, device=REMOTE), torch.zeros(4, device=REMOTE)
    with recorded(both[0]) as program:
        doubled = x * 2
        total += doubled.square() + 1
    assert total.tolist() == [0.0] * 4  # nothing was executed
    program.run()
    x.fill_(3)
    program.run()
    assert doubled.tolist() == [6.0] * 4
    assert total.tolist() == [5.0 + 37.0] * 4


def test_a_run_is_one_instruction(both: tuple[Session, Executor]) -> None:
    session = both[0]
    x = torch.ones(4, device=REMOTE)
    with recorded(session) as program:
        for _ in range(100):
            x += 1
    session.flush()
    before = session.statistics.bytes_sent
    program.run()
    session.flush()
    assert session.statistics.bytes_sent - before == 5
    assert x.tolist() == [101.0] * 4


def test_what_a_run_needs_between_is_not_kept(both: tuple[Session, Executor]) -> None:
    session, executor = both
    x = torch.ones(1000, dtype=torch.uint8, device=REMOTE)
    with recorded(session) as program:
        y = x
        for _ in range(50):
            y = y + 1
    program.run()
    assert y.tolist() == [51] * 1000
    assert session.used == executor.storages.used == 2000


def test_reading_while_recording_is_refused(both: tuple[Session, Executor]) -> None:
    x = torch.ones(4, device=REMOTE)
    with recorded(both[0]) as program, pytest.raises(UsageError, match="while a program is recorded"):
        (x + 1).sum().item()
    with recorded(both[0]), pytest.raises(UsageError, match="being recorded already"), recorded(both[0]):
        pass
    program.drop()
    assert x.tolist() == [1.0] * 4


def test_a_block_that_fails_leaves_no_program(both: tuple[Session, Executor]) -> None:
    session, executor = both
    x = torch.ones(4, device=REMOTE)
    with pytest.raises(ZeroDivisionError), recorded(session):
        x += 1 // 0
    session.flush()
    assert executor.usage()["programs"] == 0
    assert (x + 1).tolist() == [2.0] * 4


def test_an_earlier_error_ends_the_recording(both: tuple[Session, Executor], monkeypatch: pytest.MonkeyPatch) -> None:
    session = both[0]
    x = torch.ones(2, device=REMOTE)

    def failing(**_: bool) -> None:
        monkeypatch.undo()
        raise IndexError("of an earlier call")

    def record() -> None:
        with recorded(session):
            monkeypatch.setattr(session, "flush", failing)

    with pytest.raises(IndexError, match="earlier"):
        record()
    assert x.tolist() == [1.0, 1.0]


def test_a_program_that_is_gone_or_recorded_does_not_run(both: tuple[Session, Executor]) -> None:
    x = torch.ones(2, device=REMOTE)
    with pytest.raises(UsageError, match="after the block"), recorded(both[0]) as failed:
        failed.run()
    with recorded(both[0]) as dropped:
        x += 1
    dropped.drop()
    dropped.drop()
    for program in (failed, dropped):
        with pytest.raises(UsageError, match="record it"):
            program.run()
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_is_recorded(name: str) -> None:
    """Gradients, moments, running means and dropout draws are as if each step had been sent."""
    steps, before = 8, 3
    with connected():
        expected = Training(name, REMOTE, capturable=True)
        losses = expected.run(steps)
        weights = expected.weights()
    with connected() as (session, executor):
        training = Training(name, REMOTE, capturable=True)
        found = training.run(before)
        fixed = [each.to(REMOTE) for each in training.data(before)]
        training.data = lambda step: fixed
        training.optimizer.zero_grad()
        with recorded(session) as program:
            loss = training.step()
        sent = session.statistics.operators
        for step in range(before, steps):
            for where, drawn in zip(fixed, MODELS[name][1](step), strict=True):
                where.copy_(drawn)
            program.run()
            found.append(loss.item())
        assert session.statistics.operators - sent < 10 * (steps - before)
        assert executor.usage()["programs"] == 1
        assert found == losses
        assert_equal_weights(training.weights(), weights)

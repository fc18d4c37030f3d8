"""Calls that become graphs give what ordinary ones give, prepared or not."""

import pytest
import torch
from torch import Tensor

from warpbus.cuda.graphs import Call, Replayed


def step(x: Tensor, y: Tensor, *, times: int) -> tuple[Tensor, ...]:
    for _ in range(times):
        x = (x * y + 1).sin()
    return x, x.sum()


def waits(x: Tensor) -> tuple[Tensor, ...]:
    return (x * float(x.sum()),)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


@pytest.mark.parametrize("prepared", [False, True])
def test_results_are_those_of_the_function(prepared: bool) -> None:
    run, shapes = Replayed(), [(5, 7), (64, 1000)]
    if prepared:
        run.prepare([Call(step, (numbers(*shape), numbers(*shape)), {"times": 3}) for shape in [*shapes, shapes[0]]])
    for _ in range(4):
        for shape in shapes:
            x, y = numbers(*shape), numbers(*shape)
            before = x.clone(), y.clone()
            expected = step(x, y, times=3)
            for found, wanted in zip(run(step, x, y, times=3), expected, strict=True):
                assert torch.equal(found, wanted)
            assert torch.equal(x, before[0])
            assert torch.equal(y, before[1])
        x = numbers(5, 7)
        assert torch.equal(run(step, x, x, times=2)[0], step(x, x, times=2)[0])


def test_what_cannot_be_captured_ahead_is_tried_again() -> None:
    run = Replayed()
    run.prepare([Call(waits, (numbers(8),))])
    x = numbers(8)
    with pytest.raises(RuntimeError):  # the second attempt to capture it says why
        run(waits, x)
    assert torch.equal(waits(x)[0], x * x.sum())


def test_others_may_work_while_calls_are_captured() -> None:
    run, x, y = Replayed(), numbers(1000), numbers(1000)
    calls = [Call(step, (numbers(1000), numbers(1000)), {"times": times}) for times in range(500, 520)]
    run.prepare(calls)
    for call in calls:
        times = int(str(call.constants["times"]))
        total = float(torch.ones(100_000 + times, device="cuda").sum())  # allocates, and waits
        assert total == 100_000 + times
        assert torch.equal(run(step, x, y, times=times)[0], step(x, y, times=times)[0])


def test_a_capture_that_others_disturb_is_done_again() -> None:
    run, x, y = Replayed(), numbers(1000), numbers(1000)
    calls = [Call(step, (numbers(1000), numbers(1000)), {"times": times}) for times in range(500, 520)]
    run.prepare([Call(waits, (numbers(8),)), *calls])
    for call in calls:
        times = int(str(call.constants["times"]))
        assert torch.equal(run(step, x, y, times=times)[0], step(x, y, times=times)[0])

"""Calls that become graphs give what ordinary ones give, prepared or not."""

import pytest
import torch
from torch import Tensor

from warpbus.cuda.graphs import Call, Replayed


def step(x: Tensor, y: Tensor, *, times: int) -> tuple[Tensor, ...]:
    for _ in range(times):
        x = (x * y + 1).sin()
    return x, x.sum()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


@pytest.mark.parametrize("prepared", [False, True])
def test_results_are_those_of_the_function(prepared: bool) -> None:
    run, shapes = Replayed(), [(5, 7), (64, 1000)]
    if prepared:
        for shape in [*shapes, shapes[0]]:
            run.prepare(Call(step, (numbers(*shape), numbers(*shape)), {"times": 3}))
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

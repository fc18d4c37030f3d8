"""A recorded training step on a tenant's GPU is a CUDA graph that learns what single operators do."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "cpu" / "pool"))
from pool_direct import connected
from pool_training import MODELS, Training

from warpbus.pool.client.program import recorded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BEFORE, STEPS = 3, 10


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """A tenant limits its whole process, which may still have the memory of earlier tests."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_is_one_graph(name: str) -> None:
    with connected(device="cuda") as (session, executor):
        expected = Training(name, "warpbus", capturable=True).run(STEPS)
        training = Training(name, "warpbus", capturable=True)
        losses = training.run(BEFORE)
        fixed = [each.to("warpbus") for each in training.data(BEFORE)]
        training.data = lambda step: fixed
        training.optimizer.zero_grad()
        with recorded(session) as program:
            loss = training.step()
        for step in range(BEFORE, STEPS):
            for where, drawn in zip(fixed, MODELS[name][1](step), strict=True):
                where.copy_(drawn)
            program.run()
            losses.append(loss.item())
        usage = executor.usage()
        assert (usage["programs"], usage["captured"], usage["not captured"]) == (1, 1, [])
    # Dropout draws other numbers in a graph; sums of gradients are in no fixed order on a GPU.
    assert losses == pytest.approx(expected, abs=0.15 if name == "residual network" else 1e-3)
    assert torch.tensor(losses).isfinite().all()

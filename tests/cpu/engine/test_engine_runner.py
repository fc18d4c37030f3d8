import pytest
import torch

from warpbus.engine import runner as module
from warpbus.engine.runner import Runner
from warpbus.errors import DeviceError
from warpbus.formats import Checkpoint
from warpbus.models import load_model

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21], [30, 31, 32, 33]]
STEPS = [[40, 50, 60], [41, 51, 61], [42, 52, 62]]


@pytest.fixture(scope="module")
def model(tiny_glm):
    return load_model(Checkpoint(tiny_glm), device="cpu", dtype=torch.float32)


def run(model, prompts=PROMPTS, limit=100):
    return Runner(model, prompts, limit, device=CPU, dtype=torch.float32)


@torch.no_grad()
def expected(model, ids):
    """Scores after `ids`, from the model alone and without a cache."""
    return model(torch.tensor([ids]))[0, -1]


@pytest.mark.parametrize("piece", [4096, 9, 3, 1])
def test_prompts_and_steps_give_what_the_model_gives_without_a_cache(model, monkeypatch, piece):
    monkeypatch.setattr(module, "PREFILL_TOKENS", piece)
    runner = run(model)
    logits = runner.prefill()
    rows = [list(prompt) for prompt in PROMPTS]
    for step in [*STEPS, None]:
        for row, ids in enumerate(rows):
            torch.testing.assert_close(logits[row], expected(model, ids), atol=1e-4, rtol=1e-4)
        if step is not None:
            logits = runner.decode(step)
            for ids, token in zip(rows, step, strict=True):
                ids.append(token)


def test_rows_leave_and_the_others_go_on(model):
    runner = run(model)
    runner.prefill()
    runner.decode(STEPS[0])
    runner.keep([1, 2])
    logits = runner.decode([51, 61])
    assert logits.shape == (2, 400)
    torch.testing.assert_close(logits[0], expected(model, [20, 21, 50, 51]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1], expected(model, [*PROMPTS[2], 60, 61]), atol=1e-4, rtol=1e-4)


def test_the_last_row_alone_runs_alone(model):
    runner = run(model)
    runner.prefill()
    runner.keep([0])
    assert runner.cache.keys[0].shape[0] == 1
    torch.testing.assert_close(runner.decode([40])[0], expected(model, [*PROMPTS[0], 40]), atol=1e-4, rtol=1e-4)


def test_the_cache_grows_while_decoding(model):
    prompt = list(range(10, 266))
    runner = run(model, [prompt], limit=400)
    runner.prefill()
    before = runner.cache.capacity
    ids = list(prompt)
    for token in range(30, 330, 10):
        logits = runner.decode([token])
        ids.append(token)
    assert runner.cache.capacity >= len(ids)
    assert before <= runner.cache.capacity <= 400
    torch.testing.assert_close(logits[0], expected(model, ids), atol=1e-4, rtol=1e-4)


def test_full_memory_is_a_device_error(model, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner = run(model)
    monkeypatch.setattr(runner.cache, "reserve", full)
    with pytest.raises(DeviceError, match="out of memory with 3 sequences of up to 7 tokens"):
        runner.prefill()

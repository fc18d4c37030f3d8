import pytest
import torch

from warpbus.engine.engine import request
from warpbus.engine.kv_cache import KVCache, KVPool
from warpbus.engine.runner import Runner
from warpbus.engine.sequence import SamplingParams
from warpbus.engine.step import Step
from warpbus.errors import DeviceError
from warpbus.formats import Checkpoint
from warpbus.models import load_model

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21], [30, 31, 32, 33]]
PLACE = {"device": CPU, "dtype": torch.float32}


@pytest.fixture(scope="module")
def model(tiny_glm):
    return load_model(Checkpoint(tiny_glm), **PLACE)


class Recorder:
    """Stands for the CUDA graphs: runs what one would hold, the padding of its rows included."""

    def __init__(self):
        self.keys = []

    def run(self, key, work, state):
        before = [tensor.clone() for tensor in state]
        work()  # as before a capture: all that it changes is put back
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)
        self.keys.append(key)
        return work()


def run(model, kind, prompts=PROMPTS, limit=100, piece=4096, **params):
    """A runner on a growing cache, or on a pool, as on a GPU, with what stands for the graphs or without."""
    pooled = kind != "growing"
    step = Step(model, 4 if pooled else len(prompts), 512, **PLACE)
    cache = KVCache(model.config, len(prompts), limit, **PLACE)
    requests = [request(prompt, tokens=limit - len(prompt), params=SamplingParams(**params)) for prompt in prompts]
    rows = KVPool(model.config, 4 * limit, **PLACE).rows(4) if pooled else cache
    step._graphs = Recorder() if kind == "graphs" else None
    return Runner(model, step, rows, requests, prefill_tokens=piece)


@torch.no_grad()
def best(model, ids):
    """The likeliest token after `ids`, from the model alone and without a cache."""
    return int(model(torch.tensor([ids]))[0, -1].argmax())


@pytest.mark.parametrize("kind", ["growing", "pool", "graphs"])
@pytest.mark.parametrize("piece", [4096, 9, 3, 1])
def test_prompts_and_steps_choose_what_the_model_prefers_without_a_cache(model, kind, piece):
    runner = run(model, kind, piece=piece, temperature=0)
    with torch.no_grad():
        for row, prompt in zip(runner.prefill(), PROMPTS, strict=True):
            torch.testing.assert_close(row, model(torch.tensor([prompt]))[0, -1], atol=1e-4, rtol=1e-4)
    runner.start()
    rows = [list(prompt) for prompt in PROMPTS]
    for _ in range(8):
        tokens = runner.read()
        assert tokens == [best(model, ids) for ids in rows]
        for ids, token in zip(rows, tokens, strict=True):
            ids.append(token)
        runner.launch()


@pytest.mark.parametrize("kind", ["growing", "pool", "graphs"])
@pytest.mark.parametrize("ahead", [False, True])
def test_rows_leave_and_the_others_go_on(model, kind, ahead):
    """Also where the next step was launched before the tokens were read, as a GPU does."""
    runner = run(model, kind, temperature=0)
    runner.start()
    rows = [list(prompt) for prompt in PROMPTS]
    for step in range(9):
        if ahead:
            runner.launch()
        tokens = runner.read()
        for ids, token in zip(rows, tokens, strict=True):
            assert token == best(model, ids)
            ids.append(token)
        if step in (2, 5):
            kept = [0, 2] if step == 2 else [1]
            rows = [rows[row] for row in kept]
            runner.keep(kept)
        if not ahead:
            runner.launch()
    assert len(rows) == 1


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_every_kind_draws_the_same(model, penalty):
    answers = []
    for kind in ("growing", "pool", "graphs"):
        runner = run(model, kind, seed=3, top_p=0.9, repetition_penalty=penalty)
        runner.start()
        tokens = []
        for _ in range(12):
            tokens.append(runner.read())
            runner.launch()
        answers.append(tokens)
    assert answers[0] == answers[1] == answers[2]


def test_graphs_are_for_padded_rows_and_bounded_lengths(model):
    runner = run(model, "graphs", [list(range(10, 300)), [5]], limit=400, temperature=0)
    runner.start()
    for _ in range(2):
        runner.read()
        runner.launch()
    runner.read()
    runner.keep([1])
    runner.launch()
    assert runner._step._graphs.keys == [(4, 2, 400, "greedy")] * 2 + [(4, 1, 400, "greedy")]


def test_the_embedding_may_be_looked_up_by_the_host(model):
    expected, found = run(model, "pool", temperature=0), run(model, "pool", temperature=0)
    found._step.host_embedding = True
    for runner in (expected, found):
        runner.start()
    for _ in range(6):
        assert found.read() == expected.read()
        for runner in (expected, found):
            runner.launch()


def test_the_cache_grows_while_decoding(model):
    prompt = list(range(10, 250))
    runner = run(model, "growing", [prompt], limit=400, temperature=0)
    runner.start()
    before = runner._cache.capacity
    ids = list(prompt)
    for _ in range(30):
        ids += runner.read()
        runner.launch()
    assert ids[-1] == best(model, ids[:-1])
    assert before < runner._cache.capacity <= 400


def test_full_memory_is_a_device_error(model, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner = run(model, "growing")
    monkeypatch.setattr(runner._cache, "reserve", full)
    with pytest.raises(DeviceError, match="out of memory with 3 sequences of up to 7 tokens"):
        runner.start()

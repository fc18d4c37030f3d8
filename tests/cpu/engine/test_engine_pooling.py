"""Vectors of prompts: what the model's own states and logits give, however the prompts are cut, batched and cached."""

import pytest
import torch
from engine_models import FAMILIES, PROMPTS, SMALL, finish

from warpbus.engine import PromptPooling, SamplingParams
from warpbus.engine.engine import Engine, request
from warpbus.errors import UsageError
from warpbus.models import random_model

MODES = {
    "mean": lambda states, scores: states.mean(0),
    "last": lambda states, scores: states[-1],
    "logits": lambda states, scores: scores[-1, [7, 250]],
    "probabilities": lambda states, scores: scores[-1].softmax(-1)[[7, 250]],
}


def pooled(mode, prompt=(1,)):
    pooling = PromptPooling(mode, (7, 250) if mode in ("logits", "probabilities") else ())
    return request(list(prompt), tokens=1, params=SamplingParams(temperature=0, pooling=pooling))


@torch.no_grad()
def expected(model, mode, prompt):
    tokens = torch.tensor([prompt])
    return MODES[mode](model.hidden(tokens)[0], model(tokens)[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "glm"])
@pytest.mark.parametrize("max_num_batched_tokens", [None, 7])
def test_vectors_are_those_of_the_model_alone(family, mode, max_num_batched_tokens):
    model = random_model(FAMILIES[family], None, "cpu", torch.float32)
    requests = [pooled(mode, prompt) for prompt in PROMPTS]
    talk = request([5, 6, 7], tokens=20)
    finish(Engine(model, max_num_batched_tokens=max_num_batched_tokens), [*requests, talk])
    for each in requests:
        torch.testing.assert_close(torch.tensor(each.pooled), expected(model, mode, each.prompt), rtol=1e-4, atol=1e-5)
    assert talk.pooled is None


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_in_the_prefix_cache_gives_the_same(mode):
    model = random_model(SMALL, None, "cpu", torch.float32)
    engine = Engine(model)
    prompt = PROMPTS[2]
    finish(engine, [request(prompt, tokens=1)])
    again = pooled(mode, prompt)
    finish(engine, [again])
    assert (again.cached_tokens > 0) == (mode != "mean")
    torch.testing.assert_close(torch.tensor(again.pooled), expected(model, mode, prompt), rtol=1e-4, atol=1e-5)


def test_a_prompt_that_is_computed_again_is_not_counted_twice(monkeypatch):
    model = random_model(SMALL, None, "cpu", torch.float32)
    engine = Engine(model, max_num_batched_tokens=16)
    each = pooled("mean", range(70))
    engine.add(each)
    while each.pooled is None:
        engine.step()
    with monkeypatch.context() as failing:
        failing.setattr(model, "transform", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    finish(engine)
    torch.testing.assert_close(torch.tensor(each.pooled), expected(model, "mean", each.prompt), rtol=1e-4, atol=1e-5)


def test_tokens_beyond_the_vocabulary_are_refused():
    model = random_model(SMALL, None, "cpu", torch.float32)
    params = SamplingParams(pooling=PromptPooling("logits", (300,)))
    with pytest.raises(UsageError, match="pooling has the token id 300"):
        Engine(model).add(request([1], tokens=1, params=params))

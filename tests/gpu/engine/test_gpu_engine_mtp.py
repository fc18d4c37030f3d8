"""Speculation by multi-token prediction on a GPU: in CUDA graphs it drafts what a pass without a cache would draft."""

import pytest
import torch
from gpu_engine_models import GLM, GPU, PROMPTS, SMALL, assert_best, finish, model_of
from test_gpu_engine_latent import LATENT
from test_gpu_engine_moe import TOLERANCE

from warpbus.engine.engine import Engine, request
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.speculation import DraftPolicy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

CONFIGS = pytest.mark.parametrize("config", [SMALL, GLM, LATENT], ids=["grouped", "experts", "latent"])


@torch.no_grad()
def predictable(config):
    """A model in which the embedding of the last token says most, and its layer of multi-token prediction sees that."""
    model, size = model_of(config.with_mtp()), config.hidden_size
    model.embedding.weight.mul_(5)
    weight = torch.cat((torch.eye(size), torch.zeros(size, size)), 1) * 5
    model.layers[config.num_layers].projection.weight.copy_(weight)
    return model


@torch.no_grad()
def first_drafts(model, sequences):
    """The scores of the first draft after each sequence, by a pass over all of it without a cache."""
    found = []
    for tokens in sequences:
        ids = torch.tensor([tokens], device=GPU)
        found.append(model.logits(model.predict(ids[:, 1:], model.hidden(ids[:, :-1])))[0, -1].float())
    return found


@CONFIGS
@pytest.mark.parametrize("speculation", ["mtp:1", "mtp:4"])
def test_the_answers_are_the_models(config, speculation):
    model = predictable(config)
    engine = Engine(model, speculation=speculation)
    requests = [request(prompt, tokens=100) for prompt in PROMPTS]
    finish(engine, requests)
    for each in requests:
        assert len(each.token_ids) == 100
        assert_best(model, each.prompt, each.token_ids, TOLERANCE)
    assert 0 < engine.stats().accepted < engine.stats().drafted


@CONFIGS
def test_the_drafts_are_those_of_the_layer(config):
    model = predictable(config)
    engine = Engine(model, speculation="mtp:2", max_num_batched_tokens=48)
    for prompt in PROMPTS:
        engine.add(request(prompt, tokens=20))
    checked = 0
    while engine.has_work:
        running = [sequence for sequence, _ in engine.step() if sequence.finish_reason is None and sequence.token_ids]
        for sequence, scores in zip(
            running, first_drafts(model, [each.scheduler_state.ids for each in running]), strict=True
        ):
            assert scores.max() - scores[sequence.runner_state.drafts[0]] < TOLERANCE
            checked += 1
    assert checked > 20


def test_steps_run_ahead_while_nothing_is_drafted(monkeypatch):
    monkeypatch.setattr(DraftPolicy, "count", lambda policy, running: 2 * (policy._step % 20 < 10))
    model = predictable(SMALL)
    engine = Engine(model, speculation="mtp:2")
    params = SamplingParams(temperature=0)
    requests = [request(prompt, tokens=100, params=params) for prompt in PROMPTS]
    finish(engine, requests)
    for each in requests:
        assert_best(model, each.prompt, each.token_ids)
    assert engine.stats().accepted > 0

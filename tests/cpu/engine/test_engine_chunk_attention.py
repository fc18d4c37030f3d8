"""Attention of a chunk of a prompt: rounded up to fewer lengths, where the kernels plan each of them."""

from dataclasses import replace

import pytest
import torch
from engine_models import FAMILIES

from warpbus.engine import chunk_attention
from warpbus.engine.chunk_attention import LONGEST_ALONE, attend_chunk, attends_in_parts, rounded_up
from warpbus.engine.engine import Engine, request
from warpbus.engine.sampling_params import SamplingParams
from warpbus.models import random_model


def chunk(tokens, keys, heads=4, kv_heads=2, size=8):
    draw = torch.Generator().manual_seed(tokens)
    return [torch.randn(n, h, size, generator=draw) for n, h in ((tokens, heads), (keys, kv_heads), (keys, kv_heads))]


def expected(q, k, v):
    keys, values = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * q.shape[-1] ** -0.5
    mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(k) - len(q))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), values)


@pytest.fixture
def planning(monkeypatch):
    """As on a GPU whose kernels plan shapes."""
    monkeypatch.setattr(chunk_attention, "_plans_shapes", lambda _: True)


@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (50, 50), (50, 70), (1023, 1023), (1024, 1024), (1300, 1300)])
def test_causal(tokens, keys, planning):
    q, k, v = chunk(tokens, keys)
    found = attend_chunk(q, k, v, causal=True)
    assert found.shape == q.shape
    torch.testing.assert_close(found.double(), expected(q, k, v), rtol=1e-4, atol=1e-5)


def test_shapes_are_few(planning):
    assert len(rounded_up(torch.ones(LONGEST_ALONE - 1, 3))) == LONGEST_ALONE - 1
    lengths = {len(rounded_up(torch.ones(tokens, 3))) for tokens in range(LONGEST_ALONE, 4097, 5)}
    assert lengths == set(range(1024, 4097, 256))
    padded = rounded_up(torch.full((1100, 3), torch.nan))
    assert padded[:1100].isnan().all()
    assert (padded[1100:] == 0).all()
    whole = torch.ones(1280, 3)
    assert rounded_up(whole) is whole


def test_long_chunks_behind_many_tokens_attend_in_parts(planning):
    q = torch.ones(1, 2, 8)
    assert attends_in_parts(q, 2048, 4096)
    assert not attends_in_parts(q, 2047, 9000)
    assert not attends_in_parts(q, 4000, 6000)


def test_nothing_is_rounded_elsewhere():
    x = torch.ones(1100, 3)
    assert rounded_up(x) is x
    assert not attends_in_parts(x, 2048, 9000)


@pytest.mark.parametrize("family", ["glm", "latent"])
@torch.no_grad()
def test_answers_are_the_same(family, monkeypatch):
    model = random_model(replace(FAMILIES[family], max_context=2048), None, "cpu", torch.float32)
    found = []
    for rounds in (False, True):
        monkeypatch.setattr(chunk_attention, "_plans_shapes", lambda _, rounds=rounds: rounds)
        engine = Engine(model, max_model_len=2048, prefix_caching=False)
        asked = request(
            [7 * at % 300 for at in range(1100)], tokens=3, params=SamplingParams(temperature=0, logprobs=1)
        )
        engine.add(asked)
        while engine.has_work:
            engine.step()
        found.append(torch.tensor([each.logprob for each in asked.logprobs]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)

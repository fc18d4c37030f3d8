"""The engine without text, on the CPU; with graphs and pools see tests/gpu/engine."""

from dataclasses import replace

import pytest
import torch

from warpbus.engine.engine import Engine, request
from warpbus.engine.plan import MemoryPlan
from warpbus.errors import ContextLengthError, UsageError
from warpbus.models import SHAPES, random_model
from warpbus.qtensor import Scheme

SMALL = replace(SHAPES["chatglm2-6b"], vocab_size=300, hidden_size=128, num_layers=2, num_heads=4, head_dim=32)
SMALL = replace(SMALL, num_kv_heads=2, ffn_size=224, max_context=256, rope=replace(SMALL.rope, rotary_dim=16))
PROMPTS = [[1, 2, 3], [40], list(range(50, 70))]


@pytest.fixture(scope="module")
def model():
    return random_model(SMALL, Scheme.parse("w4a16-g32"), "cpu", torch.float32)


@torch.no_grad()
def test_it_decodes_what_the_model_prefers(model):
    for prompt, answer in zip(PROMPTS, Engine(model).decode(PROMPTS, 9), strict=True):
        ids = list(prompt)
        for token in answer:
            assert model(torch.tensor([ids]))[0, -1].argmax() == token
            ids.append(token)
        assert len(answer) == 9


def test_it_can_be_driven_step_by_step(model):
    engine = Engine(model, max_model_len=40)
    expected = engine.decode([PROMPTS[0]], 5)[0]
    with engine.batch([request(PROMPTS[0], tokens=5)]) as runner:
        runner.start()
        found = runner.read()
        for _ in range(4):
            runner.launch()
            found += runner.read()
    assert found == expected


def test_a_pool_bounds_the_rows_of_a_batch(model):
    """Rows are counted as they are padded, and share the pool evenly."""
    requests = [request([1] * 10, tokens=tokens) for tokens in (40, 30, 20, 10, 5)]
    assert [Engine(model, max_num_seqs=most).fitting(requests) for most in (1, 3, 16)] == [1, 3, 5]
    for tokens, count in ((50, 1), (99, 1), (100, 2), (199, 2), (200, 4), (399, 4), (400, 5)):
        assert Engine(model, pool_tokens=tokens).fitting(requests) == count


def test_what_is_too_long_is_refused(model):
    with pytest.raises(ContextLengthError, match="a request needs 41 tokens, the context holds 40"):
        Engine(model, max_model_len=40).decode([[1] * 20], 21)


def test_a_plan_is_taken_over(model):
    plan = MemoryPlan(10**9, 64, 300, "auto", None, False, 16, {})
    engine = Engine.planned(model, plan, max_num_seqs=2)
    assert (engine.max_model_len, engine.max_num_seqs) == (64, 2)
    assert engine.decode(PROMPTS, 4) == Engine(model).decode(PROMPTS, 4)
    with pytest.raises(UsageError, match="kv_dtype is 'int8', but there are no kernels"):
        Engine.planned(model, replace(plan, kv_dtype="int8"))

"""LoRAs of many requests at once on a GPU, in CUDA graphs and beside the kernels of quantized weights.

Answers are compared with the scores of models that have a LoRA by its definition, each by itself.
"""

import random
from functools import cache

import pytest
import torch
from gpu_engine_models import GPU, SMALL, TOLERANCES, W4, assert_best, finish, model_of, put_into, random_lora

from warpbus.engine.adapters import adapt, stacked_bytes
from warpbus.engine.blocks import BLOCK
from warpbus.engine.engine import Engine, request
from warpbus.engine.offload import OffloadableModel
from warpbus.models.adapters import Prefix
from warpbus.qtensor import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

KINDS = [
    (W4, torch.float16),
    (W4, torch.bfloat16),
    (None, torch.float16),
    (None, torch.float32),
    (Scheme.parse("w8a16"), torch.float16),
]
NAMES = ("all", "wide", "attention", "down")


@cache
def loras():
    """Of different ranks, some of them of some linears alone."""
    model = model_of()
    return (
        random_lora(model, "all", 4),
        random_lora(model, "wide", 13),
        random_lora(model, "attention", 16, only="attention.qkv"),
        random_lora(model, "down", 8, only="mlp.down"),
    )


@cache
def changed(name, scheme=W4, dtype=torch.float16):
    """The model that a LoRA makes."""
    model = model_of(SMALL, scheme, dtype)
    return model if name is None else put_into(model, next(lora for lora in loras() if lora.name == name))


def asked(names, tokens, longest=90, seed=1):
    """Requests of different prompts, one for each name."""
    dice = random.Random(seed)
    found = []
    for name in names:
        found.append(request(dice.choices(range(1000), k=dice.randrange(1, longest)), tokens=tokens))
        found[-1].adapter = name
    return found


def engine_of(scheme=W4, dtype=torch.float16, **options):
    return Engine(model_of(SMALL, scheme, dtype), adapters=loras(), **options)


def check(requests, scheme=W4, dtype=torch.float16):
    for each in requests:
        assert_best(changed(each.adapter, scheme, dtype), each.prompt, each.token_ids, TOLERANCES[dtype])


@pytest.mark.parametrize(("scheme", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("max_num_batched_tokens", [None, 48])
def test_each_row_has_its_own(scheme, dtype, max_num_batched_tokens):
    requests = asked([None, *NAMES, "all", None, "wide"], 20)
    finish(engine_of(scheme, dtype, max_num_batched_tokens=max_num_batched_tokens), requests)
    check(requests, scheme, dtype)
    plain = asked([None] * len(requests), 20)
    finish(engine_of(scheme, dtype), plain)
    different = [one.token_ids != other.token_ids for one, other in zip(requests, plain, strict=True)]
    assert sum(different) >= 4, "the adapters change nothing"


@pytest.mark.parametrize("name", NAMES)
def test_one_row_alone(name):
    """Where a single row has kernels of its own."""
    requests = asked([name], 40)
    finish(engine_of(), requests)
    check(requests)


@pytest.mark.parametrize("rows", [2, 5, 9, 17, 33])
def test_graphs_of_every_kind_of_bucket(rows):
    names = [(None, *NAMES)[at % 5] for at in range(rows)]
    requests = asked(names, 12, seed=rows)
    finish(engine_of(max_num_seqs=rows), requests)
    check(requests)


def test_steps_without_adapters_have_graphs_of_their_own():
    """Those that there are without: slots that had an adapter do not bring it along."""
    engine = engine_of()
    finish(engine, asked(NAMES, 20))
    assert {key[3] for key in engine._instance.step._graphs._captured} == {True}
    requests = asked([None] * 3, 30, seed=2)
    finish(engine, requests)
    assert {key[3] for key in engine._instance.step._graphs._captured} == {True, False}
    check(requests)


def test_warm_graphs_are_of_both_kinds():
    engine = engine_of(max_num_seqs=4)
    engine.warm(rows=4)
    captured = dict(engine._instance.step._graphs._captured)
    assert {key[3] for key in captured} == {True, False}
    requests = asked([None, "all", "wide", "down"], 30)
    finish(engine, requests)
    check(requests)
    assert engine._instance.step._graphs._captured.keys() == captured.keys()


def test_prompts_come_while_others_decode():
    """In the graphs of steps in which some rows read prompts, and in pieces longer than any graph."""
    engine = engine_of(max_num_batched_tokens=1500)
    first = asked(["all", None, "wide"], 60)
    for each in first:
        engine.add(each)
    for _ in range(6):
        engine.step()
    later = asked(["down", None, "attention"], 20, longest=400, seed=2)
    for each in later:
        engine.add(each)
        engine.step()
        engine.step()
    [long] = asked(["wide"], 10)
    long.prompt = random.Random(3).choices(range(1000), k=1700)
    finish(engine, [long])
    check([*first, *later, long])


@pytest.mark.parametrize("options", [{}, {"speculation": 3}, {"max_num_seqs": 2}], ids=str)
def test_guesses_requests_that_give_way_and_slots_that_change_hands(options):
    engine = engine_of(cache_tokens=8 * BLOCK, max_model_len=7 * BLOCK, **options)
    requests = asked([None, *NAMES, None, "all", "wide"], 100)
    finish(engine, requests)
    assert engine.stats().preemptions > 0
    check(requests)


def test_dozens_of_adapters_at_once():
    model = model_of()
    many = tuple(random_lora(model, f"adapter {number}", 2 + number % 7) for number in range(40))
    before = torch.cuda.memory_allocated(GPU)
    engine = Engine(model, adapters=many, max_num_seqs=48)
    kept = [each for name, each in model.named_buffers() if name.endswith((".a", ".b"))]
    assert stacked_bytes(many, torch.float16) == sum(each.nbytes for each in kept)
    assert torch.cuda.memory_allocated(GPU) - before > stacked_bytes(many, torch.float16)
    requests = asked([*(lora.name for lora in many), None, None], 12)
    finish(engine, requests)
    for each in requests:
        own = model_of()
        if each.adapter is not None:
            put_into(own, next(lora for lora in many if lora.name == each.adapter))
        assert_best(own, each.prompt, each.token_ids)


def test_beginnings_are_not_shared_between_adapters():
    engine = engine_of()
    for name, cached in ((None, 0), ("all", 0), ("wide", 0), ("all", 2 * BLOCK), (None, 2 * BLOCK)):
        [each] = asked([name], 10)
        each.prompt = list(range(2 * BLOCK + 5))
        finish(engine, [each])
        assert each.cached_tokens == cached
        check([each])


def test_they_sleep_with_the_weights():
    model = model_of()
    adapt(model, loras())
    engine = Engine(model, adapters=loras(), offloadable=OffloadableModel(model))
    first, again = asked([None, *NAMES], 20), asked([None, *NAMES], 20)
    finish(engine, first)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info(GPU)[0]
    engine.sleep()
    assert torch.cuda.mem_get_info(GPU)[0] > free
    engine.wake()
    finish(engine, again)
    check([*first, *again])


def test_beside_a_prefix():
    """Rows of all kinds in one step."""
    draw = torch.Generator().manual_seed(3)
    shape = SMALL.num_layers, 40, SMALL.attention.num_kv_heads, SMALL.attention.head_dim
    prefix = Prefix("prefix", *(torch.randn(shape, generator=draw) for _ in range(2)))
    engine = Engine(model_of(), adapters=(*loras(), prefix))
    requests = asked([None, "all", "prefix", "wide", "prefix", "down"], 20)
    finish(engine, requests)
    check([each for each in requests if each.adapter != "prefix"])
    for each in requests:
        if each.adapter == "prefix":
            assert len(each.token_ids) == 20
            base = request(each.prompt, tokens=20)
            finish(engine, [base])
            assert base.token_ids != each.token_ids

"""Requests that come late, leave early or do not fit, steps that fail, memory that is short, sleep, and much of it all.

The order in which a GPU does things, a step ahead of what is read and with the rows of graphs filled up, is tried as
well, with what stands for the graphs; with real ones see tests/gpu/engine.
"""

import gc
import random
import weakref
from dataclasses import replace
from functools import cache

import pytest
import torch
from dense_configs import with_traits
from engine_models import PROMPTS, SMALL, as_on_a_gpu, finish

from warpbus.engine import kv_cache
from warpbus.engine.adapters import salt_of
from warpbus.engine.blocks import BLOCK
from warpbus.engine.engine import Engine, request
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.offload import OffloadableModel
from warpbus.engine.plan import MemoryPlan
from warpbus.engine.runner import Runner
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.speculation import NgramIndex
from warpbus.errors import ContextLengthError, DeviceError, UsageError
from warpbus.models import random_model

SEEDED = SamplingParams(seed=5, top_p=0.9, temperature=0.8)


@pytest.fixture(scope="module")
def model():
    return random_model(SMALL, None, "cpu", torch.float32)


@cache
def _alone(model, prompt, params):
    each = request(list(prompt), tokens=60, params=params)
    finish(Engine(model, prefix_caching=False), [each])
    return each.token_ids


def alone(model, prompt, tokens, params=None):
    """At most 60 tokens: what a request gets of which the engine knows no other."""
    return _alone(model, tuple(prompt), params)[:tokens]


KINDS = pytest.mark.parametrize("kind", [lambda engine: engine, as_on_a_gpu], ids=["read at once", "ahead"])


def test_a_warm_engine_has_compiled_the_kernels_of_the_cpu(model, monkeypatch):
    compiled = []
    monkeypatch.setattr("warpbus.kernels.ops.cpu_library.is_available", lambda: compiled.append(True))
    Engine(model).warm()
    assert compiled == [True]


@KINDS
@pytest.mark.parametrize("params", [SEEDED, replace(SEEDED, repetition_penalty=1.2)], ids=["", "penalty"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 20}, {"cache_tokens": 5 * BLOCK, "max_model_len": 5 * BLOCK}, {"speculation": 3}],
    ids=str,
)
def test_requests_are_added_while_others_run(model, kind, options, params):
    engine = kind(Engine(model, max_num_seqs=3, **options))
    requests = [request(prompt, tokens=18 + at, params=params) for at, prompt in enumerate(PROMPTS)]
    for each in requests:
        engine.add(each)
        for _ in range(4):
            engine.step()
    finish(engine)
    for at, each in enumerate(requests):
        assert each.token_ids == alone(model, each.prompt, 18 + at, params)
        assert each.finish_reason == "length"


def test_rows_of_different_kinds_share_steps_that_go_ahead(model):
    """A penalized row has to be read before its next step; others come and go around it."""
    engine = as_on_a_gpu(Engine(model))
    kinds = [None, SEEDED, SamplingParams(temperature=0, repetition_penalty=1.5), SamplingParams(seed=1, min_tokens=3)]
    requests = [
        request(prompt, tokens=12 + 5 * at, params=kinds[(at + late) % 4])
        for late in range(2)
        for at, prompt in enumerate(PROMPTS)
    ]
    for each in requests:
        engine.add(each)
        engine.step()
    finish(engine)
    for each in requests:
        assert each.token_ids == alone(model, each.prompt, each.limit, each.params)


def test_graphs_are_for_filled_up_rows_and_bounded_lengths(model):
    engine = as_on_a_gpu(Engine(model, max_num_seqs=8))
    requests = [request([at], tokens=6) for at in range(3)]
    finish(engine, requests)
    assert set(engine._instance.step._graphs.keys) == {(32, 512, "mixed", False), (4, 512, "decode", False)}
    assert engine.stats().steps == 6


@KINDS
def test_a_request_that_is_called_off_gets_nothing_more_and_disturbs_nobody(model, kind):
    engine = kind(Engine(model, max_num_batched_tokens=40))
    requests = [request(prompt, tokens=30) for prompt in PROMPTS]
    waiting = request(PROMPTS[0], tokens=30)
    for each in requests:
        engine.add(each)
    engine.step()
    engine.abort(requests[3])  # whose prompt is not read yet
    for _ in range(6):
        engine.step()
    engine.abort(requests[2])
    kept = list(requests[2].token_ids)
    engine.add(waiting)
    engine.abort(waiting)
    engine.abort(waiting)
    pieces = finish(engine)
    assert requests[2].token_ids == kept
    assert not {requests[2], requests[3], waiting} & set(pieces)
    for at in (0, 1, 4):
        assert requests[at].token_ids == alone(model, PROMPTS[at], 30)


@KINDS
def test_each_ends_at_its_own_stop_token(model, kind):
    answers = [alone(model, prompt, 30) for prompt in PROMPTS]
    requests = [
        request(prompt, tokens=30, params=SamplingParams(temperature=0, stop_token_ids=(answer[3 + 4 * at],)))
        for at, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True))
    ]
    pieces = finish(kind(Engine(model)), requests)
    for at, (each, answer) in enumerate(zip(requests, answers, strict=True)):
        assert each.token_ids == answer[: answer.index(answer[3 + 4 * at]) + 1]
        assert [piece.finish_reason for piece in pieces[each]] == [None] * (len(pieces[each]) - 1) + ["stop"]
        assert [token for piece in pieces[each] for token in piece.token_ids] == each.token_ids


def test_no_stop_token_comes_before_its_time(model):
    answer = alone(model, PROMPTS[0], 10)
    params = SamplingParams(temperature=0, stop_token_ids=(answer[2],), min_tokens=9)
    each = request(PROMPTS[0], tokens=20, params=params)
    finish(Engine(model), [each])
    assert len(each.token_ids) >= 9
    assert answer[2] not in each.token_ids[:8]


@pytest.mark.parametrize("limit", [1, 2])
def test_answers_of_one_and_two_tokens(model, limit):
    requests = [request(prompt, tokens=limit) for prompt in PROMPTS]
    finish(as_on_a_gpu(Engine(model)), requests)
    assert [each.token_ids for each in requests] == [alone(model, prompt, 30)[:limit] for prompt in PROMPTS]


def test_requests_of_different_salts_share_nothing_that_is_stored(model):
    engine = Engine(model)
    prompt, salts = PROMPTS[4], (b"", b"one", b"two")
    requests = {salt: [request(prompt, tokens=5) for _ in range(2)] for salt in salts}
    for which in range(2):
        for salt in salts:
            requests[salt][which].cache_salt = salt
            finish(engine, [requests[salt][which]])
    for first, second in requests.values():
        assert (first.cached_tokens, second.cached_tokens) == (0, 2 * BLOCK)
        assert first.token_ids == second.token_ids == alone(model, prompt, 5)


def test_salts_of_adapters_and_of_requests_are_all_different():
    found = [salt_of(name, salt) for name in (None, "a", "b") for salt in (b"", b"a", b"b")]
    assert len(set(found)) == 9
    assert found[0] == b""
    assert {len(salt) for salt in found[1:]} == {16}


def test_what_is_too_long_is_refused(model):
    engine = Engine(model, max_model_len=40)
    with pytest.raises(ContextLengthError, match="a request needs 41 tokens, the context holds 40"):
        engine.decode([[1] * 20], 21)
    assert not engine.has_work
    assert len(engine.decode([[1] * 20], 20)[0]) == 20


def test_token_ids_that_the_vocabulary_lacks_are_refused(model):
    engine = Engine(model)
    with pytest.raises(UsageError, match="stop_token_ids has the token id 300: give ids below 300"):
        engine.add(request([1], tokens=3, params=SamplingParams(stop_token_ids=(300,))))
    assert not engine.has_work


def test_a_cache_that_is_too_small_is_refused_or_shortens_the_context(model):
    with pytest.raises(DeviceError, match=r"room for a cache of 64 tokens, 100 are needed: .* lower max_model_len"):
        Engine(model, max_model_len=100, cache_tokens=90)
    engine = Engine(model, cache_tokens=90)
    assert engine.max_model_len == 64
    with pytest.raises(ContextLengthError, match="the context holds 64"):
        engine.decode([[1] * 60], 5)
    assert len(engine.decode([[1] * 60] * 3, 4)) == 3


def test_a_cache_of_codes_on_a_cpu(model):
    plain = Engine(model, cache_tokens=256)
    for kv_dtype in ("int8", "fp8", "int4"):
        engine = Engine(model, kv_dtype=kv_dtype, cache_tokens=256)
        assert engine.kv_kind == kv_dtype
        assert engine._instance.cache.block_bytes < 0.5 * plain._instance.cache.block_bytes
        found = engine.decode(PROMPTS, 4)
        assert [len(answer) for answer in found] == [len(answer) for answer in plain.decode(PROMPTS, 4)]


def test_a_plan_is_taken_over(model):
    plan = MemoryPlan("GPU", {}, 10**9, 96, 320, "auto", None, False, 16)
    engine = Engine.planned(model, plan, max_num_seqs=2)
    assert (engine.max_model_len, engine.max_num_seqs, engine.stats().blocks) == (96, 2, 10)
    assert engine.decode(PROMPTS, 4) == Engine(model).decode(PROMPTS, 4)
    assert Engine.planned(model, replace(plan, kv_dtype="int8")).kv_kind == "int8"


@pytest.fixture
def small_growth(monkeypatch):
    """The cache grows by the block, not by many."""
    monkeypatch.setattr(kv_cache, "_GROWTH", 1)


@pytest.mark.usefixtures("small_growth")
def test_memory_comes_with_what_is_asked_and_goes_with_shrink(model):
    engine = Engine(model)
    start = engine.stats().cache_bytes
    finish(engine, [request(prompt, tokens=30) for prompt in PROMPTS])
    assert engine.stats().cache_bytes > 2 * start
    engine.shrink()
    assert engine.stats().cache_bytes == start
    assert engine.decode(PROMPTS, 5) == Engine(model).decode(PROMPTS, 5)


@KINDS
@pytest.mark.usefixtures("small_growth")
def test_shrinking_leaves_alone_what_runs(model, kind):
    engine = kind(Engine(model))
    requests = [request(prompt, tokens=40) for prompt in PROMPTS]
    for each in requests:
        engine.add(each)
    for at in range(8):
        engine.step()
        engine.shrink()
        if at < 2:
            engine.abort(requests[at])
    finish(engine)
    for each in requests[2:]:
        assert each.token_ids == alone(model, each.prompt, 40)


@KINDS
@pytest.mark.usefixtures("small_growth")
def test_where_memory_does_not_grow_requests_give_way_and_come_back(model, kind, monkeypatch):
    back = KVCache.commit
    monkeypatch.setattr(KVCache, "commit", lambda cache, blocks: back(cache, min(blocks, 8)))
    engine = kind(Engine(model))
    requests = [request(prompt, tokens=40, params=SEEDED) for prompt in PROMPTS]
    finish(engine, requests)
    assert engine.stats().preemptions > 0
    for each in requests:
        assert each.token_ids == alone(model, each.prompt, 40, SEEDED)


@KINDS
@pytest.mark.parametrize("params", [None, SEEDED], ids=["greedy", "seeded"])
def test_prompts_end_beside_guesses_that_fill_the_rows(model, kind, params, monkeypatch):
    """A step chooses no more tokens than there are rows for, those after prompts included."""
    monkeypatch.setattr(NgramIndex, "propose", lambda _, count: list(range(count)))
    engine = kind(Engine(model, max_num_seqs=8, speculation=8, prefix_caching=False))
    requests = [request([at, 7, 9], tokens=20, params=params) for at in range(12)]
    for at, each in enumerate(requests):
        engine.add(each)
        if at == 3:
            for _ in range(6):
                engine.step()
    finish(engine)
    assert engine.stats().drafted > 100
    for each in requests:
        assert each.token_ids == alone(model, each.prompt, 20, params)


@KINDS
@pytest.mark.parametrize("options", [{}, {"speculation": 2}, {"max_num_seqs": 2}], ids=str)
def test_an_engine_goes_with_its_last_user_and_not_by_the_garbage_collector(model, kind, options):
    """What a GPU's driver does then must not happen at any moment, such as in a capture."""
    engine = kind(Engine(model, **options))
    left = request(PROMPTS[0], tokens=50)
    finish(engine, [request(prompt, tokens=5) for prompt in PROMPTS])
    engine.add(left)
    engine.step()
    gone = [weakref.ref(each) for each in (engine, engine._instance.cache, engine._instance.step)]
    collects = gc.isenabled()
    gc.disable()
    try:
        del engine
        assert [each() for each in gone] == [None, None, None]
    finally:
        if collects:
            gc.enable()


def test_full_memory_is_a_device_error(model, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(model), "transform", full)
    with pytest.raises(DeviceError, match="out of memory with 3 sequences: lower max_num_seqs or max_model_len"):
        Engine(model).decode(PROMPTS[:3], 4)


@KINDS
@pytest.mark.parametrize(("method", "at"), [("_scores", 1), ("_sample", 2), ("_sample", 6)])
@pytest.mark.parametrize("params", [SEEDED, replace(SEEDED, frequency_penalty=1.0)], ids=["", "penalty"])
def test_what_was_interrupted_is_computed_again(model, kind, method, at, params, monkeypatch):
    """Blocks that were promised to be full are not found after all, and nobody loses a token or draws another."""
    engine = kind(Engine(model, max_num_batched_tokens=70))
    requests = [request(prompt, tokens=15, params=params) for prompt in PROMPTS]
    original, calls = getattr(Runner, method), []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(Runner, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        finish(engine, requests)
    engine.abort(requests[2])
    again = request(PROMPTS[2], tokens=15, params=params)
    finish(engine, [again])
    for each in (requests[0], requests[1], requests[3], requests[4], again):
        assert each.token_ids == alone(model, each.prompt, 15, params)


def test_sleep_keeps_answers_and_no_memory():
    model = random_model(SMALL, None, "cpu", torch.float32)
    expected = Engine(model).decode(PROMPTS, 10)
    engine = Engine(model, offloadable=OffloadableModel(model))
    assert engine.decode(PROMPTS, 10) == expected
    for _ in range(2):
        engine.sleep()
        engine.sleep()
        assert (engine.asleep, engine.stats().cache_bytes, engine.stats().blocks_idle) == (True, 0, 0)
        engine.wake()
        engine.wake()
        assert not engine.asleep
        assert engine.decode(PROMPTS, 10) == expected


def test_sleep_wants_no_requests_and_a_model_that_can(model):
    with pytest.raises(UsageError, match="this engine cannot sleep"):
        Engine(model).sleep()
    own = random_model(SMALL, None, "cpu", torch.float32)
    engine = Engine(own, offloadable=OffloadableModel(own))
    each = request(PROMPTS[0], tokens=3)
    engine.add(each)
    with pytest.raises(UsageError, match="1 requests are under way: let them end, or abort them, before sleep"):
        engine.sleep()
    finish(engine)
    engine.sleep()


def some_params(dice):
    return SamplingParams(
        temperature=dice.choice([0.0, 0.0, 0.7, 1.3]),
        top_p=dice.choice([1.0, 0.9]),
        top_k=dice.choice([0, 0, 5]),
        min_p=dice.choice([0.0, 0.05]),
        seed=dice.randrange(100),
        repetition_penalty=dice.choice([1.0] * 6 + [1.2]),
        frequency_penalty=dice.choice([0.0] * 6 + [0.5]),
        min_tokens=dice.choice([0] * 6 + [2]),
        stop_token_ids=tuple(dice.sample(range(300), 3)),
        logprobs=dice.choice([None] * 6 + [2]),
    )


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 50}, {"speculation": 3}], ids=str)
@pytest.mark.usefixtures("small_growth")
def test_hundreds_of_requests_come_and_go(options):
    model = random_model(with_traits(SMALL, num_layers=2, hidden_size=32, num_heads=2), None, "cpu", torch.float32)
    dice = random.Random(0)
    engine = Engine(model, max_num_seqs=8, cache_tokens=6 * BLOCK, max_model_len=5 * BLOCK, **options)
    engine = engine if options.get("speculation") else as_on_a_gpu(engine)
    requests, aborted = [], set()
    while len(requests) < 150 or engine.has_work:
        if len(requests) < 150 and dice.random() < 0.8:
            prompt = [
                *dice.choice(PROMPTS)[: dice.choice([1, 20, 33, 64, 75])],
                *dice.choices(range(300), k=dice.randrange(3)),
            ]
            tokens = dice.choice([1, 5, 40, 60])
            requests.append(request(prompt, tokens=tokens, params=some_params(dice)))
            engine.add(requests[-1])
        if requests and dice.random() < 0.03:
            gone = dice.choice(requests)
            if gone.finish_reason is None:
                aborted.add(gone)
            engine.abort(gone)
        if dice.random() < 0.01:
            engine.shrink()
        engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert all((each.finish_reason is None) == (each in aborted) for each in requests)
    for each in dice.sample([each for each in requests if each not in aborted], 12):
        assert each.token_ids == alone(model, each.prompt, each.limit, each.params)

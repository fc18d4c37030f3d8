"""Speculation by multi-token prediction: the same answers as without it, and the drafts that the layer gives."""

import asyncio
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from engine_models import PROMPTS, SMALL, as_on_a_gpu, assert_best, finish
from mtp_models import EXACT, MTP, predictable, reference_drafts
from test_engine_engine import Alternating

from warpbus.engine import moving
from warpbus.engine.blocks import BLOCK
from warpbus.engine.engine import Engine, request
from warpbus.engine.loading import build_engine, open_model
from warpbus.engine.options import ServiceOptions
from warpbus.engine.plan import Stored, plan_memory
from warpbus.engine.sampling_params import Grammar, SamplingParams
from warpbus.engine.sequence import Sequence
from warpbus.engine.service import Service
from warpbus.engine.speculation import MOST_MTP_SEQUENCES, DraftPolicy, Speculation
from warpbus.errors import CheckpointError, UsageError
from warpbus.formats import Checkpoint, CheckpointWriter
from warpbus.models import SHAPES, AttentionSpec, LayerSpec, MLPSpec, MoESpec, NormSpec, RouterSpec, random_model
from warpbus.models.adapters import Prefix
from warpbus.models.random_checkpoint import write_random_checkpoint
from warpbus.qtensor import Scheme

GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(seed=5, top_p=0.9, temperature=0.8)
LOGPROBS = SamplingParams(temperature=0, logprobs=2, repetition_penalty=1.2, logit_bias={7: 2.0}, min_tokens=4)
MANY = [[(7 * at + 3 * number) % 300 for at in range(1 + 5 * number % 40)] for number in range(40)]
FEW_BLOCKS = {"cache_tokens": 5 * BLOCK, "max_model_len": 5 * BLOCK}


@pytest.fixture(scope="module")
def model():
    return predictable()


def answers(model, params, tokens=30, prompts=PROMPTS, kind=lambda engine: engine, **options):
    """What a new engine answers to all prompts together."""
    requests = [request(prompt, tokens=tokens, params=params) for prompt in prompts]
    engine = kind(Engine(model, **options))
    finish(engine, requests)
    return requests, engine.stats()


@cache
def alone(model, params):
    return [answers(model, params, prompts=[prompt])[0][0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("kind", [lambda engine: engine, as_on_a_gpu], ids=["kernel by kernel", "graphs"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED, LOGPROBS], ids=["greedy", "seeded", "processed"])
@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "mtp"},
        {"speculation": "mtp:4"},
        {"speculation": "mtp:2", "max_num_seqs": 2},
        {"speculation": "mtp:3", "max_num_batched_tokens": 5},
        {"speculation": "mtp:2", "prefix_caching": False},
        {"speculation": "mtp:1"} | FEW_BLOCKS,
        {"speculation": "mtp:4", "max_num_batched_tokens": 33} | FEW_BLOCKS,
    ],
    ids=str,
)
def test_the_answers_are_those_without_it(model, params, options, kind):
    found, stats = answers(model, params, kind=kind, **options)
    assert [each.token_ids for each in found] == alone(model, params)
    assert 0 < stats.accepted < stats.drafted
    assert stats.acceptance == stats.accepted / stats.drafted
    assert (stats.preemptions > 0) == ("cache_tokens" in options)


@pytest.mark.parametrize(("family", "kv_dtype"), [*((family, "auto") for family in EXACT), ("latent", "fp8")])
def test_every_kind_of_attention(family, kv_dtype):
    model = predictable(EXACT[family])
    expected, _ = answers(model, GREEDY, kv_dtype=kv_dtype)
    found, stats = answers(model, GREEDY, speculation="mtp:3", kv_dtype=kv_dtype)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert stats.accepted > 0


def test_a_quantized_model():
    model = predictable(scheme=Scheme.parse("w4a16-g32"))
    found, stats = answers(model, GREEDY, speculation="mtp:2")
    for each in found:
        assert_best(model, each.prompt, each.token_ids)
    assert stats.drafted > 0


def test_many_prompts(model):
    """More sequences than drafts are made for; they end at different times."""
    expected, plain = answers(model, GREEDY, prompts=MANY, max_num_seqs=40)
    found, stats = answers(model, GREEDY, prompts=MANY, max_num_seqs=40, speculation="mtp:2")
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    few, saved = answers(model, GREEDY, prompts=MANY, max_num_seqs=8, speculation="mtp:2")
    assert [each.token_ids for each in few] == [each.token_ids for each in expected]
    assert saved.drafted > stats.drafted == 0 == plain.drafted


def test_logprobs_are_those_without_it(model):
    expected, _ = answers(model, LOGPROBS)
    found, _ = answers(model, LOGPROBS, speculation="mtp:3")
    for one, other in zip(expected, found, strict=True):
        assert [each.token for each in one.logprobs] == [each.token for each in other.logprobs]
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)


@pytest.mark.parametrize("family", EXACT)
@pytest.mark.parametrize("kind", [lambda engine: engine, as_on_a_gpu], ids=["kernel by kernel", "graphs"])
@pytest.mark.parametrize("max_num_batched_tokens", [None, 5])
def test_the_drafts_are_those_of_passes_without_a_cache(family, kind, max_num_batched_tokens):
    model, checked = predictable(EXACT[family]), 0
    engine = kind(Engine(model, speculation="mtp:3", max_num_batched_tokens=max_num_batched_tokens))
    requests = [request(prompt, tokens=12) for prompt in PROMPTS]
    for each in requests:
        engine.add(each)
    while engine.has_work:
        for sequence, _ in engine.step():
            if sequence.finish_reason is None and sequence.token_ids:
                ids = sequence.scheduler_state.ids
                assert sequence.runner_state.drafts == reference_drafts(model, ids, 3)
                checked += 1
    assert checked >= len(PROMPTS) * 3


def test_a_cached_prompt_is_drafted_for_as_one_that_is_not(model):
    prompt = [7 * at % 300 for at in range(3 * BLOCK + 5)]
    engine = Engine(model, speculation="mtp:2")
    first = request(prompt, tokens=10)
    finish(engine, [first])
    before = engine.stats()
    second = request(prompt, tokens=10)
    finish(engine, [second])
    after = engine.stats()
    assert second.cached_tokens == 3 * BLOCK
    assert second.token_ids == first.token_ids
    assert (after.drafted, after.accepted) == (2 * before.drafted, 2 * before.accepted)
    # Another end of the same beginning.
    other = request([*prompt[: 2 * BLOCK], 5, 6], tokens=10)
    finish(engine, [other])
    assert other.cached_tokens == 2 * BLOCK
    assert other.token_ids == answers(model, GREEDY, tokens=10, prompts=[other.prompt])[0][0].token_ids


def test_drafts_end_with_the_answer(model):
    """No draft is verified beyond the last token, nor stored in a block that is not the sequence's."""
    prompt = list(range(50, 50 + BLOCK - 3))
    for tokens in range(1, 8):
        engine = Engine(model, max_model_len=len(prompt) + tokens, speculation="mtp:4", max_num_seqs=2)
        others = [request(prompt[::-1], tokens=tokens), request(prompt, tokens=tokens)]
        finish(engine, others)
        expected = [request(each.prompt, tokens=tokens) for each in others]
        finish(Engine(model), expected)
        assert [each.token_ids for each in others] == [each.token_ids for each in expected]


def test_stop_tokens_end_an_answer_within_its_drafts(model):
    whole = answers(model, GREEDY, tokens=30)[0]
    stops = SamplingParams(temperature=0, stop_token_ids=(whole[0].token_ids[9],))
    expected, _ = answers(model, stops)
    found, _ = answers(model, stops, speculation="mtp:4")
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert found[0].finish_reason == "stop"


def test_grammars_forbid_drafts(model):
    """Drafts that the grammar forbids are rejected; those of other requests in the batch are not."""

    def mixed(**options):
        free = [request(prompt, tokens=25) for prompt in PROMPTS]
        params = SamplingParams(temperature=0, grammar=Grammar("regex", "any: the matcher is given"))
        settings = {"limit": 25, "stop_ids": frozenset(), "stream": free[0]._stream}
        bound = [Sequence(0, prompt, params, matcher=Alternating(), **settings) for prompt in PROMPTS]
        engine = Engine(model, **options)
        finish(engine, [each for pair in zip(free, bound, strict=True) for each in pair])
        return [each.token_ids for each in (*free, *bound)], engine.stats()

    expected, _ = mixed()
    found, stats = mixed(speculation="mtp:3")
    assert found == expected
    assert all(token % 2 == (at + 1) % 2 for answer in found[len(PROMPTS) :] for at, token in enumerate(answer))
    assert stats.accepted > 0


@pytest.mark.parametrize("part", ["predict", "draft"])
@pytest.mark.parametrize("kind", [lambda engine: engine, as_on_a_gpu], ids=["kernel by kernel", "graphs"])
def test_a_step_that_fails_is_computed_again(model, part, kind, monkeypatch):
    engine, calls = kind(Engine(model, speculation="mtp:2")), []
    whole = getattr(engine._instance.step, part)

    def failing(*arguments):
        calls.append(part)
        if len(calls) in (3, 7):
            raise RuntimeError("the device stumbled")
        return whole(*arguments)

    monkeypatch.setattr(engine._instance.step, part, failing)
    requests = [request(prompt, tokens=30, params=SEEDED) for prompt in PROMPTS]
    for each in requests:
        engine.add(each)
    failures = 0
    while engine.has_work:
        try:
            engine.step()
        except RuntimeError:
            failures += 1
    assert failures == 2
    assert [each.token_ids for each in requests] == alone(model, SEEDED)


def test_a_damaged_layer_changes_no_answer():
    model = predictable()
    expected, _ = answers(model, GREEDY)
    with torch.no_grad():
        model.layers[MTP.num_layers].attention.o.weight.fill_(torch.nan)
    found, stats = answers(model, GREEDY, speculation="mtp:3")
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert all(each.error is None for each in found)
    assert stats.drafted > 0


def test_it_rests_where_drafts_are_wrong_and_steps_run_ahead():
    """A layer of random weights is never right: after the first steps nothing is drafted, until the next trial."""
    model, prompts = random_model(MTP, None, "cpu", torch.float32), PROMPTS[:2]
    expected, _ = answers(model, GREEDY, tokens=400, prompts=prompts)
    for kind in (lambda engine: engine, as_on_a_gpu):
        found, stats = answers(model, GREEDY, tokens=400, prompts=prompts, speculation="mtp:1", kind=kind)
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        assert 40 <= stats.drafted <= 100


def test_it_goes_on_after_a_rest(monkeypatch):
    """Steps ran ahead meanwhile, and stored all keys and values of the layer."""
    model = predictable()
    monkeypatch.setattr(DraftPolicy, "count", lambda policy, running: 2 * (policy._step % 20 < 10))
    expected, _ = answers(model, GREEDY, tokens=100)
    engine = as_on_a_gpu(Engine(model, speculation="mtp:2"))
    requests = [request(prompt, tokens=100) for prompt in PROMPTS]
    for each in requests:
        engine.add(each)
    checked = 0
    while engine.has_work:
        for sequence, _ in engine.step():
            verifies = engine._pipeline.drafting._proposed and not engine._pipeline.launched
            if sequence.finish_reason is None and sequence.token_ids and verifies:
                assert sequence.runner_state.drafts == reference_drafts(model, sequence.scheduler_state.ids, 2)
                checked += 1
    assert [each.token_ids for each in requests] == [each.token_ids for each in expected]
    assert checked > 50
    assert engine.stats().steps > engine.stats().drafted / 10


def test_graphs_captured_ahead_are_those_that_steps_use(model):
    engine = as_on_a_gpu(Engine(model, speculation="mtp:2", max_num_seqs=4))
    engine._instance.step.capture(4, 300)
    captured = set(engine._instance.step._graphs.keys)
    expected, _ = answers(model, GREEDY, tokens=20, prompts=PROMPTS[:4])
    requests = [request(prompt, tokens=20) for prompt in PROMPTS[:4]]
    finish(engine, requests)
    assert [each.token_ids for each in requests] == [each.token_ids for each in expected]
    used = set(engine._instance.step._graphs.keys)
    # Three sequences, or four that have fewer drafts at their ends, are captured when they are first needed.
    assert {key[2] for key in captured} == {"decode", "mixed", "host", "predict", "draft 2"}
    assert len(used & captured) > len(used - captured)


def test_it_moves_to_another_device(model):
    expected, _ = answers(model, SEEDED)
    engine = Engine(model, speculation="mtp:2")
    requests = [request(prompt, tokens=30, params=SEEDED) for prompt in PROMPTS]
    for each in requests:
        engine.add(each)
    for _ in range(5):
        engine.step()
    move = moving.EngineMigration(engine, torch.device("cpu"))
    move.prepare()
    while not move.copy_ahead():
        engine.step()
    move.finish()
    finish(engine)
    move.release()
    assert [each.token_ids for each in requests] == [each.token_ids for each in expected]


def test_sampled_tokens_have_the_models_distribution():
    """Chi-squared of the first three tokens of 4,000 answers: drafts are verified from the second one on."""
    config = EXACT["glm"].resized(num_layers=1)
    model = predictable(replace(config, vocab_size=5), share=0.6)
    params = [SamplingParams(temperature=0.9, seed=seed) for seed in range(4000)]
    engine = Engine(model, speculation="mtp:2", max_num_seqs=MOST_MTP_SEQUENCES)
    engine._pipeline.drafting._policy.count = lambda running: 2
    requests = [request([1, 2, 3], tokens=3, params=each) for each in params]
    finish(engine, requests)
    stats = engine.stats()
    assert 0.2 < stats.acceptance < 0.95
    found = Counter(tuple(each.token_ids) for each in requests)
    expected = {}
    with torch.no_grad():
        for answer in product(range(5), repeat=3):
            logits = model(torch.tensor([[1, 2, 3, *answer[:-1]]]))[0, 2:] / 0.9
            chances = logits.softmax(-1).gather(1, torch.tensor(answer)[:, None])
            expected[answer] = len(requests) * float(chances.prod())
    frequent = [answer for answer, count in expected.items() if count >= 5]
    assert sum(expected[answer] for answer in frequent) > 0.95 * len(requests)
    squares = sum((found[answer] - expected[answer]) ** 2 / expected[answer] for answer in frequent)
    degrees = len(frequent)
    assert squares < degrees + 4 * (2 * degrees) ** 0.5
    # A sampler that took drafts as they are would be far beyond.
    assert degrees > 10


def test_the_policy_drafts_what_pays():
    policy = DraftPolicy(3)
    assert [policy.count(running) for running in (1, MOST_MTP_SEQUENCES, MOST_MTP_SEQUENCES + 1)] == [3, 3, 0]
    for _ in range(32):
        policy.advance()
    for _ in range(200):
        policy.record(3, 2)
    assert policy.count(1) == 2
    for at in range(200):
        policy.record(2, at % 2)  # the first draft is accepted every second time, the second one never
    assert [policy.count(running) for running in (4, 16, 17, 33)] == [1, 1, 0, 0]
    for _ in range(200):
        policy.record(1, 0)
    assert policy.count(1) == 0
    # All positions are measured again.
    for _ in range(480):
        policy.advance()
    assert policy.count(1) == 3
    for _ in range(32):
        policy.record(3, 3)
        policy.advance()
    assert policy.count(4) == 3
    assert policy.count(20) == 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, Speculation()),
        ("0", Speculation()),
        (1024, Speculation(1024)),
        ("7", Speculation(7)),
        ("mtp", Speculation(1, mtp=True)),
        ("mtp:4", Speculation(4, mtp=True)),
    ],
)
def test_the_spelling(value, expected):
    assert Speculation.parse(value) == expected


@pytest.mark.parametrize(
    "value", [-1, 1025, True, "", ":3", "mtp:0", "mtp:5", "mtp:", "mtp:two", "eagle", "ngram:3", "²"]
)
def test_other_spellings_are_refused(value):
    with pytest.raises(UsageError) as caught:
        Speculation.parse(value)
    assert str(caught.value) == (
        f"speculation is {value!r}: give a whole number, 0 to 1,024, for n-gram lookup, or mtp:1 to mtp:4 for "
        "multi-token prediction"
    )


def test_rows_of_a_step():
    assert Speculation(3).rows(8) == 11
    assert Speculation(3, mtp=True).rows(8) == 32
    assert Speculation(2, mtp=True).rows(100) == 164


def test_models_and_adapters_without_it_are_refused():
    plain = random_model(SMALL, None, "cpu", torch.float32)
    with pytest.raises(UsageError, match=r"^speculation is mtp, but the model was loaded without its layer"):
        Engine(plain, speculation="mtp")
    shape = SMALL.num_layers, 4, SMALL.attention.num_kv_heads, SMALL.attention.head_dim
    prefix = Prefix("poet", torch.zeros(shape), torch.zeros(shape))
    with pytest.raises(UsageError, match=r"^speculation is mtp, but the adapter poet is a P-Tuning prefix"):
        Engine(predictable(), speculation="mtp", adapters=[prefix])


@pytest.fixture
def directory(tmp_path):
    attention, router = AttentionSpec(4, 2, 16, qkv_bias=True), RouterSpec(4, 2, "sigmoid", bias=True)
    norm, experts = NormSpec(1e-5), MoESpec(router, MLPSpec(32), MLPSpec(32))
    layers = tuple(LayerSpec(64, attention, mlp, norm) for mlp in (MLPSpec(96), experts))
    shape = replace(
        SHAPES["glm-4.5-air"],
        vocab_size=48,
        layers=layers,
        max_context=64,
        rope=replace(MTP.rope, interleaved=False),
        stop_ids=(2,),
    )
    write_random_checkpoint(tmp_path / "model", shape.with_mtp(), torch.float32, device="cpu")
    return tmp_path / "model"


def test_a_checkpoint_is_loaded_with_its_layer(directory):
    def engine_of(**options):
        chosen = ServiceOptions(device="cpu", dtype="float32", max_num_seqs=4, **options)
        return build_engine(open_model(directory, torch.device("cpu"), chosen), chosen)

    plain, drafting = engine_of(), engine_of(speculation="mtp:2")
    assert (len(plain.model.layers), len(drafting.model.layers)) == (2, 3)
    # One layer more has keys and values.
    assert 2 * drafting._instance.cache.block_bytes == 3 * plain._instance.cache.block_bytes
    prompts = [[5, 6, 7], [8] * 20]
    assert drafting.decode(prompts, 20) == plain.decode(prompts, 20)
    assert drafting.stats().drafted > 0


def test_a_checkpoint_without_its_layer_is_refused_before_anything_is_loaded(directory):
    checkpoint = Checkpoint(directory)
    broken = directory.parent / "broken"
    with CheckpointWriter(broken) as writer:
        writer.write_json("config.json", checkpoint.config)
        for name in checkpoint.names():
            if name != "model.layers.2.enorm.weight":
                writer.add(name, checkpoint.tensor(name))
        writer.finish()
    message = r"broken: model\.layers\.2\.enorm\.weight: missing, although config\.json announces"
    with pytest.raises(CheckpointError, match=message):
        open_model(broken, torch.device("cpu"), ServiceOptions(device="cpu", speculation="mtp"))
    with pytest.raises(CheckpointError, match=message):
        asyncio.run(Service.start(broken, ServiceOptions(device="cpu", speculation="mtp")))
    assert open_model(broken, torch.device("cpu"), ServiceOptions(device="cpu")).config.mtp is None


def test_the_plan_of_the_memory_counts_it():
    config = replace(SHAPES["glm-4.5-air"], layers=SHAPES["glm-4.5-air"].layers[:4])
    scheme = Scheme.parse("w4a16-g128")
    plans = [
        plan_memory(Stored.uniform(each, torch.bfloat16, scheme), 24 * 10**9, max_model_len=4096, max_num_seqs=4)
        for each in (config, config.with_mtp())
    ]
    plain, more = (plan.parts for plan in plans)
    layer = config.layers[-1].num_weights * 4.125 / 8
    projection = 2 * 2 * 4096**2
    assert layer < more["layers"] - plain["layers"] < layer + projection + 2 * 10**6
    assert more["KV cache"] > 1.2 * plain["KV cache"]

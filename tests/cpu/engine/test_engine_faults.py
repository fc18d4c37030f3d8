"""A fault of one request ends that request with an error, and the others get the tokens that they would have got.

Faults are those of a request's own: an adapter that overflows, a grammar or a text that cannot be handled, a cache that
does not fit. Those of the engine (full memory, a device that fails) still end the step.
"""

import logging
from dataclasses import dataclass, replace

import pytest
import torch
from dense_configs import with_traits
from engine_models import PROMPTS, SMALL, as_on_a_gpu, finish, random_lora
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warpbus.engine import kv_cache
from warpbus.engine.blocks import BLOCK
from warpbus.engine.engine import Engine, request
from warpbus.engine.grammar import GrammarCompiler
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.sampling_params import Grammar, SamplingParams
from warpbus.engine.sequence import Sequence
from warpbus.engine.speculation import NgramIndex
from warpbus.errors import DeviceError, NumericError, UnavailableError, WarpbusError
from warpbus.models import random_model
from warpbus.models.tokenizers import StreamDecoder

END = 299
SEEDED = SamplingParams(seed=5, top_p=0.9, temperature=0.8)


class Letters:
    """A token a byte, the pairs aa, bb, ..., and `END`."""

    vocab_size = SMALL.vocab_size
    special_ids = {"<end>": END}  # noqa: RUF012
    drops_first_space = False
    own_spaces = frozenset()

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token):
        if token < 256:
            return bytes([token])
        return b"" if token == END else bytes([ord("a") + (token - 256) % 26]) * 2


LETTERS = Letters()
COMPILER = GrammarCompiler(LETTERS, vocab_size=SMALL.vocab_size, stop_ids=[END])


@pytest.fixture(scope="module")
def model():
    return random_model(with_traits(SMALL, hidden_size=32, num_heads=2), None, "cpu", torch.float32)


@pytest.fixture(scope="module")
def adapters(model):
    """One that works, and one whose products are infinite though its numbers are not."""
    return [random_lora(model, "good", 4), random_lora(model, "overflow", 4, scale=1e30)]


def asked(prompt, params, *, tokens=30, adapter=None):
    return Sequence(
        7,
        list(prompt),
        params,
        limit=tokens,
        stop_ids=frozenset([END]),
        stream=StreamDecoder(LETTERS, keep_first_space=True),
        matcher=None if params.grammar is None else COMPILER.compile(params.grammar),
        adapter=adapter,
    )


KINDS = pytest.mark.parametrize("kind", [lambda engine: engine, as_on_a_gpu], ids=["read at once", "ahead"])
OPTIONS = pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 20}, {"speculation": 3}], ids=str)


@KINDS
@OPTIONS
def test_scores_that_are_no_numbers_end_their_request_alone(model, adapters, kind, options):
    others = [(prompt, name) for prompt in PROMPTS for name in (None, "good")]
    expected = [asked(prompt, SEEDED, adapter=name) for prompt, name in others]
    finish(Engine(model, adapters=adapters), expected)
    engine = kind(Engine(model, adapters=adapters, **options))
    got = [asked(prompt, SEEDED, adapter=name) for prompt, name in others]
    bad = [asked(prompt, params, adapter="overflow") for prompt in PROMPTS for params in (SEEDED, SamplingParams())]
    # Some come when others run already, and get the slots and blocks of those that failed.
    for at, each in enumerate(bad):
        engine.add(each)
        engine.add(got[at])
        engine.step()
    finish(engine)
    assert [each.token_ids for each in got] == [each.token_ids for each in expected]
    for each in bad:
        assert isinstance(each.error, NumericError)
        assert "scores hold NaN or infinity: the checkpoint or the adapter overflow" in str(each.error)
        assert (each.finish_reason, each.token_ids) == (None, [])
    assert sorted(engine._pipeline.slots) == list(range(engine.max_num_seqs))


@KINDS
def test_nothing_that_is_stored_of_a_failed_request_is_found_again(model, kind):
    engine = kind(Engine(model))
    first = request(PROMPTS[2], tokens=20)
    engine.add(first)
    while len(first.token_ids) < 3:
        engine.step()
    weight = model.final_norm.weight
    kept = weight[3].item()
    weight[3] = float("nan")
    finish(engine)
    weight[3] = kept
    assert isinstance(first.error, NumericError)
    assert len(first.token_ids) in (3, 4)  # a step may be under way
    again = request(PROMPTS[2], tokens=20)
    finish(engine, [again])
    assert again.cached_tokens == 0
    assert again.token_ids == Engine(model).decode([PROMPTS[2]], 20)[0]


def test_decoding_raises_the_fault_of_a_prompt(model):
    engine = Engine(model)
    weight = model.final_norm.weight
    kept = weight[3].item()
    weight[3] = float("nan")
    try:
        with pytest.raises(NumericError, match="scores hold NaN or infinity: the checkpoint is damaged"):
            engine.decode(PROMPTS, 5)
    finally:
        weight[3] = kept
    assert not engine.has_work


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_grammar_that_allows_stop_tokens_alone_counts_for_more_than_min_tokens(model, temperature):
    """Without its stop tokens the mask would be empty."""
    params = SamplingParams(
        temperature=temperature,
        seed=1,
        grammar=Grammar("regex", "a{10}"),
        min_tokens=5,
        stop_token_ids=(ord("a"), 256),
    )
    other, expected = asked(PROMPTS[2], SEEDED), asked(PROMPTS[2], SEEDED)
    finish(Engine(model), [expected])
    each = asked(PROMPTS[0], params)
    finish(Engine(model), [each, other])
    assert (each.error, each.finish_reason, len(each.token_ids)) == (None, "stop", 1)
    assert each.token_ids[0] in params.stop_token_ids
    assert other.token_ids == expected.token_ids


def test_min_tokens_still_forbids_stop_tokens_where_the_grammar_allows_others(model):
    params = SamplingParams(
        temperature=0, grammar=Grammar("regex", "[ab]{10}"), min_tokens=5, stop_token_ids=(ord("a"), 256)
    )
    each = asked(PROMPTS[0], params)
    finish(Engine(model), [each])
    assert each.error is None
    assert not {ord("a"), 256} & set(each.token_ids[:5])


class Breaking:
    """A matcher, or a stream of text, that raises an error at one of its calls."""

    def __init__(self, inner, method, call, error):
        self._inner, self._method, self._left, self._error = inner, method, call, error

    def __getattr__(self, name):
        if name == self._method:
            self._left -= 1
            if self._left < 0:
                raise self._error
        return getattr(self._inner, name)


def breaking(part, method, call, error=RuntimeError("not today")):  # noqa: B008 - never changed
    params = SamplingParams(temperature=0, grammar=Grammar("regex", "[a-z]{20}"))
    each = asked(PROMPTS[1], params)
    name = {"matcher": "matcher", "stream": "_stream"}[part]
    setattr(each, name, Breaking(getattr(each, name), method, call, error))
    return each


@KINDS
@pytest.mark.parametrize("speculation", [0, 3])
@pytest.mark.parametrize(
    ("part", "method", "call", "tokens"),
    [
        ("matcher", "fill", 0, 0),
        ("matcher", "fill", 4, 4),
        ("matcher", "accept", 4, 5),
        ("matcher", "failed", 0, None),
        ("stream", "push", 3, 4),
        ("stream", "flush", 0, None),
    ],
)
def test_a_grammar_or_text_that_raises_ends_its_request_alone(
    model, kind, speculation, part, method, call, tokens, caplog
):
    expected = [asked(prompt, SEEDED) for prompt in PROMPTS]
    finish(Engine(model), expected)
    engine = kind(Engine(model, speculation=speculation))
    # The same in most of the steps, so that none runs ahead while a grammar does.
    got = [asked(prompt, SEEDED) for prompt in PROMPTS]
    each = breaking(part, method, call)
    with caplog.at_level(logging.ERROR, "warpbus.engine"):
        finish(engine, [got[0], each, *got[1:]])
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    if method == "failed":  # which is asked for at a stop token, and none comes before the grammar's end
        assert each.error is None or "not today" in str(each.error)
        return
    assert type(each.error) is WarpbusError
    assert "cannot handle this request (RuntimeError: not today)" in str(each.error)
    assert each.finish_reason is None
    assert "request 7 failed" in caplog.text
    assert "Traceback" in caplog.text
    if tokens is not None and not speculation:
        assert len(each.token_ids) == tokens


@pytest.mark.parametrize(
    "error", [MemoryError("no memory"), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)
def test_what_is_everybodys_fault_is_raised(model, error):
    engine = Engine(model)
    engine.add(breaking("stream", "push", 2, error))
    with pytest.raises(type(error)):
        finish(engine)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("it is gone")])
def test_a_devices_fault_ends_the_step_and_no_request(model, error, monkeypatch):
    def failing(*_):
        raise error

    engine = Engine(model)
    each = request(PROMPTS[0], tokens=5)
    engine.add(each)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "transform", failing)
        with pytest.raises((DeviceError, torch.AcceleratorError)):
            engine.step()
    assert each.error is None
    finish(engine)
    assert each.token_ids == Engine(model).decode(PROMPTS[:1], 5)[0]


@pytest.mark.parametrize("speculation", [65, 200])
@pytest.mark.parametrize("right", [0, 1, 70])
def test_any_number_of_wrong_guesses_costs_no_random_numbers(model, speculation, right, monkeypatch):
    """The first guesses are right, and all the others wrong."""
    expected = asked(PROMPTS[0], replace(SEEDED, ignore_eos=True), tokens=100)
    finish(Engine(model), [expected])
    answer = expected.token_ids

    def guessed(index, count):
        had = len(index) - len(PROMPTS[0])
        return [*answer[had : had + right], *[(token + 1) % 299 for token in answer[had + right : had + count]]]

    monkeypatch.setattr(NgramIndex, "propose", guessed)
    engine = Engine(model, speculation=speculation)
    each = asked(PROMPTS[0], replace(SEEDED, ignore_eos=True), tokens=100)
    finish(engine, [each])
    assert each.error is None
    assert each.token_ids == answer
    assert engine.stats().drafted > 60


def test_numbers_that_nobody_can_give_back_are_not_kept():
    each = asked(PROMPTS[0], SEEDED)
    for _ in range(50):
        each.uniforms(10)
        each.give_back(9)
        each.append(ord("a"))
    assert len(each._drawn) <= 10


@KINDS
def test_a_request_whose_cache_does_not_fit_ends_and_those_that_fit_go_on(model, kind, monkeypatch):
    back = KVCache.commit
    monkeypatch.setattr(KVCache, "commit", lambda cache, blocks: back(cache, min(blocks, 4)))
    monkeypatch.setattr(kv_cache, "_GROWTH", 1)
    long, growing, short = (asked(prompt, SEEDED) for prompt in ([5] * 100, PROMPTS[2], PROMPTS[0]))
    expected = asked(PROMPTS[0], SEEDED)
    finish(Engine(model), [expected])
    growing.limit = 60
    engine = kind(Engine(model, max_model_len=200))
    finish(engine, [long, growing, short])
    for each, tokens in ((long, 100), (growing, 96)):
        assert isinstance(each.error, UnavailableError)
        assert "cpu: out of memory for the cache of this request alone" in str(each.error)
        assert len(each.prompt) + len(each.token_ids) >= tokens
    assert (short.error, short.token_ids) == (None, expected.token_ids)


# A random engine, and random requests of which some are faulty.


@dataclass(frozen=True)
class Wanted:
    """A request that is still to be made.

    Attributes:
        fault: "" for one whose tokens are compared.
        when: after how many calls, or steps of the engine, it fails or is called off.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: int
    adapter: str | None
    fault: str
    when: int

    def made(self):
        each = asked(
            self.prompt,
            self.params,
            tokens=self.tokens,
            adapter="overflow" if self.fault == "overflow" else self.adapter,
        )
        if self.fault in ("fill", "accept", "rollback") and each.matcher is not None:
            each.matcher = Breaking(each.matcher, self.fault, self.when, ValueError("a fault"))
        if self.fault == "push":
            each._stream = Breaking(each._stream, "push", self.when, ValueError("a fault"))
        return each


GRAMMARS = [
    None,
    None,
    Grammar("regex", "a{10}"),
    Grammar("regex", "[0-9]{2,6}"),
    Grammar("choice", '["aa", "abba", "0"]'),
    Grammar("json_object"),
    Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
]
FAULTS = ["", "", "", "overflow", "fill", "accept", "rollback", "push", "cancel"]


@st.composite
def wanted(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    grammar = draw(st.sampled_from(GRAMMARS))
    tokens = draw(st.integers(1, 30))
    # Where the least rounding decides, requests are not what they are alone: few tokens can be drawn when it is hot.
    temperature = pick(0.0, 0.0, 1e-9, 0.5, 0.8, 100.0)
    params = SamplingParams(
        temperature=temperature,
        top_k=pick(1, 2, 3) if temperature == 100.0 else pick(0, 0, 1, 5, 10**6),
        top_p=pick(1.0, 0.9, 0.3, 1e-6),
        min_p=pick(0.0, 0.0, 0.1, 1.0),
        seed=draw(st.integers(0, 2**63)),
        repetition_penalty=pick(1.0, 1.0, 1.0, 1.3, 100.0, 0.01),
        presence_penalty=pick(0.0, 0.0, 2.0, -2.0),
        frequency_penalty=pick(0.0, 0.0, 0.5, -2.0),
        logit_bias=draw(st.dictionaries(st.integers(0, END), st.sampled_from([-100.0, 1.0, 100.0]), max_size=2)),
        max_tokens=30,
        min_tokens=pick(0, 0, 2, 5, 30),
        stop=pick((), (), ("a",), ("ab", "\n\n")),
        stop_token_ids=tuple(draw(st.lists(st.sampled_from([97, 98, 256, 48, 123, 34, 5, END]), max_size=5))),
        ignore_eos=grammar is None and draw(st.booleans()),
        logprobs=pick(None, None, None, 0, 3, 20),
        grammar=grammar,
    )
    return Wanted(
        tuple(draw(st.sampled_from(PROMPTS))),
        params,
        tokens,
        pick(None, None, "good"),
        draw(st.sampled_from(FAULTS)),
        draw(st.integers(0, 8)),
    )


def answered(engine, all_wanted, together):
    """Answer requests that come one after the other."""
    made = [each.made() for each in all_wanted]
    leaving = {}
    coming = list(zip(made, all_wanted, strict=True))
    for step in range(3000):
        for each, its in coming[:together]:
            engine.add(each)
            if its.fault == "cancel":
                leaving.setdefault(step + its.when, []).append(each)
        coming = coming[together:]
        for each in leaving.pop(step, ()):
            engine.abort(each)
        if not coming and not engine.has_work:
            break
        engine.step()
    stats = engine.stats()
    assert (engine.has_work, stats.running, stats.waiting, stats.blocks_used) == (False, 0, 0, 0)
    assert sorted(engine._pipeline.slots) == list(range(engine.max_num_seqs))
    return made


@given(
    everything=st.lists(wanted(), min_size=2, max_size=7),
    options=st.sampled_from(
        [
            {},
            {"max_num_batched_tokens": 30, "prefix_caching": False},
            {"speculation": 3},
            {"speculation": 70},
            {"cache_tokens": 4 * BLOCK, "max_num_seqs": 3},
            {"cache_tokens": 5 * BLOCK, "speculation": 2},
        ]
    ),
    ahead=st.booleans(),
    together=st.integers(1, 4),
)
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None)
def test_whatever_happens_to_some_the_others_get_the_same_tokens(model, adapters, everything, options, ahead, together):
    def engine():
        fresh = Engine(model, adapters=adapters, max_model_len=4 * BLOCK, **options)
        return as_on_a_gpu(fresh) if ahead else fresh

    healthy = [each for each in everything if not each.fault]
    logging.disable(logging.ERROR)  # the faults' traces
    try:
        made = answered(engine(), everything, together)
    finally:
        logging.disable(logging.NOTSET)
    alone = answered(engine(), healthy, together)
    got = [each for each, its in zip(made, everything, strict=True) if not its.fault]
    for each, expected in zip(got, alone, strict=True):
        assert each.error is None
        assert (each.token_ids, each.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert each.text == expected.text
    for each, its in zip(made, everything, strict=True):
        if its.fault == "overflow":
            assert isinstance(each.error, NumericError)
        assert each.ended or its.fault == "cancel"

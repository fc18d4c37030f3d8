"""The engine without text, on the CPU: whatever else it does, each request gets what the model alone would give it."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from engine_models import FAMILIES, PROMPTS, SMALL, assert_best, finish, plain_scores

from warpbus.engine.blocks import BLOCK
from warpbus.engine.engine import Engine, request
from warpbus.engine.sampling_params import Grammar, SamplingParams
from warpbus.engine.sequence import Sequence
from warpbus.errors import UsageError
from warpbus.models import random_model
from warpbus.qtensor import Scheme

GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(seed=5, top_p=0.9, temperature=0.8)


@pytest.fixture(scope="module")
def model():
    return random_model(SMALL, None, "cpu", torch.float32)


def answers(model, params, tokens=30, prompts=PROMPTS, **options):
    """What a new engine answers to all prompts together."""
    requests = [request(prompt, tokens=tokens, params=params) for prompt in prompts]
    engine = Engine(model, **options)
    finish(engine, requests)
    return [each.token_ids for each in requests], engine.stats()


@cache
def alone(model, params):
    return [answers(model, params, prompts=[prompt])[0][0] for prompt in PROMPTS]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_num_batched_tokens", [None, 7, 64])
def test_it_decodes_what_the_model_prefers(family, max_num_batched_tokens):
    """With 64 a prompt of 65 tokens leaves a single one for its last piece."""
    model = random_model(FAMILIES[family], None, "cpu", torch.float32)
    for prompt, answer in zip(
        PROMPTS, Engine(model, max_num_batched_tokens=max_num_batched_tokens).decode(PROMPTS, 9), strict=True
    ):
        assert len(answer) == 9
        assert_best(model, prompt, answer)


def test_a_quantized_model():
    model = random_model(SMALL, Scheme.parse("w4a16-g32"), "cpu", torch.float32)
    for prompt, answer in zip(PROMPTS, Engine(model).decode(PROMPTS, 9), strict=True):
        assert_best(model, prompt, answer)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 5},
        {"prefix_caching": False},
        {"speculation": 4},
        {"cache_tokens": 5 * BLOCK, "max_model_len": 5 * BLOCK},
        {"cache_tokens": 5 * BLOCK, "max_model_len": 5 * BLOCK, "speculation": 3, "max_num_batched_tokens": 33},
    ],
    ids=str,
)
def test_the_answers_are_the_same_alone_and_together_however_they_are_computed(model, params, options):
    found, stats = answers(model, params, **options)
    assert found == alone(model, params)
    assert (stats.preemptions > 0) == ("cache_tokens" in options)
    assert stats.drafted >= stats.accepted


def test_guesses_are_right_where_answers_repeat_themselves(model):
    _, stats = answers(model, GREEDY, tokens=100, prompts=PROMPTS[:2], speculation=4)
    assert 0 < stats.accepted <= stats.drafted
    assert stats.steps < 100


def test_a_beginning_that_is_known_is_not_computed_again(model):
    engine = Engine(model)
    prompt = PROMPTS[2]  # two blocks and eleven tokens

    def cached(tokens):
        asked = request(tokens, tokens=6)
        pieces = finish(engine, [asked])[asked]
        assert_best(model, tokens, asked.token_ids)
        assert {piece.cached_tokens for piece in pieces} == {asked.cached_tokens}
        return asked.cached_tokens

    assert cached(prompt) == 0
    assert cached(prompt) == 2 * BLOCK
    assert cached([*prompt[:40], 5]) == BLOCK
    assert cached([9, *prompt]) == 0
    assert cached(prompt[: 2 * BLOCK]) == BLOCK  # the last token is always computed
    assert cached(prompt[: 2 * BLOCK + 1]) == 2 * BLOCK
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (75 + 75 + 41 + 76 + 64 + 65, 6 * BLOCK)
    assert stats.blocks_idle > 0
    engine.shrink()
    assert engine.stats().blocks_idle == 0
    assert cached(prompt) == 0


def test_answers_are_found_as_the_beginning_of_the_next_prompt(model):
    """As in a conversation."""
    engine = Engine(model)
    first = request(PROMPTS[2], tokens=30)
    finish(engine, [first])
    more = [*PROMPTS[2], *first.token_ids, 5, 6, 7]
    second = request(more, tokens=5)
    finish(engine, [second])
    assert second.cached_tokens == 3 * BLOCK
    assert_best(model, more, second.token_ids)


def test_one_prompt_asked_many_times_in_one_step_is_computed_once(model):
    params = [replace(SEEDED, seed=seed) for seed in range(5)]
    requests = [request(PROMPTS[2], tokens=20, params=each) for each in params]
    engine = Engine(model)
    for each in requests:
        engine.add(each)
    engine.step()
    assert engine.stats().blocks_used == 2 + 5
    finish(engine)
    assert [each.cached_tokens for each in requests] == [0] + [2 * BLOCK] * 4
    assert len({tuple(each.token_ids) for each in requests}) == 5
    for each, own in zip(requests, params, strict=True):
        assert each.token_ids == answers(model, own, tokens=20, prompts=[PROMPTS[2]])[0][0]


@pytest.mark.parametrize("options", [{}, {"speculation": 3}, {"max_num_batched_tokens": 10}], ids=str)
def test_logprobs_are_those_of_the_model_alone(model, options):
    params = SamplingParams(seed=1, temperature=0.5, logprobs=3, repetition_penalty=1.3)
    requests = [request(prompt, tokens=20, params=params) for prompt in PROMPTS[:3]]
    requests.append(request(PROMPTS[3], tokens=20))
    pieces = finish(Engine(model, **options), requests)
    assert requests[3].logprobs is None
    for each in requests[:3]:
        assert [logprob for piece in pieces[each] for logprob in piece.logprobs] == each.logprobs
        expected = plain_scores(model, each.prompt, each.token_ids).log_softmax(-1)
        best = expected.topk(3)
        for at, (token, found) in enumerate(zip(each.token_ids, each.logprobs, strict=True)):
            assert found.token == token
            assert found.logprob == pytest.approx(expected[at, token].item(), abs=1e-4)
            assert [logprob for _, logprob in found.top] == pytest.approx(best.values[at].tolist(), abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"speculation": 3}, {"max_num_batched_tokens": 10}], ids=str)
def test_logprobs_of_tokens_that_are_named(model, options):
    named = [(7, 0, 7), (), (3,), (1, 2, 3, 4, 5)]
    requests = [
        request(
            prompt,
            tokens=8,
            params=SamplingParams(temperature=0, logprobs=0, prompt_logprobs=1 if at else None, logprob_tokens=ids),
        )
        for at, (prompt, ids) in enumerate(zip(PROMPTS, named, strict=False))
    ]
    finish(Engine(model, **options), requests)
    for each, ids in zip(requests, named, strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([[*each.prompt, *each.token_ids]]))[0].float().log_softmax(-1)
        reported = [*(each.prompt_logprobs or [None] * len(each.prompt)), *each.logprobs]
        for at, found in enumerate(reported):
            if found is not None:
                assert [token for token, _ in found.asked] == list(ids)
                expected = scores[at - 1, list(ids)].tolist()
                assert [logprob for _, logprob in found.asked] == pytest.approx(expected, abs=1e-4)


def test_tokens_whose_logprobs_are_asked_for_are_in_the_vocabulary(model):
    with pytest.raises(UsageError, match="logprob_tokens has the token id 100000: give ids below"):
        Engine(model).add(request(PROMPTS[0], tokens=1, params=SamplingParams(logprobs=0, logprob_tokens=(1, 100_000))))
    with pytest.raises(UsageError, match="a token id of logprob_tokens is -1"):
        SamplingParams(logprob_tokens=(-1,))
    with pytest.raises(UsageError, match=r"logprob_tokens is \(0, 0.*: give a list of at most 1,024 token ids"):
        SamplingParams(logprob_tokens=(0,) * 1025)


@pytest.mark.parametrize(
    "options",
    [{}, {"speculation": 3}, {"max_num_batched_tokens": 10}, {"cache_tokens": 5 * BLOCK, "max_model_len": 5 * BLOCK}],
    ids=str,
)
def test_logprobs_of_prompts_are_those_of_the_model_alone(model, options):
    engine = Engine(model, **options)
    # The prefix cache has the prompts, whose tokens would not be computed again.
    finish(engine, [request(prompt, tokens=2) for prompt in PROMPTS])
    requests = [
        request(prompt, tokens=9, params=SamplingParams(temperature=0, prompt_logprobs=count))
        for prompt, count in zip(PROMPTS, (3, 1, 0, 2, 20), strict=True)
    ]
    pieces = finish(engine, [*requests, request(PROMPTS[2], tokens=9)])
    for each in requests:
        count = each.params.prompt_logprobs
        [reported] = [piece.prompt_logprobs for piece in pieces[each] if piece.prompt_logprobs is not None]
        assert list(reported) == each.prompt_logprobs
        assert pieces[each][0].prompt_logprobs is reported or not pieces[each][0].token_ids
        assert reported[0] is None
        with torch.no_grad():
            expected = model(torch.tensor([each.prompt]))[0].float().log_softmax(-1)
        for at, (token, found) in enumerate(zip(each.prompt[1:], reported[1:], strict=True)):
            assert found.token == token
            assert found.logprob == pytest.approx(expected[at, token].item(), abs=1e-4)
            assert [logprob for _, logprob in found.top] == pytest.approx(
                expected[at].topk(count).values.tolist(), abs=1e-4
            )
            better = (
                (expected[at] > expected[at, token] + 1e-4).sum(),
                (expected[at] > expected[at, token] - 1e-4).sum(),
            )
            assert better[0] + 1 <= found.rank <= max(better[1], better[0] + 1)
        assert each.token_ids == answers(model, GREEDY, tokens=9, prompts=[each.prompt])[0][0]


def test_logprobs_of_prompts_that_are_too_many_are_refused(model):
    params = SamplingParams(prompt_logprobs=20)
    long = Sequence(0, [1] * 60_000, params, limit=1, stop_ids=frozenset(), stream=None)
    with pytest.raises(UsageError, match=r"prompt_logprobs is 20 for 60,000 tokens: ask for at most 1,048,576"):
        Engine(model).add(long)
    many = SamplingParams(prompt_logprobs=0, logprob_tokens=tuple(range(20)))
    long = Sequence(0, [1] * 60_000, many, limit=1, stop_ids=frozenset(), stream=None)
    with pytest.raises(UsageError, match="prompt_logprobs is 0 with 20 logprob_tokens for 60,000 tokens"):
        Engine(model).add(long)
    with pytest.raises(UsageError, match="prompt_logprobs is 21"):
        SamplingParams(prompt_logprobs=21)


@pytest.mark.parametrize("options", [{}, {"speculation": 3}, {"cache_tokens": 160, "max_model_len": 160}], ids=str)
def test_penalties_are_of_what_prompt_and_answer_hold(model, options):
    params = SamplingParams(
        temperature=0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2, logit_bias={7: 0.5}
    )
    found, _ = answers(model, params, tokens=30, **options)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        scores = plain_scores(model, prompt, answer)
        for at, token in enumerate(answer):
            row = scores[at].clone()
            seen = torch.tensor(sorted({*prompt, *answer[:at]}))
            row[seen] = torch.where(row[seen] > 0, row[seen] / 1.4, row[seen] * 1.4)
            counts = torch.bincount(torch.tensor(answer[:at], dtype=torch.int64), minlength=300)
            row -= 0.2 * counts + 0.3 * (counts > 0)
            row[7] += 0.5
            assert row.max() - row[token] < 1e-4


class Alternating:
    """A grammar whose words alternate between odd and even tokens, the first of which is odd."""

    finished = failed = False

    def __init__(self):
        self.taken = 0

    def accept(self, token):
        if token % 2 == self.taken % 2:
            return False
        self.taken += 1
        return True

    def rollback(self, count):
        self.taken -= count

    def fill(self, mask):
        mask[:] = 0x55555555 if self.taken % 2 else -0x55555556


@pytest.mark.parametrize("options", [{}, {"speculation": 3}, {"max_num_batched_tokens": 9}], ids=str)
def test_a_grammar_masks_its_own_row_alone(model, options):
    params = SamplingParams(temperature=0, grammar=Grammar("regex", "any: the matcher is given"))
    free = [request(prompt, tokens=40) for prompt in PROMPTS]
    bound = [
        Sequence(
            *(index, prompt, params),
            limit=40,
            stop_ids=frozenset(),
            stream=free[0]._stream,
            matcher=Alternating(),
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    finish(Engine(model, **options), [each for pair in zip(free, bound, strict=True) for each in pair])
    for each in free:
        assert_best(model, each.prompt, each.token_ids)
    parity = torch.arange(300) % 2
    for each in bound:
        scores = plain_scores(model, each.prompt, each.token_ids)
        for at, token in enumerate(each.token_ids):
            assert token % 2 == (at + 1) % 2
            assert scores[at][parity == (at + 1) % 2].max() - scores[at, token] < 1e-4

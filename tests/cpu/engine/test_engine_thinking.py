"""Thinking before an answer: its budget, and the grammar behind it."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

import warpbus
from warpbus.engine import Grammar, SamplingParams, Thinking
from warpbus.engine.thinking import ThinkingMatcher, matcher_of
from warpbus.errors import UsageError

OPENING, CLOSING, STOP, WORDS = 40, 41, 7, 2
POET = Path(warpbus.__file__).parent / "demo" / "glm-poet"


class Countdown:
    """Allows the token 3, so many times, then the stop token."""

    failed = False

    def __init__(self, count):
        self.left = count

    def accept(self, token):
        taken = token == 3 and self.left > 0
        self.left -= taken
        return taken

    def rollback(self, count):
        self.left += count

    def fill(self, mask):
        mask[:] = 0
        mask[0] = 1 << (3 if self.left else STOP)

    @property
    def finished(self):
        return self.left == 0


def allowed(matcher):
    mask = np.zeros(WORDS, dtype=np.int32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits))


def matcher(*, opened=False, budget=None, grammar=None):
    return ThinkingMatcher(Thinking(OPENING, CLOSING, opened, budget), grammar, (STOP,))


EVERY = set(range(32 * WORDS))


def test_a_grammar_applies_behind_the_thinking():
    state = matcher(grammar=Countdown(2))
    assert allowed(state) == {3, OPENING}
    assert state.accept(OPENING)
    assert allowed(state) == EVERY - {STOP}
    assert [state.accept(token) for token in (9, 3, OPENING, CLOSING)] == [True] * 4
    assert allowed(state) == {3}
    assert not state.accept(9)
    assert state.accept(3)
    assert not state.finished
    assert state.accept(3)
    assert state.finished
    assert allowed(state) == {STOP}


def test_an_answer_may_have_no_thinking():
    state = matcher(grammar=Countdown(1))
    assert not state.accept(9)
    assert allowed(state) == {3, OPENING}
    assert state.accept(3)
    assert allowed(state) == {STOP}
    assert not state.accept(OPENING)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_the_budget_closes_the_thinking(opened, budget):
    state = matcher(opened=opened, budget=budget)
    if not opened:
        assert state.accept(OPENING)
    for _ in range(budget):
        assert allowed(state) == EVERY
        assert state.accept(STOP + 1)
    assert allowed(state) == {CLOSING}
    assert not state.accept(9)
    assert state.accept(CLOSING)
    assert allowed(state) == EVERY
    assert not state.finished


def test_thinking_that_ends_within_its_budget():
    state = matcher(opened=True, budget=5)
    assert state.accept(CLOSING)
    assert all(state.accept(9) for _ in range(10))
    assert allowed(state) == EVERY


@pytest.mark.parametrize("seed", range(20))
def test_a_rollback_undoes_tokens_of_thinking_and_grammar(seed):
    draw = random.Random(seed)
    make = {"opened": draw.random() < 0.5, "budget": draw.choice([None, 2])}
    state, tokens = matcher(**make, grammar=Countdown(3)), []
    for _ in range(60):
        if draw.random() < 0.3:
            count = draw.randint(0, len(tokens))
            state.rollback(count)
            del tokens[len(tokens) - count :]
        else:
            token = draw.choice([3, 9, OPENING, CLOSING, CLOSING])
            if state.accept(token):
                tokens.append(token)
        fresh = matcher(**make, grammar=Countdown(3))
        assert all(fresh.accept(token) for token in tokens)
        assert (allowed(fresh), fresh.finished) == (allowed(state), state.finished)


def test_requests_without_either_have_no_matcher():
    assert matcher_of(SamplingParams(), (STOP,), Countdown) is None
    thinking = Thinking(OPENING, CLOSING, opened=True, budget=3)
    assert isinstance(matcher_of(SamplingParams(thinking=thinking), (STOP,), Countdown), ThinkingMatcher)


@pytest.mark.parametrize("field", [{"budget": -1}, {"budget": 1.5}, {"opening": -1}, {"closing": True}])
def test_values_out_of_range_are_refused(field):
    with pytest.raises(UsageError, match="thinking"):
        dataclasses.replace(Thinking(1, 2, opened=False), **field)
    with pytest.raises(UsageError, match="thinking has the token id 99"):
        SamplingParams(thinking=Thinking(1, 99, opened=False)).check_ids(50)


def test_a_model_thinks_within_its_budget_and_then_follows_its_grammar():
    llm = warpbus.LLM(POET, device="cpu")
    prompt = llm.render([{"role": "user", "content": "写一首题为《春夜》的五言绝句。"}])
    opening, closing = llm.tokenizer.encode("春"), llm.tokenizer.encode("秋")
    thinking = Thinking(opening[-1], closing[-1], opened=True, budget=6)
    grammar = Grammar("regex", "[a-z]{3}")
    params = SamplingParams(temperature=0, max_tokens=30, grammar=grammar, thinking=thinking)
    [answer] = llm.generate(prompt, params)
    at = answer.token_ids.index(closing[-1])
    assert at <= 6
    text = llm.tokenizer.decode(answer.token_ids[at + 1 :])
    assert (len(text), text.isascii(), answer.finish_reason) == (3, True, "stop")

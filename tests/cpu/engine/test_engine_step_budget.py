"""The prompt tokens of a step, and how a target of latency is kept."""

import pytest
import torch
from engine_models import SMALL

from warpbus.engine.engine import Engine, request
from warpbus.engine.options import ServiceOptions, parse_latency
from warpbus.engine.scheduler import StepBudget
from warpbus.errors import UsageError
from warpbus.models import random_model


def never(tokens):
    return False


def test_decoding_tokens_count():
    budget = StepBudget(100)
    assert [budget.prompt_tokens(decoding, never) for decoding in (0, 1, 99, 150)] == [100, 99, 1, 1]


def test_mixed_steps_are_smaller_unless_there_is_a_backlog():
    asked = []

    def waits(tokens):
        asked.append(tokens)
        return True

    for clears, expected in ((False, 20), (True, 90)):
        assert StepBudget(100, mixed=lambda _: 30, clears_backlogs=clears).prompt_tokens(10, waits) == expected
    assert asked == [4 * 20]


def simulate(budget, steps, *, decoding=8, base=0.010, token=0.0001, every=3):
    """Steps of which two of three have as many prompt tokens as they may; gives those steps' seconds and tokens."""
    found = []
    for step in range(steps):
        tokens = budget.prompt_tokens(decoding, never) if step % every else 0
        seconds = base + token * tokens
        budget.record(decoding, tokens, seconds)
        if tokens:
            found.append((seconds, tokens))
    return found


@pytest.mark.parametrize(("base", "token"), [(0.010, 0.0001), (0.002, 0.00001), (0.040, 0.0005)])
def test_steps_come_to_take_what_the_target_says(base, token):
    budget = StepBudget(100_000, latency=0.05)
    seconds = [each for each, _ in simulate(budget, 200, base=base, token=token)]
    assert all(each <= 0.0525 for each in seconds[20:])
    assert all(each >= 0.045 for each in seconds[-40:])


def test_it_follows_what_prompts_cost():
    budget = StepBudget(100_000, latency=0.05)
    simulate(budget, 100)
    slower = simulate(budget, 60, token=0.0004)
    assert slower[0][0] > 0.1
    assert all(each <= 0.0525 for each, _ in slower[-20:])


@pytest.mark.parametrize("latency", [1e-9, 0.005])
def test_prompts_are_prefilled_whatever_the_target(latency):
    assert simulate(StepBudget(1000, latency=latency), 100)[-1][1] == 16


def test_a_slow_step_by_chance_matters_little():
    budget = StepBudget(100_000, latency=0.05)
    simulate(budget, 100)
    before = budget.prompt_tokens(8, never)
    budget.record(8, before, 3.0)
    assert budget.prompt_tokens(8, never) >= 0.8 * before


def test_small_chunks_say_nothing_about_larger_ones():
    budget = StepBudget(100_000, latency=0.05)
    simulate(budget, 100)
    before = budget.prompt_tokens(8, never)
    for _ in range(50):
        budget.record(8, 5, 0.0105)
    assert budget.prompt_tokens(8, never) == before


def test_a_step_takes_no_more_than_the_most():
    budget = StepBudget(200, latency=10.0)
    assert simulate(budget, 100)[-1][1] == 192
    assert budget.prompt_tokens(0, never) == 200


@pytest.mark.parametrize(
    ("value", "seconds"), [("50ms", 0.05), ("0.05s", 0.05), ("2", 2.0), (0.25, 0.25), (".5 s", 0.5)]
)
def test_times(value, seconds):
    assert parse_latency(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["0ms", "-1s", "fast", "", "50 m", "nan", "1e999s", True])
def test_other_times_are_refused(value):
    with pytest.raises(UsageError, match="inter_token_latency is"):
        ServiceOptions(inter_token_latency=value)


def test_processes_that_share_a_model_have_no_target():
    with pytest.raises(UsageError, match="inter_token_latency with tensor_parallel 2"):
        ServiceOptions(inter_token_latency="50ms", tensor_parallel=2)


def test_an_engine_with_a_target_gives_the_same_answers():
    """No step can keep this target: soon, prompts are prefilled 16 tokens at a time beside a sequence that decodes."""
    model = random_model(SMALL, None, "cpu", torch.float32)
    prompts = [[1, 2, 3], *([token] * 60 for token in range(5, 20))]
    requests = [request(prompt, tokens=80 if at == 0 else 3) for at, prompt in enumerate(prompts)]
    engine = Engine(model, inter_token_latency=1e-6, prefix_caching=False)
    taken = []
    engine.add(requests[0])
    for other in requests[1:]:
        while not requests[0].token_ids:
            engine.step()
        engine.add(other)
        before = engine.stats().steps
        while not other.token_ids:
            engine.step()
        taken.append(engine.stats().steps - before)
    while engine.has_work:
        engine.step()
    assert taken[0] == 1
    assert taken[-1] == 4
    for each in requests:
        assert [each.token_ids] == Engine(model).decode([each.prompt], len(each.token_ids))

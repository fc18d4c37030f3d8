import random

import pytest
import torch

from warpbus.engine.sampler import Sampler
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.sequence import Sequence
from warpbus.engine.speculation import accepted

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0])


class Silent:
    def push(self, token, /):
        return ""

    def flush(self):
        return ""


def sequence(index=0, prompt=(3,), **params):
    return Sequence(index, list(prompt), SamplingParams(**params), limit=10**6, stop_ids=frozenset(), stream=Silent())


def sampler_of(sequences, vocab_size=4, rows=None):
    sampler = Sampler(rows or len(sequences), vocab_size, CPU)
    sampler.arrange(sequences)
    return sampler


def choose(sampler, logits):
    """What a step does: draw, choose, note what was seen."""
    sampler.draw()
    tokens, _ = sampler.choose(logits)
    sampler.saw(tokens)
    return tokens.tolist()


def draw(logits, times, **params):
    """Relative frequencies of the tokens over `times` draws."""
    sampler = sampler_of([sequence(**params)], len(logits))
    counts = torch.zeros(len(logits))
    for _ in range(times):
        counts[choose(sampler, logits[None])[0]] += 1
    return counts / times


def test_greedy_takes_the_best():
    sampler = sampler_of([sequence(temperature=0), sequence(top_k=1)], 4)
    assert choose(sampler, torch.stack([LOGITS, LOGITS.flip(0)])) == [1, 2]


def test_greedy_and_drawn_rows_share_a_batch():
    sampler = sampler_of([sequence(temperature=0), sequence(seed=1), sequence(temperature=0)], 4)
    for _ in range(20):
        first, _, last = choose(sampler, torch.stack([LOGITS, LOGITS, LOGITS.flip(0)]))
        assert (first, last) == (1, 2)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    expected = (LOGITS / temperature).softmax(-1)
    found = draw(LOGITS, 4000, temperature=temperature, seed=0)
    assert (found - expected).abs().max() < 0.03


def test_top_k_leaves_the_best_k():
    found = draw(LOGITS, 2000, top_k=2, seed=0)
    expected = torch.tensor([0.0, *LOGITS[[1, 3]].softmax(-1)])[[0, 1, 0, 2]]
    assert found[0] == found[2] == 0
    assert (found - expected).abs().max() < 0.04


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, {1}), (0.5, {1}), (0.7, {1, 3}), (0.9, {0, 1, 3}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_leaves_the_fewest_that_reach_it(top_p, kept):
    # Probabilities 0.13, 0.60, 0.03, 0.22 (rounded): the best are 1, 3, 0, 2.
    found = draw(LOGITS, 1000, top_p=top_p, seed=0)
    assert set(found.nonzero()[:, 0].tolist()) == kept


def test_top_p_counts_what_top_k_has_left():
    # After top_k=2 the best has 0.73 of the rest, which reaches 0.7; of all it has 0.60, which does not.
    assert draw(LOGITS, 300, top_p=0.7, top_k=2, seed=0)[1] == 1.0


def test_temperature_comes_before_top_p():
    # At temperature 0.5 the best has 0.84.
    assert draw(LOGITS, 300, top_p=0.8, temperature=0.5, seed=0)[1] == 1.0


def test_repetition_penalty_counts_prompt_and_answer():
    logits = torch.tensor([1.0, 2.0, -0.5, 1.8])
    sampler = sampler_of([sequence(prompt=[1, 2], temperature=0, repetition_penalty=2.0)], 4)
    # 1 is in the prompt: 2.0 counts 1.0, so 3 wins; then 3 counts 0.9 and 0 and 1 are level; then 0 counts 0.5.
    assert [choose(sampler, logits[None])[0] for _ in range(3)] == [3, 0, 1]
    negative = torch.tensor([-3.0, -2.0, -2.5, -9.0])
    assert choose(sampler_of([sequence(prompt=[1, 1], temperature=0, repetition_penalty=2.0)]), negative[None]) == [2]


def test_a_row_does_not_depend_on_its_neighbours():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(30, 3, 50, generator=generator) * 3
    each = [
        {"seed": 5, "top_p": 0.8},
        {"seed": 5, "top_k": 4, "repetition_penalty": 1.5},
        {"temperature": 0, "repetition_penalty": 1.2},
    ]
    together = sampler_of([sequence(**params) for params in each], 50)
    rows = [choose(together, step) for step in logits]
    for row, params in enumerate(each):
        alone = sampler_of([sequence(**params)], 50)
        assert [choose(alone, step[row : row + 1])[0] for step in logits] == [tokens[row] for tokens in rows]


def test_rows_that_are_kept_go_on_as_they_would_have():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(20, 3, 50, generator=generator) * 3
    each = [{"seed": 1}, {"seed": 2, "repetition_penalty": 1.5}, {"seed": 3, "top_k": 5}]
    whole = sampler_of([sequence(**params) for params in each], 50)
    expected = [choose(whole, step) for step in logits]
    kept = [sequence(**params) for params in each]
    sampler = sampler_of(kept, 50)
    found = [choose(sampler, step)[1:] for step in logits[:10]]
    sampler.arrange(kept[1:])
    found += [choose(sampler, step[1:]) for step in logits[10:]]
    assert found == [tokens[1:] for tokens in expected]


def test_16_bit_scores_are_accepted():
    for dtype in (torch.bfloat16, torch.float16):
        assert choose(sampler_of([sequence(top_k=1)]), LOGITS[None].to(dtype)) == [1]
        assert choose(sampler_of([sequence(top_p=0.1, repetition_penalty=1.1)]), LOGITS[None].to(dtype)) == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 1}])
def test_scores_that_are_no_numbers_show_in_the_best(bad, params):
    sampler = sampler_of([sequence(0), sequence(7, **params)])
    logits = torch.stack([LOGITS, LOGITS])
    logits[1, 2] = bad
    sampler.draw()
    assert sampler.choose(logits)[1].isfinite().tolist() == [True, False]


def test_padding_rows_and_former_batches_change_nothing():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(5)) * 3
    alone = sampler_of([sequence(seed=1, top_k=9)], 50)
    sampler = sampler_of([sequence(seed=2, temperature=9.0, repetition_penalty=1.5)] * 4, 50, rows=4)
    choose(sampler, logits)
    sampler.arrange([sequence(seed=1, top_k=9)])
    assert choose(sampler, logits)[:1] == choose(alone, logits[:1])


def follow(sampler, sequences, logits):
    """A step whose tokens the host reads: they are appended."""
    tokens = choose(sampler, logits)
    for one, token in zip(sequences, tokens, strict=False):
        one.append(token)
    return tokens


def expected_scores(logits, params, prompt, answer):
    """By the definitions, in float64."""
    scores = logits.double().clone()
    for token in set(prompt) | set(answer):
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(answer):
        scores[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    return scores


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.4},
        {"presence_penalty": -1.0, "frequency_penalty": -0.2, "repetition_penalty": 1.7},
        {"logit_bias": {0: 3.0, 5: -100.0, 7: 1.5}},
        {"logit_bias": {2: 1.0}, "repetition_penalty": 0.8, "frequency_penalty": 1.0, "temperature": 0.7},
    ],
)
def test_frequencies_follow_the_changed_scores(params):
    # A thousand rows of the same history, each with its own seed, against the probabilities in float64.
    prompt, answer = [1, 2, 2, 9], [3, 3, 3, 2, 5, 0, 3]
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 1.5
    rows = []
    for seed in range(2000):
        one = sequence(prompt=prompt, seed=seed, **params)
        for token in answer:
            one.append(token)
        rows.append(one)
    tokens = choose(sampler_of(rows, 12), logits.expand(2000, 12))
    found = torch.tensor(tokens).bincount(minlength=12) / 2000
    scores = expected_scores(logits, rows[0].params, prompt, answer)
    expected = (scores / rows[0].params.temperature).softmax(-1)
    assert (found - expected).abs().max() < 0.035


def test_penalties_go_on_counting():
    params = {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.2}
    one = sequence(prompt=[4], **params)
    sampler = sampler_of([one], 8)
    generator = torch.Generator().manual_seed(2)
    for _ in range(40):
        logits = torch.randn(8, generator=generator)
        expected = expected_scores(logits, one.params, one.prompt, one.token_ids).argmax()
        assert follow(sampler, [one], logits[None]) == [expected]


def test_tokens_that_nobody_saw_are_counted_too():
    one = sequence(temperature=0, frequency_penalty=2.0)
    sampler = sampler_of([one], 4)
    one.append(1)
    sampler.draw()
    assert sampler.choose(LOGITS[None])[0].tolist() == [3]


MIX = [
    {"temperature": 0},
    {"seed": 11, "top_p": 0.9},
    {"seed": 12, "top_k": 7, "min_p": 0.02},
    {"seed": 13, "repetition_penalty": 1.3},
    {"seed": 14, "presence_penalty": 0.7, "frequency_penalty": -0.3, "logprobs": 2},
    {"temperature": 0, "frequency_penalty": 0.6, "logit_bias": {3: 2.0, 9: -5.0}},
    {"seed": 15, "logit_bias": {1: 4.0}, "logprobs": 0},
    {"seed": 16, "min_tokens": 9, "stop_token_ids": (3, 40), "temperature": 2.0},
    {"temperature": 0, "min_tokens": 4, "stop_token_ids": (0, 1, 2), "repetition_penalty": 2.0},
]


def scores_of(index, step):
    return torch.randn(50, generator=torch.Generator().manual_seed(1000 * index + step)) * 3


def alone(index):
    """The first 16 tokens of request `index` without neighbours."""
    one = sequence(prompt=[index, 7], **MIX[index])
    sampler = sampler_of([one], 50)
    return [follow(sampler, [one], scores_of(index, step)[None])[0] for step in range(16)]


@pytest.mark.parametrize("seed", range(8))
def test_joining_and_leaving_changes_nothing(seed):
    chance = random.Random(seed)
    expected = [alone(index) for index in range(len(MIX))]
    requests = [sequence(index, prompt=[index, 7], **MIX[index]) for index in range(len(MIX))]
    sampler = Sampler(len(MIX) + 2, 50, CPU)
    running = []
    while any(len(one.token_ids) < 16 for one in requests):
        if chance.random() < 0.5 or not running:
            # Also those that were there before come back, as after a preemption.
            ready = [one for one in requests if len(one.token_ids) < 16]
            running = chance.sample(ready, chance.randint(1, len(ready)))
            sampler.arrange(running)
        padding = torch.full((chance.randint(0, 2), 50), 5.0)
        rows = torch.stack([scores_of(one.index, len(one.token_ids)) for one in running])
        follow(sampler, running, torch.cat([rows, padding]))
        if any(len(one.token_ids) == 16 for one in running):
            running = []
    assert [one.token_ids for one in requests] == expected


@pytest.mark.parametrize("seed", range(4))
def test_drafts_change_nothing(seed):
    chance = random.Random(seed)
    expected = [alone(index) for index in range(len(MIX))]
    requests = [sequence(index, prompt=[index, 7], **MIX[index]) for index in range(len(MIX))]
    sampler = Sampler(100, 50, CPU)
    while running := [one for one in requests if len(one.token_ids) < 16]:
        drafts = []
        for one in running:
            come = expected[one.index][len(one.token_ids) :][: chance.randint(0, 4)]
            # Some of them right, and then a wrong one.
            drafts.append([token if chance.random() < 0.7 else chance.randrange(50) for token in come][: len(come)])
        sampler.arrange(running, drafts)
        rows = [
            scores_of(one.index, len(one.token_ids) + i)
            for one, own in zip(running, drafts, strict=True)
            for i in range(len(own) + 1)
        ]
        tokens = choose(sampler, torch.stack(rows))
        for one, own in zip(running, drafts, strict=True):
            chosen, tokens = tokens[: len(own) + 1], tokens[len(own) + 1 :]
            kept = accepted(own, chosen) + 1
            for token in chosen[:kept][: 16 - len(one.token_ids)]:
                one.append(token)
            if not one.params.greedy:
                one.give_back(len(chosen) - kept)
    assert [one.token_ids for one in requests] == expected


def test_what_needs_nothing_is_plain():
    assert sampler_of([sequence(**params) for params in MIX[:3]]).plain
    for params in MIX[3:]:
        assert not sampler_of([sequence(), sequence(**params)], 50).plain
    # Until the least number of tokens is reached.
    one = sequence(temperature=0, min_tokens=2, stop_token_ids=(1,))
    sampler = sampler_of([one])
    found = []
    for _ in range(3):
        found.append(sampler.plain)
        follow(sampler, [one], LOGITS[None])
    assert found == [False, False, True]
    assert one.token_ids == [3, 3, 1]


def test_plain_choices_read_only_tensors_that_stay():
    # What a CUDA graph holds: another arrangement has to reach them.
    sampler = sampler_of([sequence(seed=0), sequence(seed=0)], 4)
    held = [tensor for tensor in vars(sampler).values() if isinstance(tensor, torch.Tensor) and len(tensor) == 2]
    places = [tensor.data_ptr() for tensor in held]
    sampler.arrange([sequence(seed=3, top_k=2, min_p=0.5, top_p=0.3), sequence(temperature=0)])
    sampler.draw()
    assert places == [tensor.data_ptr() for tensor in held]
    assert len(places) == 5


def test_logprobs_are_of_the_models_own_distribution():
    rows = [
        sequence(temperature=0, logprobs=2, logit_bias={0: 50.0}),
        sequence(temperature=0.2, top_k=1),
        sequence(temperature=5.0, seed=0, logprobs=0, top_k=2),
        sequence(temperature=0, logprobs=20),
    ]
    sampler = sampler_of(rows, 4)
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(6))
    tokens = choose(sampler, logits.bfloat16())
    logprobs = logits.bfloat16().double().log_softmax(-1)
    found = sampler.logprobs().read()
    assert sorted(found) == [0, 2, 3]
    for row, one in found.items():
        assert one.token == tokens[row]
        assert one.logprob == pytest.approx(logprobs[row, tokens[row]].item(), abs=1e-5)
        count = min(rows[row].params.logprobs, 4)
        best = logprobs[row].sort(descending=True, stable=True)
        assert [token for token, _ in one.top] == best.indices[:count].tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values[:count].tolist(), abs=1e-5)
    assert tokens[0] == 0
    sampler.arrange([sequence()])
    choose(sampler, logits)
    assert sampler.logprobs() is None


def test_min_p_leaves_what_is_likely_enough():
    # As likely as the best: 0.22, 1, 0.05, 0.37.
    assert set(draw(LOGITS, 500, min_p=0.3, seed=0).nonzero()[:, 0].tolist()) == {1, 3}


def test_a_bad_score_shows_although_it_is_masked():
    one = sequence(temperature=0, min_tokens=5, stop_token_ids=(2,))
    logits = LOGITS.clone()
    logits[2] = float("nan")
    sampler = sampler_of([one, sequence(temperature=0)], 4)
    assert sampler.choose(torch.stack([logits, LOGITS]))[1].isfinite().tolist() == [False, True]

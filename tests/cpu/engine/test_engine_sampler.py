import pytest
import torch

from warpbus.engine.sampler import Sampler
from warpbus.engine.sequence import SamplingParams, Sequence

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
    sampler.begin(sequences)
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
    sampler = sampler_of([sequence(**params) for params in each], 50)
    found = [choose(sampler, step)[1:] for step in logits[:10]]
    sampler.keep([1, 2])
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
    sampler.begin([sequence(seed=1, top_k=9)])
    assert choose(sampler, logits)[:1] == choose(alone, logits[:1])

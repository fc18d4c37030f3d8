"""Argmax and sampling on the CPU: what may be drawn and how often, what they refuse, what torch.compile sees."""

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import TensorError
from warpbus.kernels.ops.sampling import argmax, sample

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0])


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def columns(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.5):
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.full((rows,), uniform),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax(dtype):
    logits = random(5, 1003, dtype=dtype)
    logits[2, [500, 40, 900]] = 9.0
    tokens, best = argmax(logits)
    assert tokens.dtype == torch.int64
    assert best.dtype == torch.float32
    assert tokens[2] == 40
    assert torch.equal(best, logits.float().amax(-1))
    assert torch.equal(logits.gather(1, tokens[:, None])[:, 0].float(), best)


def test_bad_scores_show():
    logits = random(4, 9)
    logits[0, 3], logits[1, 4], logits[2] = float("nan"), float("inf"), float("-inf")
    for best in (argmax(logits)[1], sample(logits, *columns(4))[1]):
        assert best.isfinite().tolist() == [False, False, False, True]
        assert best[0].isnan()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    draws = 4001
    controls = columns(draws, temperature)[:4]
    tokens, _ = sample(LOGITS.expand(draws, 4), *controls, torch.arange(draws) / draws)
    found = tokens.bincount(minlength=4) / draws
    assert (found - (LOGITS / temperature).softmax(-1)).abs().max() < 2 / draws
    assert tokens[0] == 1  # likeliest first
    assert tokens[-1] == 2


@pytest.mark.parametrize(("top_k", "kept"), [(1, {1}), (2, {1, 3}), (4, {0, 1, 2, 3}), (9, {0, 1, 2, 3})])
def test_top_k(top_k, kept):
    draws = 1000
    controls = columns(draws, top_k=top_k)[:4]
    assert set(sample(LOGITS.expand(draws, 4), *controls, torch.arange(draws) / draws)[0].tolist()) == kept


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, {1}), (0.5, {1}), (0.7, {1, 3}), (0.9, {0, 1, 3})])
def test_top_p(top_p, kept):
    draws = 1000
    controls = columns(draws, top_p=top_p)[:4]
    assert set(sample(LOGITS.expand(draws, 4), *controls, torch.arange(draws) / draws)[0].tolist()) == kept


@pytest.mark.parametrize(
    ("min_p", "kept"), [(1.0, {1}), (0.4, {1}), (0.3, {1, 3}), (0.2, {0, 1, 3}), (0.01, {0, 1, 2, 3})]
)
def test_min_p(min_p, kept):
    # As likely as the best: 0.22, 1, 0.05, 0.37.
    draws = 1000
    controls = columns(draws, min_p=min_p)[:4]
    assert set(sample(LOGITS.expand(draws, 4), *controls, torch.arange(draws) / draws)[0].tolist()) == kept


def test_min_p_above_1_is_1():
    draws = 100
    controls = columns(draws, min_p=1.5)[:4]
    assert set(sample(LOGITS.expand(draws, 4), *controls, torch.arange(draws) / draws)[0].tolist()) == {1}


@pytest.mark.parametrize("temperature", [torch.inf, torch.nan])
def test_an_infinite_temperature_makes_all_equal_but_those_of_minus_infinity(temperature):
    logits = torch.tensor([[2.0, -torch.inf, 1e4, -1e4, -torch.inf]]).expand(6, 5)
    tokens, best = sample(logits, *columns(6, temperature=temperature)[:4], (torch.arange(6) + 0.5) / 6)
    assert tokens.tolist() == [2, 2, 0, 0, 3, 3]  # the likeliest first
    assert (best == 1e4).all()


def test_min_p_counts_after_the_temperature_and_before_top_p():
    draws = 1000
    # At temperature 2 the weights are 0.47, 1, 0.22, 0.61: with min_p 0.4 three are left, the best has 0.48 of them.
    controls = columns(draws, temperature=2.0, top_p=0.45, min_p=0.4)[:4]
    assert set(sample(LOGITS.expand(draws, 4), *controls, torch.arange(draws) / draws)[0].tolist()) == {1}
    controls = columns(draws, temperature=2.0, top_p=0.45, min_p=0.0)[:4]
    assert set(sample(LOGITS.expand(draws, 4), *controls, torch.arange(draws) / draws)[0].tolist()) == {1, 3}


def test_equal_scores_in_the_order_of_their_indices():
    logits = torch.zeros(8, 8)
    tokens, _ = sample(logits, *columns(8)[:4], (torch.arange(8) + 0.5) / 8)
    assert tokens.tolist() == list(range(8))
    tokens, _ = sample(logits, *columns(8, top_k=2)[:4], torch.tensor([0, 0.4, 0.6, 1.0] * 2))
    assert tokens.tolist() == [0, 0, 1, 1] * 2


def test_a_row_does_not_depend_on_its_neighbours():
    logits = random(6, 300)
    controls = torch.tensor([0.5, 1.0, 2.0] * 2), torch.tensor([0, 1, 5] * 2, dtype=torch.int32)
    rest = torch.tensor([0.9, 0.5, 1.0] * 2), torch.tensor([0.0, 0.1, 0.0, 0.5, 1.0, 0.0]), torch.linspace(0, 1, 6)
    together, _ = sample(logits, *controls, *rest)
    for row in range(6):
        alone, _ = sample(logits[row : row + 1], *(column[row : row + 1] for column in (*controls, *rest)))
        assert alone[0] == together[row]


def test_no_rows():
    assert argmax(torch.empty(0, 5))[0].shape == (0,)
    assert sample(torch.empty(0, 5), *columns(0))[0].shape == (0,)


def test_what_they_refuse():
    with pytest.raises(TensorError, match=r"argmax: logits has shape \[4\], expected a matrix"):
        argmax(LOGITS)
    with pytest.raises(TensorError, match=r"argmax: logits have shape \[3, 0\], expected 1 to 524288 columns"):
        argmax(torch.empty(3, 0))
    with pytest.raises(TensorError, match=r"sample: top_k is int64, expected int32: convert it with \.to\(\)"):
        sample(LOGITS[None], *columns(1)[:1], torch.ones(1, dtype=torch.int64), *columns(1)[2:])
    with pytest.raises(TensorError, match=r"sample: temperature has shape \[2\], expected \[1\]: one for each row"):
        sample(LOGITS[None], *columns(2))


@pytest.mark.parametrize("name", ["argmax", "sample"])
def test_registered_as_torch_wants(name):
    arguments = (random(3, 8), *(columns(3) if name == "sample" else ()))
    checked = opcheck(getattr(torch.ops.warpbus, name).default, arguments)
    assert set(checked.values()) == {"SUCCESS"}

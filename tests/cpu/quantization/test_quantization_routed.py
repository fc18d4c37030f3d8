"""`states.RoutedTokens`: which tokens an expert gets, and what moves on."""

import pytest
import torch

from warpbus.models.layers import Routing
from warpbus.quantization.states import States, routed

EXPERTS, TOP_K, HIDDEN = 5, 2, 4


def batch(generator, share, rows, tokens, *, compared, padded):
    x = torch.randn(rows, tokens, HIDDEN, generator=generator)
    real = None
    if padded:
        real = torch.arange(tokens)[None] < torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    angles = torch.zeros(rows, tokens, 1), torch.zeros(rows, tokens, 1)
    original = x + 1 if compared else None
    return States(share, torch.zeros(rows, tokens, dtype=torch.int64), x, original, real, angles[0].long(), angles)


def route(x):
    """A routing that depends on the token alone."""
    scores = (x @ torch.linspace(-1, 1, HIDDEN * EXPERTS).view(HIDDEN, EXPERTS)).sigmoid()
    weights, experts = scores.topk(TOP_K, dim=-1)
    return Routing(experts, weights, scores)


def batches():
    generator = torch.Generator().manual_seed(3)
    made = [
        (0, 3, 7, True, True),
        (0, 2, 5, True, False),
        (0, 1, 9, False, True),
        (1, 2, 4, True, False),
        (1, 2, 6, False, False),
    ]
    return [
        batch(generator, share, rows, tokens, compared=compared, padded=padded)
        for share, rows, tokens, compared, padded in made
    ]


@pytest.mark.parametrize("most", [0, 31, 1000])
def test_an_expert_gets_its_tokens_in_their_order(most):
    states = batches()
    expected: dict[int, list[torch.Tensor]] = {expert: [] for expert in range(EXPERTS)}
    compared = dict.fromkeys(range(EXPERTS), 0)
    for state in states:
        tokens = state.tokens(state.x)
        for expert in range(EXPERTS):
            own = tokens[(route(tokens).experts == expert).any(-1)]
            expected[expert].append(own)
            compared[expert] += len(own) if state.original is not None else 0
    found: dict[int, list[torch.Tensor]] = {expert: [] for expert in range(EXPERTS)}
    seen = dict.fromkeys(range(EXPERTS), 0)
    groups = routed(states, route, most)
    assert len(groups) == {0: 5, 31: 3, 1000: 2}[most]
    for group in groups:
        every, first = group.counts().tolist()
        for expert in range(EXPERTS):
            begin = sum(every[:expert])
            own = group.order[begin : begin + every[expert]]
            found[expert].append(group.x[own])
            seen[expert] += first[expert]
            if group.original is not None:
                torch.testing.assert_close(group.original[own[: first[expert]]], group.x[own[: first[expert]]] + 1)
                assert (own[first[expert] :] >= len(group.original)).all()
    assert seen == compared
    for expert in range(EXPERTS):
        torch.testing.assert_close(torch.cat(found[expert]), torch.cat(expected[expert]), rtol=0, atol=0)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("most", [0, 1000])
def test_weights_leave_padding_out(most, every):
    for group in routed(batches(), route, most):
        tokens, weights = group.weighted(3, every)
        real = torch.ones(len(group.x), dtype=torch.bool) if group.real is None else group.real
        torch.testing.assert_close(tokens, real.nonzero()[::every, 0])
        scores = route(group.x[real][::every]).scores[:, 3:4]
        torch.testing.assert_close(weights, scores / scores.mean())


@pytest.mark.parametrize("most", [0, 1000])
def test_each_batch_moves_on(most):
    states = batches()
    expected = [(2 * state.x, None if state.original is None else 3 * state.original) for state in states]
    for group in routed(states, route, most):
        group.move(2 * group.x, None if group.original is None else 3 * group.original)
    for state, (x, original) in zip(states, expected, strict=True):
        torch.testing.assert_close(state.x, x)
        assert (state.original is None) == (original is None)
        if original is not None:
            torch.testing.assert_close(state.original, original)

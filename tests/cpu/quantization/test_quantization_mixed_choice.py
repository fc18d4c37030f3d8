"""A scheme for each matrix within a budget of bytes."""

import itertools
import random

import pytest

from warpbus.errors import NumericError, UsageError
from warpbus.qtensor import Scheme
from warpbus.quantization import mixed
from warpbus.quantization.mixed import Cost, choose

SCHEMES = [Scheme.parse(name) for name in ("w2a16-g128", "w3a16-g128", "w4a16-g128", "w8a16")]
W2, W3, W4, W8 = SCHEMES


def instance(draw, count, largest=50):
    """Matrices with random costs, not even falling with the bytes."""
    return {
        f"m{index}": {
            scheme: Cost(draw.uniform(0, 1), draw.randint(0, largest))
            for scheme in draw.sample(SCHEMES, draw.randint(1, len(SCHEMES)))
        }
        for index in range(count)
    }


def totals(matrices, chosen):
    costs = [matrices[name][scheme] for name, scheme in chosen.items()]
    return sum(cost.loss for cost in costs), sum(cost.nbytes for cost in costs)


def best_of_all(matrices, budget):
    """Every choice tried."""
    losses = []
    for costs in itertools.product(*(options.values() for options in matrices.values())):
        if sum(cost.nbytes for cost in costs) <= budget:
            losses.append(sum(cost.loss for cost in costs))
    return min(losses, default=None)


def test_nothing_better_exists():
    draw = random.Random(0)
    refused = 0
    for _ in range(300):
        matrices, budget = instance(draw, draw.randint(1, 6)), draw.randint(0, 200)
        best = best_of_all(matrices, budget)
        if best is None:
            refused += 1
            with pytest.raises(UsageError, match=f"^a budget of {budget} bytes is too small"):
                choose(matrices, budget)
            continue
        chosen = choose(matrices, budget)
        assert list(chosen) == list(matrices)
        loss, nbytes = totals(matrices, chosen)
        assert nbytes <= budget
        assert loss == pytest.approx(best, abs=1e-12)
    assert 10 < refused < 150


def test_the_matrix_that_gains_most_gets_the_bits():
    costs = {"dull": (0.2, 0.1), "keen": (5.0, 1.0), "middling": (2.0, 1.0)}
    matrices = {name: {W3: Cost(low, 300), W4: Cost(high, 400)} for name, (low, high) in costs.items()}
    assert choose(matrices, 900) == dict.fromkeys(costs, W3)
    assert choose(matrices, 1000) == {"dull": W3, "keen": W4, "middling": W3}
    assert choose(matrices, 1199) == {"dull": W3, "keen": W4, "middling": W4}
    assert choose(matrices, 1200) == dict.fromkeys(costs, W4)


def test_a_greedy_choice_is_not_taken():
    """The best gain a byte, of `small`, would leave no room for what gains more."""
    matrices = {
        "small": {W3: Cost(3.0, 10), W4: Cost(0.0, 12)},
        "large": {W3: Cost(10.0, 100), W4: Cost(0.0, 110)},
    }
    assert choose(matrices, 120) == {"small": W3, "large": W4}


def test_many_partial_choices_are_thinned_within_the_budget(monkeypatch):
    draw = random.Random(1)
    matrices = instance(draw, 14, largest=10**6)
    smallest = sum(min(cost.nbytes for cost in costs.values()) for costs in matrices.values())
    exact = totals(matrices, choose(matrices, smallest + 10**6))
    monkeypatch.setattr(mixed, "KEPT", 200)
    loss, nbytes = totals(matrices, choose(matrices, smallest + 10**6))
    assert nbytes <= smallest + 10**6
    assert exact[0] <= loss <= 1.02 * exact[0]
    assert totals(matrices, choose(matrices, smallest))[1] == smallest


def test_a_model_of_real_size():
    """28 layers of ChatGLM2-6B: the budget is used up to less than a matrix' step."""
    draw = random.Random(2)
    weights = {"qkv": 4608 * 4096, "o": 4096 * 4096, "gate_up": 27392 * 4096, "down": 4096 * 13696}
    matrices = {
        f"layers.{layer}.{name}": {
            scheme: Cost(draw.uniform(0.5, 2) * 4.0**-scheme.bits, count * scheme.bits // 8) for scheme in SCHEMES
        }
        for layer in range(28)
        for name, count in weights.items()
    }
    budget = int(3.5 / 8 * 28 * sum(weights.values()))
    chosen = choose(matrices, budget)
    nbytes = totals(matrices, chosen)[1]
    assert budget - min(weights.values()) // 8 < nbytes <= budget
    assert len(set(chosen.values())) > 1


def test_no_matrices():
    assert choose({}, 0) == {}


def test_what_cannot_be_chosen_from_is_refused():
    with pytest.raises(UsageError, match=r"^q: no scheme to choose from"):
        choose({"q": {}}, 10)
    with pytest.raises(NumericError, match=r"^q: its loss in w4a16-g128 is nan"):
        choose({"q": {W4: Cost(float("nan"), 1)}}, 10)
    with pytest.raises(UsageError, match="the matrices take 7 bytes"):
        choose({"q": {W4: Cost(0.0, 4)}, "o": {W8: Cost(0.0, 3)}}, 6)

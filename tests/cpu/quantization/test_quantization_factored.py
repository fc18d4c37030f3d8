"""H = U D U^T, and the system that is solved with it."""

import pytest
import torch
from torch import Tensor

from warpbus.errors import NumericError
from warpbus.quantization.algorithms.factored import FactoredHessian, factored


def moments(columns: int, seed: int = 0, tokens: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = tokens or 2 * columns
    x = torch.randn(tokens, columns, generator=generator) * torch.rand(columns, generator=generator).exp()
    x[:, 1:] += 0.5 * x[:, :-1]
    return x.T @ x / tokens


def product(found: FactoredHessian) -> Tensor:
    upper = found.upper.double()
    return upper * found.pivots.double() @ upper.T


@pytest.mark.parametrize("columns", [1, 2, 33, 200])
@pytest.mark.parametrize("activation_order", [True, False])
def test_the_factors_multiply_to_the_damped_hessian(columns: int, activation_order: bool) -> None:
    hessian = moments(columns)
    found = factored(hessian, damping=0.02, activation_order=activation_order, name="q")
    diagonal = hessian.diagonal()
    damped = hessian.double() + 0.02 * diagonal.mean().double() * torch.eye(columns, dtype=torch.float64)
    expected = torch.argsort(diagonal, descending=True, stable=True) if activation_order else torch.arange(columns)
    assert torch.equal(found.order, expected)
    assert torch.equal(found.order[found.inverse_order], torch.arange(columns))
    assert torch.allclose(found.hessian.double(), damped[expected][:, expected], rtol=1e-6)
    assert torch.allclose(product(found), found.hessian.double(), rtol=1e-4, atol=1e-6)
    assert torch.equal(found.upper.diagonal(), torch.ones(columns))
    assert torch.equal(found.upper, found.upper.triu())
    assert bool((found.pivots > 0).all())
    assert torch.allclose(found.damped, (0.02 * diagonal.mean()).expand(columns))


def test_pivots_are_what_a_column_costs_that_those_after_it_make_up_for() -> None:
    """The one that is rounded last is on its own, and costs what the Schur complement of all others is."""
    hessian = moments(24)
    found = factored(hessian, damping=0.0, name="q")
    inverse = torch.linalg.inv(hessian.double())
    first = int(found.order[0])
    assert float(found.pivots[0]) == pytest.approx(1 / float(inverse[first, first]), rel=1e-4)
    last = int(found.order[-1])
    assert float(found.pivots[-1]) == pytest.approx(float(hessian[last, last]), rel=1e-4)


def test_importance_is_in_the_order_of_the_matrix() -> None:
    hessian = moments(40, seed=1)
    sorted_, plain = (factored(hessian, activation_order=order, name="q") for order in (True, False))
    assert not torch.equal(sorted_.importance, sorted_.pivots)
    for place, column in enumerate(sorted_.order.tolist()):
        assert sorted_.importance[column] == sorted_.pivots[place]
    assert torch.equal(plain.importance, plain.pivots)


def test_columns_of_one_size_stay_in_their_order() -> None:
    found = factored(torch.eye(50), damping=0.0, name="q")
    assert torch.equal(found.order, torch.arange(50))
    assert torch.equal(found.upper, torch.eye(50))
    assert torch.equal(found.pivots, torch.ones(50))


@pytest.mark.parametrize("columns", [1, 7, 511, 512, 513, 1024, 1100])
def test_solve(columns: int) -> None:
    """Sizes below, at and above multiples of the blocks that it is done in."""
    found = factored(moments(columns, tokens=columns + 50), damping=0.05, name="q")
    right = torch.randn(columns, 5, generator=torch.Generator().manual_seed(columns))
    expected = torch.linalg.solve(found.hessian.double(), right.double())
    given = right.clone()
    solved = found.solve(given)
    assert solved.data_ptr() == given.data_ptr()  # in place
    assert torch.allclose(solved.double(), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_solve_for_no_row_and_for_one() -> None:
    found = factored(moments(9), name="q")
    assert found.solve(torch.zeros(9, 0)).shape == (9, 0)
    alone = torch.arange(9.0)[:, None]
    both = torch.cat([alone, -alone], 1)
    assert torch.allclose(found.solve(both.clone())[:, :1], found.solve(alone.clone()), atol=1e-5)


def test_columns_that_never_had_an_input_count_as_average_ones_by_themselves() -> None:
    hessian = moments(16)
    dead = torch.tensor([0, 7, 15])
    hessian[dead] = 0
    hessian[:, dead] = 0
    found = factored(hessian, damping=0.1, name="q")
    mean = hessian.diagonal()[hessian.diagonal() > 0].mean()
    places = found.inverse_order[dead]
    assert torch.allclose(found.hessian.diagonal()[places], 1.1 * mean)
    assert torch.allclose(found.damped[places], 1.1 * mean)
    assert torch.allclose(found.importance[dead], 1.1 * mean)
    for place in places.tolist():
        assert found.hessian[place].count_nonzero() == 1
        assert found.upper[place].count_nonzero() == 1
    assert torch.allclose(product(found), found.hessian.double(), rtol=1e-4, atol=1e-6)


def test_no_input_at_all() -> None:
    found = factored(torch.zeros(6, 6), name="q")
    assert torch.equal(found.upper, torch.eye(6))
    assert torch.allclose(found.pivots, torch.full((6,), 1.01))


def test_its_argument_is_left_alone() -> None:
    hessian = moments(20)
    copy = hessian.clone()
    for activation_order in (True, False):
        factored(hessian, activation_order=activation_order, name="q").solve(torch.ones(20, 2))
        assert torch.equal(hessian, copy)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_refused(value: float) -> None:
    hessian = moments(8)
    hessian[3, 2] = value
    with pytest.raises(NumericError, match=r"^layers\.0\.mlp\.down: its Hessian has NaN or infinity: "):
        factored(hessian, name="layers.0.mlp.down")


def negative(hessian: Tensor) -> Tensor:
    return -hessian


def coupled(hessian: Tensor) -> Tensor:
    hessian[0, 1] = hessian[1, 0] = 1e4
    return hessian


def alike(hessian: Tensor) -> Tensor:
    return torch.ones_like(hessian)


@pytest.mark.parametrize("spoil", [negative, coupled, alike])
def test_a_hessian_that_is_not_positive_definite_is_refused(spoil: object) -> None:
    assert callable(spoil)
    with pytest.raises(NumericError, match=r"^q: its Hessian is not positive definite: raise --damping .*data$"):
        factored(spoil(moments(32)), damping=0.0, name="q")

"""A corner's factor on a GPU against float64."""

import pytest
import torch

from warpbus.kernels.ops.factor import factor_corner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def definite(columns, seed=0):
    """With a diagonal of ones, out of a larger matrix, so that its rows lie apart."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(3 * columns, columns + 7, generator=generator, device="cuda")
    x[:, 1:] += 0.7 * x[:, :-1]
    whole = x.T @ x
    scale = whole.diagonal().rsqrt()
    return (whole * scale * scale[:, None])[3 : 3 + columns, 3 : 3 + columns]


def factored(matrix):
    columns = len(matrix)
    upper, inverse = (torch.full((columns, columns + 5), float("nan"), device="cuda") for _ in range(2))
    failed = torch.zeros(1, dtype=torch.int32, device="cuda")
    factor_corner(matrix, upper[:, 2 : 2 + columns], inverse[:, 1 : 1 + columns], failed)
    for each, first in ((upper, 2), (inverse, 1)):  # nothing beside it is written
        assert each[:, :first].isnan().all()
        assert each[:, first + columns :].isnan().all()
    return upper[:, 2 : 2 + columns], inverse[:, 1 : 1 + columns], int(failed)


@pytest.mark.parametrize("columns", [1, 2, 7, 8, 9, 31, 63, 64, 65, 100, 127, 128])
def test_factor_and_inverse(columns):
    matrix = definite(columns, seed=columns)
    upper, inverse, failed = factored(matrix)
    assert failed == 0
    exact = torch.linalg.cholesky(matrix.double().flip(0, 1)).flip(0, 1)
    assert (upper.double() - exact).abs().max() < 2e-6
    reverse = torch.linalg.inv(exact)
    assert (inverse.double() - reverse).abs().max() < 4e-6 * reverse.abs().max()
    for each in (upper, inverse):
        assert torch.equal(each, each.triu())


def test_the_same_bits_each_time_and_from_what_is_above_the_diagonal():
    matrix = definite(128)
    found = factored(matrix)
    matrix.masked_fill_(torch.ones_like(matrix).tril(-1).bool(), float("nan"))
    for _ in range(3):
        again = factored(matrix)
        assert torch.equal(again[0], found[0])
        assert torch.equal(again[1], found[1])


@pytest.mark.parametrize("place", [0, 40, 99])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_matrix_that_is_not_positive_definite_is_reported(place, value):
    matrix = definite(100).clone()
    matrix[place, place] = value
    assert factored(matrix)[2] == 1

"""A corner's factor on the CPU, and what the operator refuses."""

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import TensorError
from warpbus.kernels.ops.factor import factor_corner


def definite(columns, seed=0):
    x = torch.randn(3 * columns, columns, generator=torch.Generator().manual_seed(seed))
    return x.T @ x / len(x)


def outputs(columns):
    blank = torch.full((columns, columns), float("nan"))
    return blank, blank.clone(), torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("columns", [1, 2, 33, 128])
def test_factor_and_inverse(columns):
    matrix = definite(columns)
    upper, inverse, failed = outputs(columns)
    factor_corner(matrix, upper, inverse, failed)
    assert int(failed) == 0
    for each in (upper, inverse):
        assert torch.equal(each, each.triu())
    assert torch.allclose(upper @ upper.T, matrix, atol=1e-5)
    assert torch.allclose(inverse @ upper, torch.eye(columns), atol=1e-5)


def test_what_is_below_the_diagonal_is_not_read():
    matrix = definite(20)
    found, again = outputs(20), outputs(20)
    factor_corner(matrix, *found)
    factor_corner(matrix.masked_fill(torch.ones(20, 20).tril(-1).bool(), float("nan")), *again)
    assert all(map(torch.equal, found, again))


def test_a_matrix_that_is_not_positive_definite_is_reported_and_stays_reported():
    upper, inverse, failed = outputs(8)
    factor_corner(definite(8) - 10 * torch.eye(8), upper, inverse, failed)
    assert int(failed) == 1
    factor_corner(definite(8), upper, inverse, failed)
    assert int(failed) == 1


def test_opcheck():
    opcheck(torch.ops.warpbus.factor_corner.default, (definite(5), *outputs(5)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: {"matrix": given["matrix"][0]}, "matrix has shape"),
        (lambda given: {"matrix": definite(129)}, "matrix has 129 rows, expected 1 to 128"),
        (lambda given: {"matrix": given["matrix"][:, :5]}, "it is a square"),
        (lambda given: {"upper": given["upper"][:5]}, "upper has shape"),
        (lambda given: {"inverse": given["inverse"].double()}, "inverse is float64"),
        (lambda given: {"failed": torch.zeros(2, dtype=torch.int32)}, "failed has shape"),
        (lambda given: {"failed": torch.zeros(1)}, "failed is float32"),
        (lambda given: {"failed": given["failed"].to("meta")}, "failed is on meta"),
        (lambda given: {"upper": given["upper"].T}, "upper has strides"),
    ],
)
def test_refused(change, message):
    given = dict(zip(("matrix", "upper", "inverse", "failed"), (definite(6), *outputs(6)), strict=True))
    with pytest.raises(TensorError, match=message):
        factor_corner(**given | change(given))

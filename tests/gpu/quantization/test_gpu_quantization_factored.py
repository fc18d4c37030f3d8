"""H = U D U^T by blocks on a GPU, at the shapes of models, against float64 and the library."""

import pytest
import torch

from warpbus.cuda.graphs import Replayed
from warpbus.errors import NumericError
from warpbus.quantization.algorithms import linear_algebra
from warpbus.quantization.algorithms.factored import factored
from warpbus.quantization.algorithms.linear_algebra import BLOCK, unit_factor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def moments(columns, seed=0):
    """Of inputs of which some are hundreds of times as large as others, and which depend on each other."""
    generator = torch.Generator("cuda").manual_seed(seed)
    mixed = torch.randn(64, columns, generator=generator, device="cuda")
    size = torch.randn(columns, generator=generator, device="cuda").mul_(1.5).exp_()
    total = torch.zeros(columns, columns, device="cuda")
    for _ in range(4):
        x = torch.randn(columns, columns, generator=generator, device="cuda")
        x += 0.3 * torch.randn(columns, 64, generator=generator, device="cuda") @ mixed
        x = (x * size).bfloat16()
        total += torch.mm(x.T, x, out_dtype=torch.float32)
    total /= 4 * columns
    total.diagonal().add_(0.01 * total.diagonal().mean())
    return total


@pytest.mark.parametrize("columns", [1, 5, 128, 384, 512, 513, 700, 2048, 2049, 4096, 6848, 13696])
def test_by_blocks(columns):
    matrix = moments(columns, seed=columns)
    upper, pivots, inverses, failed = linear_algebra._by_blocks(matrix)
    assert int(failed) == 0
    exact = torch.linalg.cholesky(matrix.double().flip(0, 1)).flip(0, 1)
    roots = exact.diagonal().clone()
    exact /= roots
    assert ((pivots.double() - roots.square()) / roots.square()).abs().max() < 2e-3
    assert (upper.double() - exact).norm() < 1e-4 * exact.norm()
    assert torch.equal(upper, upper.triu())
    assert (upper.diagonal() - 1).abs().max() < 1e-6
    for index in {0, len(inverses) // 2, len(inverses) - 1}:
        corner = upper[index * BLOCK : (index + 1) * BLOCK, index * BLOCK : (index + 1) * BLOCK].double()
        inverse = inverses[index, : len(corner), : len(corner)].double()
        assert (inverse @ corner - torch.eye(len(corner), device="cuda")).abs().max() < 1e-4


def test_the_same_bits_each_time_and_in_a_graph():
    matrix, run = moments(1500), Replayed()
    first = unit_factor(matrix)
    for found in (unit_factor(matrix), *(unit_factor(matrix, run=run) for _ in range(3))):
        assert all(map(torch.equal, first, found))
    run.prepare(linear_algebra.call_for(700, torch.device("cuda")))
    assert all(map(torch.equal, unit_factor(moments(700)), unit_factor(moments(700), run=run)))


def test_where_the_products_are_too_rough_the_library_decides(monkeypatch):
    matrix = moments(300)
    monkeypatch.setattr(
        linear_algebra, "_by_blocks", lambda matrix: (*[matrix] * 3, torch.ones(1, dtype=torch.int32).cuda())
    )
    found = factored(matrix, damping=0.0, activation_order=False, name="q")
    product = found.upper.double() * found.pivots.double() @ found.upper.double().T
    assert (product - matrix).abs().max() < 1e-5 * matrix.abs().max()


def test_a_matrix_that_is_not_positive_definite():
    matrix = moments(300)
    matrix.diagonal().sub_(2 * matrix.diagonal().mean())
    for run in (None, Replayed()):
        assert int(unit_factor(matrix, run=run)[3])
    matrix[100, 100] = 10**6
    with pytest.raises(NumericError, match="not positive definite"):
        factored(matrix, damping=0.0, name="q")

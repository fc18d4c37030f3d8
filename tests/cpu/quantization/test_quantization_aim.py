"""The matrix that is rounded once the inputs have changed."""

import pytest
import torch

from warpbus.errors import NumericError
from warpbus.quantization.algorithms import aim

GENERATOR = torch.Generator().manual_seed(0)
ORIGINAL = torch.randn(400, 24, generator=GENERATOR) @ torch.randn(24, 24, generator=GENERATOR)
CHANGED = ORIGINAL @ (torch.eye(24) + 0.05 * torch.randn(24, 24, generator=GENERATOR))
WEIGHT = torch.randn(10, 24, generator=GENERATOR)
HESSIAN = CHANGED.T @ CHANGED / 400
DRIFT = (ORIGINAL - CHANGED).T @ CHANGED / 400


def error(weight):
    return float((CHANGED @ weight.T - ORIGINAL @ WEIGHT.T).norm())


def test_least_squares():
    found = aim(WEIGHT, HESSIAN, DRIFT, damping=1e-6, share=1.0)
    expected = torch.linalg.lstsq(CHANGED.double(), (ORIGINAL @ WEIGHT.T).double()).solution.T
    assert torch.allclose(found.double(), expected, atol=1e-2)
    assert error(found) < 0.02 * error(WEIGHT)


def test_half_the_way():
    start, half, end = (aim(WEIGHT, HESSIAN, DRIFT, share=share) for share in (0.0, 0.5, 1.0))
    assert torch.equal(start, WEIGHT)
    assert torch.allclose(half, (start + end) / 2, atol=1e-5)
    assert torch.equal(half, aim(WEIGHT, HESSIAN, DRIFT))
    assert error(WEIGHT) > error(half) > error(end)


def test_inputs_that_have_not_changed_leave_the_matrix():
    assert torch.equal(aim(WEIGHT.half(), HESSIAN, torch.zeros(24, 24)), WEIGHT.half().float())


def test_columns_that_never_had_an_input():
    hessian, drift = HESSIAN.clone(), DRIFT.clone()
    for matrix in (hessian, drift):
        matrix[3] = matrix[:, 3] = 0
    found = aim(WEIGHT, hessian, drift)
    assert torch.allclose(found[:, 3], WEIGHT[:, 3])
    assert torch.isfinite(found).all()


def test_a_hessian_that_cannot_be_factored_is_refused():
    with pytest.raises(NumericError, match=r"^q: its Hessian is not positive definite"):
        aim(WEIGHT, -HESSIAN, DRIFT, name="q")

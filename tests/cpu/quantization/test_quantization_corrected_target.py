"""The matrix that is rounded once the inputs have changed."""

import pytest
import torch
from torch import Tensor

from warpbus.quantization.algorithms import corrected_target
from warpbus.quantization.algorithms.factored import factored

GENERATOR = torch.Generator().manual_seed(0)
ORIGINAL = torch.randn(400, 24, generator=GENERATOR) @ torch.randn(24, 24, generator=GENERATOR)
CHANGED = ORIGINAL @ (torch.eye(24) + 0.05 * torch.randn(24, 24, generator=GENERATOR))
WEIGHT = torch.randn(10, 24, generator=GENERATOR)
MOMENTS = CHANGED.T @ CHANGED / 400
DRIFT = (ORIGINAL - CHANGED).T @ CHANGED / 400


def corrected(
    weight: Tensor,
    moments: Tensor,
    drift: Tensor,
    *,
    share: float | None = None,
    damping: float = 0.01,
    activation_order: bool = True,
) -> Tensor:
    """`corrected_target` of rows as they stand, as columns in the order of the Hessian and back."""
    hessian = factored(moments, damping=damping, activation_order=activation_order, name="q")
    order = hessian.order
    columns = weight.T[order].contiguous()
    copies = columns.clone(), drift.clone()
    options = {} if share is None else {"share": share}
    found = corrected_target(columns, hessian, drift[order][:, order].contiguous(), **options)
    assert torch.equal(columns, copies[0])  # its arguments are left alone
    assert torch.equal(drift, copies[1])
    return found[hessian.inverse_order].T


def error(weight: Tensor) -> float:
    return float((CHANGED @ weight.T - ORIGINAL @ WEIGHT.T).norm())


@pytest.mark.parametrize("activation_order", [True, False])
def test_least_squares(activation_order: bool) -> None:
    found = corrected(WEIGHT, MOMENTS, DRIFT, damping=1e-6, share=1.0, activation_order=activation_order)
    expected = torch.linalg.lstsq(CHANGED.double(), (ORIGINAL @ WEIGHT.T).double()).solution.T
    assert torch.allclose(found.double(), expected, atol=1e-2)
    assert error(found) < 0.02 * error(WEIGHT)


def test_damping_is_that_of_the_hessian() -> None:
    found = corrected(WEIGHT, MOMENTS, DRIFT, damping=0.3, share=1.0)
    damped = MOMENTS.double() + 0.3 * MOMENTS.diagonal().mean() * torch.eye(24)
    expected = WEIGHT.double() + WEIGHT.double() @ DRIFT.double() @ torch.linalg.inv(damped)
    assert torch.allclose(found.double(), expected, atol=1e-4)


def test_half_the_way() -> None:
    start, half, end = (corrected(WEIGHT, MOMENTS, DRIFT, share=share) for share in (0.0, 0.5, 1.0))
    assert torch.equal(start, WEIGHT)
    assert torch.allclose(half, (start + end) / 2, atol=1e-5)
    assert torch.equal(half, corrected(WEIGHT, MOMENTS, DRIFT))
    assert error(WEIGHT) > error(half) > error(end)


def test_inputs_that_have_not_changed_leave_the_matrix() -> None:
    assert torch.equal(corrected(WEIGHT, MOMENTS, torch.zeros(24, 24)), WEIGHT)


def test_columns_that_never_had_an_input() -> None:
    moments, drift = MOMENTS.clone(), DRIFT.clone()
    for matrix in (moments, drift):
        matrix[3] = matrix[:, 3] = 0
    found = corrected(WEIGHT, moments, drift)
    assert torch.allclose(found[:, 3], WEIGHT[:, 3])
    assert torch.isfinite(found).all()


def test_rows_do_not_depend_on_each_other() -> None:
    whole = corrected(WEIGHT, MOMENTS, DRIFT)
    assert torch.allclose(corrected(WEIGHT[4:5], MOMENTS, DRIFT), whole[4:5], atol=1e-5)


def test_it_lets_the_precision_of_products_alone() -> None:
    before = torch.get_float32_matmul_precision()
    corrected(WEIGHT, MOMENTS, DRIFT)
    assert torch.get_float32_matmul_precision() == before

"""Rotary positions of the models: the gradient is that of the rotation."""

import pytest
import torch

from warpbus.models.layers import rotate


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient_of_a_rotation(interleaved: bool, planes: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 2, 12 * planes, dtype=torch.float64, requires_grad=True)
    turns = torch.rand(2, 3, 1, 4 * planes, dtype=torch.float64) * 6
    assert torch.autograd.gradcheck(lambda x: rotate(x, (turns.cos(), turns.sin()), interleaved, planes), x)


def test_gradient_has_the_dtype_of_what_was_rotated() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 2, 16).bfloat16().requires_grad_()
    turns = torch.rand(1, 5, 1, 8) * 6
    y = rotate(x, (turns.cos(), turns.sin()), True)
    (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    wide = x.detach().double().requires_grad_()
    turned = rotate(wide, (turns.double().cos(), turns.double().sin()), True)
    (expected,) = torch.autograd.grad(turned, wide, torch.ones_like(turned))
    assert (y.dtype, found.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)

"""The cross-entropy in place of its scores, on the CPU: against float64, what it refuses, what torch.compile sees."""

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional as F

from warpbus.errors import TensorError
from warpbus.kernels.ops.cross_entropy import cross_entropy

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def drawn(rows, vocabulary, dtype):
    generator = torch.Generator().manual_seed(rows + vocabulary)
    scores = (4 * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    return scores, torch.randint(vocabulary, (rows,), generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (5, 37), (30, 1000)])
def test_against_float64(rows, vocabulary, dtype):
    scores, targets = drawn(rows, vocabulary, dtype)
    wide = scores.to(torch.float64, copy=True).requires_grad_()
    expected = F.cross_entropy(wide, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), wide)
    losses = cross_entropy(scores, targets, differentiated=True)
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert scores.dtype == dtype
    torch.testing.assert_close(scores.double(), gradient, rtol=torch.finfo(dtype).eps + 1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_stay_where_no_gradient_is_wanted(dtype):
    scores, targets = drawn(6, 50, dtype)
    before = scores.clone()
    losses = cross_entropy(scores, targets, differentiated=False)
    assert torch.equal(scores, before)
    assert torch.equal(losses, cross_entropy(scores, targets, differentiated=True))


def test_what_is_nearly_known_has_a_gradient():
    scores, targets = torch.tensor([[9.5, 0, 0]], dtype=torch.bfloat16), torch.tensor([0])
    cross_entropy(scores, targets, differentiated=True)
    assert float(scores[0, 0]) == pytest.approx(-1.497e-4, rel=5e-3)  # 2 / (exp(9.5) + 2)


def test_no_rows():
    assert cross_entropy(torch.empty(0, 8), torch.empty(0, dtype=torch.int64), differentiated=True).shape == (0,)


def test_what_it_refuses():
    scores, targets = drawn(3, 4, torch.float32)
    with pytest.raises(TensorError, match="cross_entropy: scores is int64, expected float32, float16, bfloat16"):
        cross_entropy(scores.long(), targets, differentiated=True)
    with pytest.raises(TensorError, match=r"scores has shape \[12\], expected a matrix"):
        cross_entropy(scores.flatten(), targets, differentiated=True)
    with pytest.raises(TensorError, match=r"targets has shape \[2\], expected \[3\]: one target for each row"):
        cross_entropy(scores, targets[:2], differentiated=True)
    with pytest.raises(TensorError, match=r"targets are torch\.int32 on cpu, expected torch\.int64 on cpu"):
        cross_entropy(scores, targets.int(), differentiated=True)
    with pytest.raises(TensorError, match="scores are not contiguous and are overwritten"):
        cross_entropy(scores.t(), torch.zeros(4, dtype=torch.int64), differentiated=True)
    with pytest.raises(TensorError, match=r"scores have shape \[3, 0\], expected at least one column"):
        cross_entropy(scores[:, :0].contiguous(), targets, differentiated=True)


def test_registered_as_torch_wants():
    operator = torch.ops.warpbus.cross_entropy.default
    for differentiated in (True, False):
        checked = opcheck(operator, (*drawn(3, 8, torch.float32), differentiated))
        assert set(checked.values()) == {"SUCCESS"}

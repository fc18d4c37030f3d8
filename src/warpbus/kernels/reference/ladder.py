"""Products in plain PyTorch, summed in float32 and rounded once."""

import torch
from torch import Tensor
from torch.nn import functional as F


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` for a `[m, k]` and b `[k, n]`."""
    return (a.float() @ b.float()).to(a.dtype)


def gemv(w: Tensor, x: Tensor) -> Tensor:
    """`w @ x` for w `[n, k]` and x `[k]`."""
    return (w.float() @ x.float()).to(w.dtype)


def linear_sigmoid(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`sigmoid(x @ weight.T + bias)` for x `[..., k]`, weight `[n, k]`, bias `[n]`."""
    return torch.sigmoid(F.linear(x.float(), weight.float(), bias.float())).to(x.dtype)

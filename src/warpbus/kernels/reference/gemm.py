"""`gemm` and `gemv` in plain PyTorch: summed in float32, bias and activation applied before the one rounding."""

import torch
from torch import Tensor
from torch.nn import functional as F

_ACTIVATIONS = {
    "none": lambda x: x,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}


def gemm(a: Tensor, b: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """`activation(a @ b + bias)` for a `[m, k]`, b `[k, n]`, bias `[n]`."""
    product = a.float() @ b.float()
    if bias is not None:
        product = product + bias.float()
    return _ACTIVATIONS[activation](product).to(a.dtype)


def gemv(weight: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """`activation(weight @ x + bias)` for weight `[n, k]`, x `[k]`, bias `[n]`."""
    product = weight.float() @ x.float()
    if bias is not None:
        product = product + bias.float()
    return _ACTIVATIONS[activation](product).to(weight.dtype)

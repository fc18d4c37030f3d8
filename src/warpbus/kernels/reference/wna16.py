"""`wna16` in plain PyTorch: dequantize, then multiply; or look rows up, then dequantize."""

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.kernels.reference.activation import swiglu
from warpbus.kernels.reference.norm import rms_norm
from warpbus.qtensor import QTensor


def wna16_linear(
    x: Tensor,
    weight: QTensor,
    bias: Tensor | None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """`residual + activation(norm(x) @ weight.T + bias)` with the weights dequantized to the dtype of `x` first."""
    if norm is not None:
        x = rms_norm(x, norm, eps)
    return finish(F.linear(x, weight.dequantize(x.dtype), bias), residual, activation)


def finish(y: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    """`residual + activation(y)`; the activation is "none" or "swiglu"."""
    if activation == "swiglu":
        y = swiglu(y)
    return y if residual is None else residual + y


def wna16_embedding(tokens: Tensor, weight: QTensor, dtype: torch.dtype) -> Tensor:
    """The rows `tokens` of a matrix `[n, k]`, `[..., k]`, dequantized to `dtype`."""
    if tokens.numel() == 0:
        return torch.empty(*tokens.shape, weight.shape[1], dtype=dtype, device=weight.device)
    return weight.take(tokens.flatten()).dequantize(dtype).view(*tokens.shape, -1)

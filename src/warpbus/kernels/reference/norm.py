"""RMSNorm and LayerNorm in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps)` in float32, rounded to the dtype of `x`, then times the weight in that dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype)).contiguous()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`(x - mean) / sqrt(variance + eps) * weight + bias` in float32, rounded once."""
    shift = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float(), shift, eps).to(x.dtype).contiguous()


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm(total)` and `total = x + residual`, rounded to the dtype of `x`."""
    total = (x + residual).contiguous()
    return rms_norm(total, weight, eps), total


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """`layer_norm(total)` and `total = x + residual`, rounded to the dtype of `x`."""
    total = (x + residual).contiguous()
    return layer_norm(total, weight, bias, eps), total

"""Root-mean-square normalization (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor, nn

from warpbus.kernels.ops.norm import rms_norm
from warpbus.models.layers.fusion import has_kernels


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis; the mean is taken in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if has_kernels(x) and self.weight.dtype == x.dtype:
            return rms_norm(x, self.weight, self.eps)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)

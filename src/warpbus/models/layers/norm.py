"""Root-mean-square normalization (Zhang and Sennrich, 2019) and layer normalization (Ba et al., 2016)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpbus.kernels.ops.arguments import has_kernels
from warpbus.kernels.ops.norm import layer_norm, rms_norm
from warpbus.models.layer_spec import NormSpec


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis; the mean is taken in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if has_kernels(x) and self.weight.dtype == x.dtype:
            return rms_norm(x, self.weight, self.eps)
        if torch.is_grad_enabled() and x.device.type == "cuda" and self.weight.dtype == x.dtype:
            # torch's own kernel has a gradient, and keeps x for it instead of a float32 copy.
            with torch.autocast("cuda", enabled=False):
                return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class LayerNorm(nn.Module):
    """`(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` over the last axis, in float32 and rounded once."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if has_kernels(x) and self.weight.dtype == x.dtype:
            return layer_norm(x, self.weight, self.bias, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = self.weight.to(wide), self.bias.to(wide)
        return F.layer_norm(x.to(wide), weight.shape, weight, bias, self.eps).to(x.dtype)


Norm = RMSNorm | LayerNorm


def make_norm(spec: NormSpec, size: int) -> Norm:
    """A norm over `size` features, of the kind in `spec`."""
    return (LayerNorm if spec.kind == "layer" else RMSNorm)(size, spec.eps)

"""Rounding to 8-bit floating-point numbers with one scale per matrix, in plain PyTorch."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

MULTIPLE = 16
"""Of which the columns of a transposed copy are a multiple, as products need it."""

_SMALLEST = 1e-12  # an amax below is taken for this: the scale of a tensor of zeros is still a number


def round_to_fp8(x: Tensor, dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `warpbus.kernels.ops.fp8.round_to_fp8`, for a matrix with any number of columns."""
    scale = torch.linalg.vector_norm(x.detach(), math.inf).float().clamp_min(_SMALLEST) / torch.finfo(dtype).max
    # A matrix of one number, with which the product is in float32; what it makes a little larger than the largest code
    # is rounded down to it.
    codes = (x.contiguous() * scale.reciprocal().view(1, 1)).to(dtype)
    return codes, _transposed(codes) if transposed else codes.new_empty(x.shape[1], 0), scale


def _transposed(codes: Tensor) -> Tensor:
    """As bytes, since not every operator knows fp8."""
    turned = codes.view(torch.uint8).t().contiguous()
    missing = -turned.shape[1] % MULTIPLE
    return (F.pad(turned, (0, missing)) if missing else turned).view(codes.dtype)

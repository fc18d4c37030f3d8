"""`w8a8` in plain PyTorch: 8-bit codes with one scale per row, and the product of two matrices of them."""

from math import prod

import torch
from torch import Tensor

from warpbus.kernels.operators import converted
from warpbus.kernels.reference.grid import LARGEST, nearest_values

_EXACT = 131071  # products of int8 whose sum fits into int32
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes `[..., k]` and float32 scales `[...]` of the rows of x `[..., k]`, rounded to nearest even.

    The scale is the largest magnitude of the row over the largest code; below the smallest normal number it is 0.
    """
    wide = x.float()
    scales = wide.abs().amax(-1) / LARGEST[dtype] if x.shape[-1] else wide.new_zeros(x.shape[:-1])
    scales = torch.where(scales < _SMALLEST_NORMAL, torch.zeros_like(scales), scales)
    inverse = torch.where(scales == 0, scales, 1 / scales)
    return nearest_values(wide * inverse[..., None], dtype).contiguous(), scales


def scaled_gemm(
    a_codes: Tensor, a_scales: Tensor, b_codes: Tensor, b_scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`a_scales[:, None] * (a_codes @ b_codes.T) * b_scales + bias` for codes `[m, k]` and `[n, k]`.

    Products of int8 codes are summed exactly, those of e4m3 codes in float32.
    """
    product = _product(a_codes, b_codes).float() * a_scales[:, None] * b_scales
    if bias is not None:
        product = product + bias.float()
    return converted(product, out_dtype)


def w8a8_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ (weight_scale[:, None] * weight).T + bias` with x `[..., k]`, of any dtype, quantized token by token."""
    n, k = weight.shape
    codes, scales = quantize(x.reshape(prod(x.shape[:-1]), k), weight.dtype)
    return scaled_gemm(codes, scales, weight, weight_scale, bias, x.dtype).reshape(*x.shape[:-1], n)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b.T` of codes."""
    if a.dtype != torch.int8:
        return a.float() @ b.float().T
    # Without VNNI a CPU adds pairs of products in 16 bits, where they saturate; on a GPU only certain sizes are taken.
    fits = 0 < a.shape[1] <= _EXACT and a.numel() > 0 and b.numel() > 0
    if a.device.type == "cpu" and fits and torch.cpu._is_vnni_supported():
        return torch._int_mm(a, b.T)
    return a.double() @ b.double().T

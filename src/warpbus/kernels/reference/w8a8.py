"""`w8a8` in plain PyTorch: 8-bit codes with one scale a row, and the product of two matrices of them."""

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes `[..., k]` and float32 scales `[...]` of the rows of x `[..., k]`, rounded to nearest even.

    The scale is the largest magnitude of the row over the largest code; below the smallest normal number it is 0.
    """
    wide = x.float()
    largest = LARGEST[dtype]
    scales = wide.abs().amax(-1) / largest if x.shape[-1] else wide.new_zeros(x.shape[:-1])
    scales = torch.where(scales < _SMALLEST_NORMAL, torch.zeros_like(scales), scales)
    inverse = torch.where(scales == 0, scales, 1 / scales)
    scaled = (wide * inverse[..., None]).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype).contiguous(), scales


def scaled_gemm(
    a_codes: Tensor, a_scales: Tensor, b_codes: Tensor, b_scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`a_scales[:, None] * (a_codes @ b_codes.T) * b_scales + bias` for codes `[m, k]` and `[n, k]`.

    Products of int8 codes are summed in float64, which is exact; those of e4m3 codes in float32.
    """
    wide = torch.float64 if a_codes.dtype == torch.int8 else torch.float32
    product = (a_codes.to(wide) @ b_codes.to(wide).T).float()
    product = product * a_scales[:, None] * b_scales
    if bias is not None:
        product = product + bias.float()
    return product.to(out_dtype)

"""Weights in 8 bits for products of 8-bit activations: int8, or fp8 (e4m3; Micikevicius et al., 2022).

One scale a row, that of its largest weight. Activations are rounded when they come by, one scale a token, so there is
nothing to calibrate; see `smoothquant` for inputs with outliers.
"""

import torch
from torch import Tensor

from warpbus.errors import SchemeError
from warpbus.qtensor import QTensor, Scheme
from warpbus.quantization.algorithms.grid import check_scales, check_weight, slices

# The greatest value of each type. int8 goes to -128, but a symmetric range keeps the signs alike.
LIMITS = {"int8": 127.0, "fp8": 448.0}


def round_rows(weight: Tensor, scheme: Scheme, *, scale_dtype: torch.dtype, name: str = "weight") -> QTensor:
    """Round a matrix to nearest, each row over its whole range.

    Args:
        weight: floating `[out, in]`; worked on in float32, some rows at a time.
        scheme: w8a8-int8 or w8a8-fp8.
        scale_dtype: dtype of the scales; they are rounded to it before the values are chosen.
        name: the matrix, for messages.

    Returns:
        the quantized matrix on the device of `weight`. All-zero rows have scale 1.

    Raises:
        SchemeError: if the scheme has activations in 16 bits.
        NumericError: if a weight is NaN or infinite, or too large for `scale_dtype`.
    """
    if scheme.activations is None:
        raise SchemeError(f"{name}: {scheme} leaves activations in 16 bits: expected w8a8-int8 or w8a8-fp8")
    limit = LIMITS[scheme.activations]
    check_weight(weight, name)
    values = torch.empty(weight.shape, dtype=scheme.dtype, device=weight.device)
    scales = torch.empty(len(weight), 1, dtype=scale_dtype, device=weight.device)
    for part in slices(weight):
        wide = weight[part].float()
        stored = (wide.abs().amax(1, keepdim=True) / limit).to(scale_dtype)
        scales[part] = torch.where(stored == 0, torch.ones_like(stored), stored)
        # A scale that was rounded down takes the largest weight beyond the limit.
        scaled = (wide / scales[part].float()).clamp_(-limit, limit)
        values[part] = (scaled.round_() if scheme.activations == "int8" else scaled).to(scheme.dtype)
    check_scales(scales, name)
    return QTensor.from_values(scheme, values, scales)

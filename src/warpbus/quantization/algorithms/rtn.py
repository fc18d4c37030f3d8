"""Rounding to nearest: every weight to the nearest code of its group's grid. Needs no calibration."""

import torch
from torch import Tensor

from warpbus.qtensor import QTensor, Scheme
from warpbus.quantization.algorithms.grid import check_scales, check_weight, fit, slices


def rtn(weight: Tensor, scheme: Scheme, *, scale_dtype: torch.dtype, name: str = "weight") -> QTensor:
    """Round a matrix to nearest.

    Args:
        weight: floating `[out, in]`; worked on in float32, some rows at a time.
        scheme: bits, groups, symmetric or not.
        scale_dtype: dtype of the scales; they are rounded to it before the codes are chosen.
        name: the matrix, for messages.

    Returns:
        the quantized matrix on the device of `weight`. All-zero groups have scale 1.

    Raises:
        SchemeError: if the group size does not divide `in`.
        NumericError: if a weight is NaN or infinite, or too large for `scale_dtype`.
    """
    columns = weight.shape[1]
    count = scheme.groups(columns, name)
    check_weight(weight, name)
    parts = []
    for part in slices(weight):
        groups = weight[part].float().unflatten(1, (count, -1))
        grid = fit(groups, scheme, scale_dtype)
        check_scales(grid.scales, scale_dtype, name)
        codes = grid.codes(groups, scheme).flatten(1).to(torch.uint8)
        zeros = None if scheme.symmetric else grid.zeros
        parts.append(QTensor.from_codes(scheme, codes, grid.scales.to(scale_dtype), zeros))
    return parts[0] if len(parts) == 1 else QTensor.concatenate(parts)

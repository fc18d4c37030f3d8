"""Rounding to nearest: every weight to the nearest code of its group's grid. Needs no calibration."""

import torch
from torch import Tensor

from warpbus.kernels.ops.gptq import clip_search
from warpbus.qtensor import QTensor, Scheme, pack, packed_words
from warpbus.quantization.algorithms.grid import Grid, check_scales, check_weight, fit, slices


def rtn(
    weight: Tensor,
    scheme: Scheme,
    *,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
    name: str = "weight",
) -> QTensor:
    """Round a matrix to nearest.

    Args:
        weight: floating `[out, in]`; worked on in float32, some rows at a time.
        scheme: bits, groups, symmetric or not.
        scale_dtype: dtype of the scales; they are rounded to it before the codes are chosen.
        importance: float32 `[in]`, what a squared error in a column costs: each group's range is then clipped to where
            it costs least. The diagonal of the inputs' moments is the cost in the layer's outputs. Without it, the
            full range.
        name: the matrix, for messages.

    Returns:
        the quantized matrix on the device of `weight`. All-zero groups have scale 1.

    Raises:
        SchemeError: if the group size does not divide `in`.
        NumericError: if a weight is NaN or infinite, or too large for `scale_dtype`.
    """
    rows, columns = weight.shape
    count = scheme.groups(columns, name)
    check_weight(weight, name)
    # Set aside at once: parts that are joined in the end would leave holes in the heap between them.
    words = torch.empty(rows, packed_words(columns, scheme.bits), dtype=torch.int32, device=weight.device)
    scales = torch.empty(rows, count, dtype=scale_dtype, device=weight.device)
    zeros = None if scheme.symmetric else torch.empty(rows, count, dtype=torch.uint8, device=weight.device)
    for part in slices(weight):
        wide = weight[part].float()
        groups = wide.unflatten(1, (count, -1))
        if importance is None:
            grid = fit(groups, scheme, scale_dtype)
        else:
            size = columns // count
            costs = importance.float().contiguous()
            grid = Grid(*clip_search(wide, costs, size, scheme.bits, scheme.symmetric, scale_dtype))
        words[part] = pack(grid.codes(groups, scheme).flatten(1).to(torch.uint8), scheme.bits)
        scales[part] = grid.scales
        if zeros is not None:
            zeros[part] = grid.zeros
    check_scales(scales, name)
    return QTensor(scheme, words, scales, zeros, (rows, columns))

"""Rounding a matrix of weights to nearest: the one way in which this package does it.

The grid is `kernels.reference.grid`'s, or for activations of 8 bits one scale per row. GPTQ decides the codes of its
columns itself, on the same grid. Activations are rounded when they come by: `w8a8`, `cache`.
"""

import torch
from torch import Tensor

from warpbus.errors import SchemeError
from warpbus.kernels.ops.gptq import clip_search
from warpbus.kernels.reference.fp4 import round_to_fp4
from warpbus.kernels.reference.grid import LARGEST, Grid, fit, nearest_values, slices
from warpbus.qtensor import QTensor, Scheme, pack, packed_words


def round_to_nearest(
    weight: Tensor, scheme: Scheme, *, scale_dtype: torch.dtype, importance: Tensor | None = None
) -> QTensor:
    """Round each weight to the nearest value that its scheme has.

    Args:
        weight: floating `[out, in]`, finite; worked on in float32, some rows at a time.
        scheme: any. With activations of 8 bits the scale of a row is that of its largest weight.
        scale_dtype: dtype of the scales; they are rounded to it before the codes are chosen. One that is too large for
            it becomes infinite. Scales of FP4 are float32.
        importance: float32 `[in]`, what a squared error in a column costs: each group's range is then clipped to where
            it costs least. Without it, or with activations of 8 bits, the full range.

    Returns:
        the quantized matrix on the device of `weight`. All-zero groups and rows have scale 1.

    Raises:
        SchemeError: if the group size does not divide `in`, or for a trellis.
    """
    if scheme.activations is not None:
        return _by_rows(weight, scheme, scale_dtype)
    if scheme.is_trellis:
        raise SchemeError(f"{scheme}: a path through a trellis is not found by rounding: use gptq")
    if scheme.element is not None:
        return round_to_fp4(weight, scheme, importance)
    rows, columns = weight.shape
    count = scheme.groups(columns)
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
    return QTensor(scheme, words, scales, zeros, (rows, columns))


def _by_rows(weight: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> QTensor:
    """Values of int8 or e4m3, one scale per row."""
    values = torch.empty(weight.shape, dtype=scheme.dtype, device=weight.device)
    scales = torch.empty(len(weight), 1, dtype=scale_dtype, device=weight.device)
    for part in slices(weight):
        wide = weight[part].float()
        stored = (wide.abs().amax(1, keepdim=True) / LARGEST[scheme.dtype]).to(scale_dtype)
        scales[part] = torch.where(stored == 0, torch.ones_like(stored), stored)
        # A scale that was rounded down takes the largest weight beyond the limit.
        values[part] = nearest_values(wide / scales[part].float(), scheme.dtype)
    return QTensor.from_values(scheme, values, scales)

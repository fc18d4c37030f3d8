"""Rounding to nearest: every weight to the nearest code of its group's grid. Needs no calibration."""

import torch
from torch import Tensor

from warpbus.kernels.ops.rounding import round_to_nearest
from warpbus.qtensor import QTensor, Scheme
from warpbus.quantization.algorithms.weights import check_scales, check_weight


def rtn(
    weight: Tensor,
    scheme: Scheme,
    *,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
    name: str = "weight",
) -> QTensor:
    """Round a matrix to nearest, see `kernels.ops.rounding`; refuse NaN and infinity.

    Args:
        weight: floating `[out, in]`.
        scheme: any scheme, including those with 8-bit activations.
        scale_dtype: dtype of the scales.
        importance: float32 `[in]`, the cost of a squared error in each column. With the diagonal of the inputs'
            moments, it is the error of the layer's outputs.
        name: the matrix, for messages.

    Returns:
        the quantized matrix on the device of `weight`.

    Raises:
        SchemeError: if the group size does not divide `in`.
        NumericError: if a weight is NaN or infinite, or too large for `scale_dtype`.
    """
    scheme.groups(weight.shape[1], name)
    check_weight(weight, name)
    rounded = round_to_nearest(weight, scheme, scale_dtype=scale_dtype, importance=importance)
    check_scales([rounded.scales], [name])
    return rounded

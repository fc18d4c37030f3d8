"""How much of a matrix, or of what it computes, quantization changes."""

import math

from torch import Tensor

from warpbus.qtensor import QTensor
from warpbus.quantization.algorithms.grid import slices


def squared_loss(weight: Tensor, quantized: QTensor, hessian: Tensor | None = None) -> tuple[float, float]:
    """The squares of a matrix' error and of the matrix itself.

    Args:
        weight: floating `[out, in]`.
        quantized: what became of it.
        hessian: float32 `[in, in]`; without it, all inputs count alike.

    Returns:
        tr(dW H dW^T) and tr(W H W^T), computed in float32 slice by slice.
    """
    lost = total = 0.0
    for part in slices(weight):
        wide = weight[part].float()
        change = quantized.rows(part.start, part.stop).dequantize(wide.dtype) - wide
        lost += _square(change, hessian)
        total += _square(wide, hessian)
    return lost, total


def relative(lost: float, total: float) -> float:
    """The share of the norm that is lost; 0 where there is nothing to lose."""
    return math.sqrt(max(lost, 0.0) / total) if total > 0 else 0.0


def _square(matrix: Tensor, hessian: Tensor | None) -> float:
    weighted = matrix if hessian is None else matrix @ hessian
    return float((weighted * matrix).sum(dtype=matrix.dtype))

"""Checks of the weights of a matrix, and the error of its quantization."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from warpbus.errors import NumericError
from warpbus.kernels.reference.grid import slices
from warpbus.qtensor import QTensor


def check_weight(weight: Tensor, name: str) -> None:
    """Raises NumericError, naming the matrix, if a weight is NaN or infinite."""
    check_weights([weight], [name])


def check_weights(weights: Sequence[Tensor], names: Sequence[str]) -> None:
    """`check_weight` of several matrices, with one wait for the GPU if all are finite."""
    # A sum is NaN or infinite if a part is; it may also overflow, so only then look closely.
    # Sums are added at once: a list of them would lie between the freed slices, and the heap could not shrink.
    sums = [torch.zeros((), device=weight.device) for weight in weights]
    for weight, total in zip(weights, sums, strict=True):
        for part in slices(weight):
            total += weight[part].float().sum()
    for weight, name, finite in zip(weights, names, torch.stack(sums).isfinite().tolist(), strict=True):
        for part in () if finite else slices(weight):
            count = int((~torch.isfinite(weight[part])).sum())
            if count:
                raise NumericError(
                    f"{name}: NaN or infinity among its weights ({count} in rows {part.start} to {part.stop - 1}): "
                    "use an undamaged checkpoint"
                )


def check_scales(scales: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raises NumericError, naming the matrix, if a scale is too large for the dtype that it is stored in."""
    finite = torch.stack([torch.isfinite(each).all() for each in scales]).tolist()
    for each, name, good in zip(scales, names, finite, strict=True):
        if not good:
            raise NumericError(f"{name}: its weights are too large for scales in {each.dtype}: use a wider dtype")


def squared_loss(weight: Tensor, quantized: QTensor, hessian: Tensor | None = None) -> tuple[float, float]:
    """The squares of a matrix' error and of the matrix itself.

    Args:
        weight: floating `[out, in]`.
        quantized: the quantized matrix.
        hessian: float32 `[in, in]`; without it, all inputs have equal weight.

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
    """The relative error of the norm; 0 for a zero matrix."""
    return math.sqrt(max(lost, 0.0) / total) if total > 0 else 0.0


def _square(matrix: Tensor, hessian: Tensor | None) -> float:
    weighted = matrix if hessian is None else matrix @ hessian
    return float((weighted * matrix).sum(dtype=matrix.dtype))

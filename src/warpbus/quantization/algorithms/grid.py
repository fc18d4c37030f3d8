"""The grid of a matrix (see `kernels.reference.grid`), and what its weights have to be so that there is one."""

import torch
from torch import Tensor

from warpbus.errors import NumericError
from warpbus.kernels.reference.grid import SLICE_WEIGHTS, Grid, fit, search, slices

__all__ = ["SLICE_WEIGHTS", "Grid", "check_scales", "check_weight", "fit", "search", "slices"]


def check_weight(weight: Tensor, name: str) -> None:
    """Raises NumericError, naming the matrix, if a weight is NaN or infinite."""
    for part in slices(weight):
        # A sum is NaN or infinite if a part is; it may also overflow, so only then look closely.
        if not torch.isfinite(weight[part].float().sum()):
            count = int((~torch.isfinite(weight[part])).sum())
            if count:
                raise NumericError(
                    f"{name}: NaN or infinity among its weights ({count} in rows {part.start} to {part.stop - 1}): "
                    "use an undamaged checkpoint"
                )


def check_scales(scales: Tensor, name: str) -> None:
    """Raises NumericError, naming the matrix, if a scale is too large for the dtype that it is stored in."""
    if not torch.isfinite(scales).all():
        raise NumericError(f"{name}: its weights are too large for scales in {scales.dtype}: use a wider dtype")

"""The grid of a matrix (see `kernels.reference.grid`), and what its weights have to be so that there is one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from warpbus.errors import NumericError
from warpbus.kernels.reference import grid
from warpbus.kernels.reference.gptq import SINGLE_THREAD_WEIGHTS
from warpbus.kernels.reference.grid import SLICE_WEIGHTS, Grid, fit, search, slices
from warpbus.qtensor import Scheme

__all__ = [
    "SLICE_WEIGHTS",
    "Grid",
    "check_scales",
    "check_weight",
    "column_threads",
    "fit",
    "nearest",
    "search",
    "slices",
]


def nearest(weight: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme) -> Tensor:
    """The codes nearest to float32 weights, as float32 integers; the arguments broadcast."""
    return grid.nearest(weight, scale, zero, scheme.max_code)


@contextmanager
def column_threads(columns: Tensor, block: int) -> Iterator[None]:
    """Within it, a loop over the columns `[in, out]` of a small matrix on the CPU runs in one thread.

    Its thousands of tiny operations gain nothing from a second thread, and where something else keeps a core busy,
    each of them would wait until that thread is scheduled: minutes instead of seconds.
    """
    threads = torch.get_num_threads()
    small = columns.device.type == "cpu" and columns.shape[1] * block < SINGLE_THREAD_WEIGHTS
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if small:
            torch.set_num_threads(threads)


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

"""How precisely a GPU multiplies the matrices of a solve."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Within it a GPU multiplies float32 matrices by their first 10 bits (TF32), with sums in float32.

    What these products decide is to which of two codes a weight is rounded: an error of a thousandth of a step costs
    nothing there, and the tensor cores are ten times as fast. Factors and triangular systems are for full precision.
    """
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

"""Random inputs. Zeros would draw less power than what a model multiplies, and run faster for it."""

import torch
from torch import Tensor


def normal(rows: int, columns: int, device: torch.device, dtype: torch.dtype, std: float = 1.0) -> Tensor:
    """A matrix of normal numbers. Activations have a deviation of 1, a weight with `in` columns one of in**-0.5, so
    that products are about normal again."""
    return torch.randn(rows, columns, device=device, dtype=dtype).mul_(std)


def dtype_name(dtype: torch.dtype) -> str:
    """As flags and records have it."""
    return str(dtype).removeprefix("torch.")

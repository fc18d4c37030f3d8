"""The 4-bit floating-point numbers of NVFP4 and MXFP4 (e2m1): a sign, two bits of exponent, one of mantissa.

A code is the sign in bit 3 and one of eight magnitudes: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
"""

from itertools import pairwise

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = MAGNITUDES[-1]
_VALUES = (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES))
_BOUNDS = tuple((low + high) / 2 for low, high in pairwise(MAGNITUDES))


def fp4_values(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of codes 0 to 15, of any shape; exact in `dtype`."""
    return torch.tensor(_VALUES, dtype=dtype, device=codes.device)[codes.long()]


def fp4_codes(numbers: Tensor) -> Tensor:
    """The nearest codes, uint8, to floating numbers of any shape; beyond 6 the nearest is 6, ties the smaller."""
    bounds = torch.tensor(_BOUNDS, dtype=numbers.dtype, device=numbers.device)
    magnitudes = torch.bucketize(numbers.abs().contiguous(), bounds).to(torch.uint8)
    return magnitudes | (numbers < 0).to(torch.uint8) << 3

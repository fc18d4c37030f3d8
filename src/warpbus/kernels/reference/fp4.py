"""Rounding to NVFP4 and MXFP4: a scale per group of 16 or 32 weights, and the nearest 4-bit numbers.

A scale has the numbers of the format: e4m3 times a power of two, which is four significant bits, or a power of two.
"""

import torch
from torch import Tensor

from warpbus.kernels.reference.grid import slices
from warpbus.qtensor import QTensor, Scheme, pack, packed_words
from warpbus.qtensor.fp4 import LARGEST, fp4_codes, fp4_values

# The divisors of the largest weight of a group: 6 uses the whole range, smaller divisors clip nothing, larger ones
# clip the largest weight.
_DIVISORS = (LARGEST, 5.5, 5.0, 4.5, 4.0, 6.5, 7.0, 7.5, 8.0)
_E4M3_BITS = 16.0  # a mantissa from 0.5 to 1 is a multiple of 1/16
_SMALLEST = 2.0**-100


def fp4_scales(groups: Tensor, scheme: Scheme, importance: Tensor | None = None) -> Tensor:
    """The scales that round groups of weights with the least weighted squared error, out of several.

    Args:
        groups: float32 `[rows, groups, columns of a group]`, finite.
        scheme: w4a16-nvfp4 or w4a16-mxfp4.
        importance: float32 `[groups, columns of a group]`, what a squared error in a column costs.

    Returns:
        float32 `[rows, groups]`, positive; 1 for groups of zeros.
    """
    largest = groups.abs().amax(-1)
    best = torch.ones_like(largest)
    least = torch.full_like(largest, torch.inf)
    for divisor in _DIVISORS:
        scales = _rounded(largest / divisor, scheme)
        numbers = fp4_values(fp4_codes(groups / scales.unsqueeze(-1)), torch.float32)
        squared = (numbers * scales.unsqueeze(-1) - groups).square()
        error = (squared if importance is None else squared * importance).sum(-1)
        better = error < least
        best, least = torch.where(better, scales, best), torch.where(better, error, least)
    return torch.where(largest == 0, torch.ones_like(best), best)


def round_to_fp4(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> QTensor:
    """Round a matrix `[out, in]` to nearest; arguments as of `ops.rounding.round_to_nearest`. Scales are float32."""
    rows, columns = weight.shape
    count = scheme.groups(columns)
    words = torch.empty(rows, packed_words(columns, scheme.bits), dtype=torch.int32, device=weight.device)
    scales = torch.empty(rows, count, dtype=torch.float32, device=weight.device)
    costs = None if importance is None else importance.float().view(count, -1)
    for part in slices(weight):
        groups = weight[part].float().unflatten(1, (count, -1))
        scales[part] = fp4_scales(groups, scheme, costs)
        words[part] = pack(fp4_codes(groups / scales[part].unsqueeze(-1)).flatten(1), scheme.bits)
    return QTensor(scheme, words, scales, None, (rows, columns))


def _rounded(scales: Tensor, scheme: Scheme) -> Tensor:
    """The nearest scales that the format has."""
    if scheme.element == "mxfp4":
        return torch.exp2(torch.log2(scales.clamp(min=_SMALLEST)).round())
    mantissa, exponent = torch.frexp(scales.clamp(min=_SMALLEST))
    return torch.ldexp((mantissa * _E4M3_BITS).round() / _E4M3_BITS, exponent)

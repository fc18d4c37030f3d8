"""The grid that the weights of a group are rounded to: a scale, and where the scheme has one a zero point.

Where a symmetric grid lies. Its codes run from -2^(b-1) to 2^(b-1) - 1, so one side reaches a step further than the
other. `fit` puts the group's largest weight exactly on that longer side: scale = -extreme / 2^(b-1), negative where
the extreme is positive. On normal weights in groups of 128 that leaves 9 % less root-mean-square error than
absmax / (2^(b-1) - 1/2) at 3 bits and 5 % less at 4 bits (12 % against absmax / (2^(b-1) - 1)), and a negative scale
costs the reader nothing.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from warpbus.qtensor import Scheme

# Matrices are worked on in slices of rows of about so many weights: enough to keep the device busy, while what is held
# in float32 at a time stays small (a GPU spends most of a small operation on launching it).
SLICE_WEIGHTS = {"cpu": 2**18, "cuda": 2**25}

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The greatest value of each type of 8 bits. int8 goes to -128, but a symmetric range keeps the signs alike."""

# Shares of the full range that `search` tries, then those about the best of them. Beyond 1 for the sign that `fit` does
# not choose: its shorter side has to reach the extreme. csrc/gptq/clip_search.cu has the same.
COARSE_FACTORS = (1.14, 1.06, 0.98, 0.9, 0.82, 0.74, 0.66, 0.58, 0.5, 0.42, 0.34)
FINE_STEPS = (0.04, -0.04, 0.02, -0.02)
# What goes with each coarse share: its sign and a shift of the zero point. The zero point of a share is nearly that of
# the full range, which two outliers decide; with 2 bits, its neighbours are often better. With 3 bits they lower this
# error too, by 5 %, but not that of the model's outputs: more weights are cut off, all on one side of a group.
_SYMMETRIC_TRIALS = ((1.0, 0.0), (-1.0, 0.0))
_ASYMMETRIC_TRIALS = ((1.0, 0.0),)
_TRIALS_OF_2_BITS = ((1.0, 0.0), (1.0, 1.0), (1.0, -1.0))
# `search` tries all of them at once on fewer weights than that: starting an operation takes longer there than the
# operation. More weights leave the processor's cache.
_FEW_WEIGHTS = 2**13


class Grid(NamedTuple):
    """Scales and zero points, both float32 `[..., groups]`; the scales are exact in the dtype they are stored in."""

    scales: Tensor
    zeros: Tensor

    def codes(self, groups: Tensor, scheme: Scheme) -> Tensor:
        """The nearest codes to float32 `[..., groups, columns of a group]`: float32 integers of the same shape."""
        return nearest(groups, self.scales.unsqueeze(-1), self.zeros.unsqueeze(-1), scheme.max_code)

    def error(self, groups: Tensor, scheme: Scheme, importance: Tensor | None) -> Tensor:
        """The squared error `[..., groups]` of rounding, each column's times its `importance` `[groups, columns]`."""
        rounded = self.codes(groups, scheme).sub_(self.zeros.unsqueeze(-1)).mul_(self.scales.unsqueeze(-1))
        squared = rounded.sub_(groups).square_()
        return (squared if importance is None else squared.mul_(importance)).sum(-1)


def nearest(weight: Tensor, scale: Tensor, zero: Tensor, max_code: int) -> Tensor:
    """The codes 0 to `max_code` nearest to float32 weights, as float32 integers; the tensors broadcast."""
    return (weight / scale).round_().add_(zero).clamp_(0, max_code)


def nearest_values(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of int8 or float8_e4m3fn nearest to float32 numbers, which are cut off at `LARGEST`; halves to even.

    `scaled` is overwritten.
    """
    scaled.clamp_(-LARGEST[dtype], LARGEST[dtype])
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype)


def fit(groups: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> Grid:
    """The grid over the whole range of each group.

    Args:
        groups: float32 `[rows, groups, columns of a group]`.
        scheme: symmetric: see this file's head; asymmetric: from the least to the greatest weight, zero included.
        scale_dtype: the dtype to which the scales are rounded. A scale that becomes zero there, as that of an all-zero
            group does, is taken as 1, so that the group's codes mean zero.
    """
    return _grid(_limits(groups, scheme), 1.0, 0.0, scheme, scale_dtype)


def search(groups: Tensor, scheme: Scheme, scale_dtype: torch.dtype, importance: Tensor) -> Grid:
    """The grid that rounds each group with the least weighted error, out of `fit`'s and clipped ones.

    Tried are shares of the full range: for a symmetric scheme with the longer side on either end, for an asymmetric
    one with the zero point of the full range, and at 2 bits with its neighbours.

    Args:
        groups, scheme, scale_dtype: as in `fit`.
        importance: float32 `[groups, columns of a group]`, what a squared error in a column costs.
    """
    limits = _limits(groups, scheme)
    best = _grid(limits, 1.0, 0.0, scheme, scale_dtype)
    least = best.error(groups, scheme, importance)
    factor, shift = torch.ones_like(least), torch.zeros_like(least)

    def attempt(trial: Tensor, shifted: Tensor) -> None:
        """Take factors and shifts `[rows, groups]`, or of `[trials, 1, 1]` the first of the best, where better."""
        nonlocal best, least, factor, shift
        candidate = _grid(limits, trial, shifted, scheme, scale_dtype)
        error = candidate.error(groups, scheme, importance)
        if trial.dim() == 3:
            error, at = torch.where(error.isnan(), torch.inf, error).min(0)
            trial, shifted = trial[at, 0, 0], shifted[at, 0, 0]
            candidate = Grid(*(each.gather(0, at[None])[0] for each in candidate))
        better = error < least
        least = torch.where(better, error, least)
        factor, shift = torch.where(better, trial, factor), torch.where(better, shifted, shift)
        best = Grid(*(torch.where(better, new, old) for new, old in zip(candidate, best, strict=True)))

    asymmetric = _TRIALS_OF_2_BITS if scheme.bits == 2 else _ASYMMETRIC_TRIALS
    kinds = _SYMMETRIC_TRIALS if scheme.symmetric else asymmetric
    coarse = groups.new_tensor([(sign * share, moved) for share in COARSE_FACTORS for sign, moved in kinds])
    shares, shifts = coarse.T[:, :, None, None]
    if groups.numel() < _FEW_WEIGHTS:
        attempt(shares, shifts)
    else:
        for each in zip(shares, shifts, strict=True):
            attempt(*each)
    for step in FINE_STEPS:
        attempt(factor + step * factor.sign(), shift)
    return best


def slices(weight: Tensor) -> Iterator[slice]:
    """Slices that cover the rows of a matrix, each of about `SLICE_WEIGHTS` weights."""
    rows, columns = weight.shape
    height = max(1, SLICE_WEIGHTS.get(weight.device.type, 2**18) // columns)
    return (slice(start, min(start + height, rows)) for start in range(0, rows, height))


def _limits(groups: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """The meaning of code 0 and the span of all codes, over the full range; each `[rows, groups]`."""
    if scheme.symmetric:
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
        return extreme, extreme * (-scheme.max_code / scheme.middle_code)
    low = groups.amin(-1).clamp_(max=0)
    return low, groups.amax(-1).clamp_(min=0) - low


def _grid(
    limits: tuple[Tensor, Tensor],
    factor: Tensor | float,
    shift: Tensor | float,
    scheme: Scheme,
    scale_dtype: torch.dtype,
) -> Grid:
    """The grid over a share of the range: the scales as they are stored, then the zero points that go with them.

    A shift is added to an asymmetric grid's zero points.
    """
    low, span = limits
    stored = (span * factor / scheme.max_code).to(scale_dtype).float()
    scales = torch.where(stored == 0, torch.ones_like(stored), stored)
    if scheme.symmetric:
        return Grid(scales, torch.full_like(scales, scheme.middle_code))
    return Grid(scales, (-low * factor / scales).round_().add_(shift).clamp_(0, scheme.max_code))

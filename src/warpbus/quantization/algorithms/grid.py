"""The grid that the weights of a group are rounded to: a scale, and where the scheme has one a zero point.

Where a symmetric grid lies. Its codes run from -2^(b-1) to 2^(b-1) - 1, so one side reaches a step further than the
other. `fit` puts the group's largest weight exactly on that longer side: scale = -extreme / 2^(b-1), negative where
the extreme is positive. On normal weights in groups of 128 that leaves 9 % less root-mean-square error than
absmax / (2^(b-1) - 1/2) at 3 bits and 5 % less at 4 bits (12 % against absmax / (2^(b-1) - 1)), and a negative scale
costs the reader nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.errors import NumericError
from warpbus.qtensor import Scheme

# Matrices are worked on in slices of rows of about so many weights, which bounds what is held in float32 at a time.
SLICE_WEIGHTS = 2**21

# Shares of the full range that `search` tries. Beyond 1 for the sign that `fit` does not choose: its shorter side
# has to reach the extreme.
FACTORS = tuple(step / 50 for step in range(57, 14, -1))


@dataclass(frozen=True)
class Grid:
    """Scales and zero points, both float32 `[..., groups]`; the scales are exact in the dtype they are stored in."""

    scales: Tensor
    zeros: Tensor

    def codes(self, groups: Tensor, scheme: Scheme) -> Tensor:
        """The nearest codes to float32 `[..., groups, columns of a group]`: float32 integers of the same shape."""
        return nearest(groups, self.scales.unsqueeze(-1), self.zeros.unsqueeze(-1), scheme)

    def error(self, groups: Tensor, scheme: Scheme, importance: Tensor | None) -> Tensor:
        """The squared error `[..., groups]` of rounding, each column's times its `importance` `[groups, columns]`."""
        rounded = self.codes(groups, scheme).sub_(self.zeros.unsqueeze(-1)).mul_(self.scales.unsqueeze(-1))
        squared = rounded.sub_(groups).square_()
        return (squared if importance is None else squared.mul_(importance)).sum(-1)


def nearest(weight: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme) -> Tensor:
    """The codes nearest to float32 weights, as float32 integers; the arguments broadcast."""
    return (weight / scale).round_().add_(zero).clamp_(0, scheme.max_code)


def fit(groups: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> Grid:
    """The grid over the whole range of each group.

    Args:
        groups: float32 `[rows, groups, columns of a group]`.
        scheme: symmetric: see this file's head; asymmetric: from the least to the greatest weight, zero included.
        scale_dtype: what the scales are rounded to. A scale that becomes zero there, as that of an all-zero group
            does, is taken as 1, so that the group's codes mean zero.
    """
    if scheme.symmetric:
        return _grid(_extreme(groups).div_(-scheme.middle_code), None, scheme, scale_dtype)
    low, high = _range(groups)
    return _grid((high - low).div_(scheme.max_code), low, scheme, scale_dtype)


def search(groups: Tensor, scheme: Scheme, scale_dtype: torch.dtype, importance: Tensor) -> Grid:
    """The grid that rounds each group with the least weighted error, out of `fit`'s and clipped ones.

    Tried are `FACTORS` of the full range: for a symmetric scheme with the longer side up and down, for an asymmetric
    one about the same centre.

    Args:
        groups, scheme, scale_dtype: as in `fit`.
        importance: float32 `[groups, columns of a group]`, what a squared error in a column costs.
    """
    best = fit(groups, scheme, scale_dtype)
    least = best.error(groups, scheme, importance)
    for candidate in _candidates(groups, scheme, scale_dtype):
        error = candidate.error(groups, scheme, importance)
        better = error < least
        least = torch.where(better, error, least)
        best = Grid(
            torch.where(better, candidate.scales, best.scales), torch.where(better, candidate.zeros, best.zeros)
        )
    return best


def slices(rows: int, columns: int) -> Iterator[slice]:
    """Slices that cover `rows`, each of about `SLICE_WEIGHTS` weights."""
    height = max(1, SLICE_WEIGHTS // columns)
    return (slice(start, min(start + height, rows)) for start in range(0, rows, height))


def _candidates(groups: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> Iterator[Grid]:
    if scheme.symmetric:
        full = _extreme(groups).div_(-scheme.middle_code)
        for factor in FACTORS:
            yield _grid(full * -factor, None, scheme, scale_dtype)
            yield _grid(full * factor, None, scheme, scale_dtype)
        return
    low, high = _range(groups)
    for factor in FACTORS:
        yield _grid((high - low).mul_(factor / scheme.max_code), low * factor, scheme, scale_dtype)


def _extreme(groups: Tensor) -> Tensor:
    """The weight of the largest magnitude in each group, with its sign."""
    return groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)


def _range(groups: Tensor) -> tuple[Tensor, Tensor]:
    return groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)


def _grid(scales: Tensor, low: Tensor | None, scheme: Scheme, scale_dtype: torch.dtype) -> Grid:
    """Round the scales as they are stored, then place the zero point so that the range begins at `low`."""
    stored = scales.to(scale_dtype).float()
    stored = torch.where(stored == 0, torch.ones_like(stored), stored)
    if low is None:
        return Grid(stored, torch.full_like(stored, scheme.middle_code))
    return Grid(stored, (-low / stored).round_().clamp_(0, scheme.max_code))


def check_weight(weight: Tensor, name: str) -> None:
    """Raises NumericError, naming the matrix, if a weight is NaN or infinite."""
    # A sum is NaN or infinite if a part is; it may also overflow, so only then look closely.
    if not torch.isfinite(weight.sum(dtype=torch.float32)) and not torch.isfinite(weight).all():
        count = int((~torch.isfinite(weight)).sum())
        raise NumericError(f"{name}: {count} of its weights are NaN or infinite: use an undamaged checkpoint")

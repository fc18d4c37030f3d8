"""Coordinate descent on a quantized matrix (as in QuantEase; Behdin et al., 2023), with its scales fitted anew.

GPTQ decides each column once and never looks back. Here every column is rounded again to what is best for all others
as they are, and each group's scale is set to its least-squares optimum; both only ever lower tr(dW H dW^T). On
glm-poet three sweeps take 8 % off that error at 3 bits and 6 % at 4 bits; two of them nearly as much.
"""

import torch
from torch import Tensor

from warpbus.kernels.ops.gptq import LARGEST_BLOCK, fit_scales, round_again
from warpbus.quantization.algorithms.factored import FactoredHessian
from warpbus.quantization.algorithms.precision import add_product, narrow

SPAN = 4 * LARGEST_BLOCK
"""Columns whose changes are gathered before they are carried over to all others: fewer passes over the others."""


def descend(
    gradient: Tensor,
    factors: FactoredHessian,
    centred: Tensor,
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor,
    members: Tensor,
    *,
    max_code: int,
    scale_dtype: torch.dtype,
    sweeps: int,
) -> None:
    """Improve codes and scales in sweeps over all columns; `gradient`, `centred` and `scales` are changed in place.

    Args:
        gradient: float32 `[parts, in, rows]`: H (W - Q), which is kept up to date.
        factors: the Hessian, in whose order all columns are.
        centred: float32 `[parts, in, rows]`: the codes less their zero points.
        scales, zeros: float32 `[parts, groups, rows]`.
        groups: int32 `[in]`, the group of each column.
        members: int64 `[groups, columns of a group]`: the columns of each group.
        max_code: of the scheme.
        scale_dtype: what the scales are rounded to.
        sweeps: how many times each column is visited.
    """
    hessian, narrowed, size = factors.hessian, factors.narrow_hessian, members.shape[1]
    parts, count, rows = gradient.shape
    at_once = max(1, SPAN // size)  # groups
    carried = gradient.new_empty((parts, max(at_once * size, SPAN), rows), dtype=narrowed.dtype)
    for _ in range(sweeps):
        for first in range(0, len(members), at_once):
            columns = members[first : first + at_once].flatten()
            within = hessian[columns[:, None], columns]
            behind = narrow(within[:, size:])  # the first block's rest, of which the others have a part
            near, changes = gradient.new_empty(parts, len(columns), rows), carried[:, : len(columns)]
            for part, own in zip(gradient, near, strict=True):
                torch.index_select(part, 0, columns, out=own)
            for start in range(0, len(columns), size):
                block, rest = slice(start, start + size), slice(start + size, None)
                scale, own = scales[:, first + start // size], changes[:, block]
                fit_scales(
                    near[:, block], centred, columns[block], within[block, block], scale, scale_dtype, changes=own
                )
                carry_over(near[:, rest], behind[block, start:], own, sign=-1)
            carry_over(gradient, narrowed[columns], changes, sign=-1)
        for first in range(0, count, SPAN):
            span = slice(first, first + SPAN)
            within, narrow_within = hessian[span, span], narrowed[span, span]
            near, codes, changes = gradient[:, span].clone(), centred[:, span], carried[:, : len(within)]
            for start in range(0, len(within), LARGEST_BLOCK):
                block, rest = slice(start, start + LARGEST_BLOCK), slice(start + LARGEST_BLOCK, None)
                grid, own = (scales, zeros, groups[span][block]), changes[:, block]
                round_again(near[:, block], within[block, block], codes[:, block], *grid, max_code, changes=own)
                carry_over(near[:, rest], narrow_within[block, rest], own, sign=-1)
            carry_over(gradient, narrowed[span], changes, sign=-1)


def carry_over(target: Tensor, rows: Tensor, change: Tensor, *, sign: float) -> None:
    """Add `sign` times R^T C to float32 T, part by part.

    Args:
        target: T, `[parts, in, rows]`.
        rows: R, `[columns, in]`, narrow: see `precision`.
        change: C, `[parts, columns, rows]`, narrow.
    """
    if target.shape[1] == 0:
        return
    # One product a part, whatever the number of parts: so the bits do not depend on how many there are.
    for part, own in zip(target, change, strict=True):
        add_product(part, rows.T, own, alpha=sign)

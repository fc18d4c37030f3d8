"""Coordinate descent on a quantized matrix (as in QuantEase; Behdin et al., 2023), with its scales fitted anew.

GPTQ decides each column once and never looks back. Here every column is rounded again to what is best for all others
as they are, and each group's scale is set to its least-squares optimum; both only ever lower tr(dW H dW^T). On
glm-poet three sweeps take 8 % off that error at 3 bits and 6 % at 4 bits, and perplexity follows.
"""

import torch
from torch import Tensor

from warpbus.kernels.ops.gptq import LARGEST_BLOCK, fit_scales, round_again
from warpbus.qtensor import Scheme


def descend(
    gradient: Tensor,
    hessian: Tensor,
    centred: Tensor,
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    sweeps: int,
) -> None:
    """Improve codes and scales in sweeps over all columns; `gradient`, `centred` and `scales` are changed in place.

    Args:
        gradient: float32 `[parts, in, rows]`: H (W - Q), which is kept up to date.
        hessian: float32 `[in, in]`, positive definite, in the same order of columns.
        centred: float32 `[parts, in, rows]`: the codes less their zero points.
        scales, zeros: float32 `[parts, groups, rows]`.
        groups: int32 `[in]`, the group of each column.
        scheme: bits, symmetric or not.
        scale_dtype: what the scales are rounded to.
        sweeps: how many times each column is visited.
    """
    members = [(groups == group).nonzero()[:, 0] for group in range(scales.shape[1])]
    for _ in range(sweeps):
        for group, columns in enumerate(members):
            rows = hessian[columns]
            delta = fit_scales(gradient, columns, centred, rows[:, columns], scales[:, group], scale_dtype)
            _carry_over(gradient, rows, delta)
        for start in range(0, len(hessian), LARGEST_BLOCK):
            block = slice(start, start + LARGEST_BLOCK)
            rows = hessian[block]
            delta = round_again(
                gradient[:, block], rows[:, block], centred[:, block], scales, zeros, groups[block], scheme.max_code
            )
            _carry_over(gradient, rows, delta)


def _carry_over(gradient: Tensor, rows: Tensor, delta: Tensor) -> None:
    """What a change of some columns `[parts, columns, rows]` does to the gradient of all; `rows` are theirs of H."""
    # One product a part, whatever the number of parts: so the bits do not depend on how many there are.
    for part, change in zip(gradient, delta, strict=True):
        part.addmm_(rows.T, change, alpha=-1)

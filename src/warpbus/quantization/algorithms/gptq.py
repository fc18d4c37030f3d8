"""GPTQ (Frantar et al., 2022): round one column after the other and let the columns to come make up for the error.

The error that counts is tr(dW H dW^T), H = X^T X of the layer's inputs X. Columns go in order of falling diagonal of
H ("activation order"), while the groups stay those of the original columns and their grids are chosen beforehand, so
the result needs no index of the columns.
"""

import torch
from torch import Tensor

from warpbus.errors import NumericError
from warpbus.qtensor import QTensor, Scheme
from warpbus.quantization.algorithms.descent import descend
from warpbus.quantization.algorithms.grid import (
    Grid,
    check_scales,
    check_weight,
    column_threads,
    fit,
    nearest,
    search,
    slices,
)

# Sweeps of coordinate descent after the columns are rounded: on glm-poet more of them gain little.
SWEEPS = 3

# Columns whose errors are gathered before they are carried over to all columns that follow.
BLOCK = 128


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    *,
    scale_dtype: torch.dtype,
    damping: float = 0.01,
    activation_order: bool = True,
    clip_search: bool = True,
    sweeps: int = SWEEPS,
    name: str = "weight",
) -> QTensor:
    """Quantize a matrix for the inputs that it is going to meet.

    Args:
        weight: floating `[out, in]`.
        hessian: float32 `[in, in]`, the second moments X^T X of its inputs, in any unit. A column that never had an
            input (diagonal 0) is rounded to nearest.
        scheme: bits, groups, symmetric or not.
        scale_dtype: dtype of the scales; they are rounded to it before the codes are chosen.
        damping: this share of the mean diagonal is added to the diagonal.
        activation_order: columns with the largest diagonal first; otherwise as they stand.
        clip_search: choose each group's range by its error; otherwise the full range. A column counts as much as an
            error in it costs after all others have made up for it, 1 / diag(H^-1); on glm-poet that beats diag(H).
        sweeps: of coordinate descent afterwards (see `descent`); 0 leaves the result of GPTQ.
        name: the matrix, for messages.

    Returns:
        the quantized matrix on the device of `weight`.

    Raises:
        SchemeError: if the group size does not divide `in`.
        NumericError: if there is NaN or infinity in either matrix, or the Hessian is not positive definite.
    """
    columns = weight.shape[1]
    count = scheme.groups(columns, name)
    check_weight(weight, name)
    hessian, diagonal = damped(hessian, damping, name)
    order = torch.argsort(diagonal, descending=True, stable=True) if activation_order else torch.arange(columns)
    order = order.to(weight.device)
    hessian = hessian[order][:, order]
    factor = inverse_factor(hessian, name)
    importance = torch.empty_like(diagonal)
    importance[order] = factor.square().sum(0).reciprocal_()
    grid = _choose_grid(weight, scheme, scale_dtype, count, importance if clip_search else None)
    check_scales(grid.scales.to(scale_dtype), name)
    groups = order // (columns // count)
    turned = weight.float().T[order]
    with column_threads(turned, BLOCK):
        ordered = _round_columns(turned.clone(), factor, grid, groups.tolist(), scheme)
        del factor
        if sweeps:
            ordered, grid = descend(turned, hessian, ordered, grid, groups, scheme, scale_dtype, sweeps)
    codes = torch.empty_like(ordered)
    codes[order] = ordered
    zeros = None if scheme.symmetric else grid.zeros
    return QTensor.from_codes(scheme, codes.T.contiguous(), grid.scales.to(scale_dtype), zeros)


def damped(hessian: Tensor, damping: float, name: str) -> tuple[Tensor, Tensor]:
    """The damped Hessian, a copy, and its diagonal before damping with 0 replaced where there was no input."""
    hessian = hessian.float().clone()
    if not torch.isfinite(hessian).all():
        raise NumericError(f"{name}: its Hessian has NaN or infinity: look for NaN in the checkpoint's weights")
    diagonal = hessian.diagonal()
    live = diagonal > 0
    mean = diagonal[live].mean() if bool(live.any()) else torch.ones((), device=hessian.device)
    diagonal.copy_(torch.where(diagonal == 0, mean, diagonal))
    undamped = diagonal.clone()
    diagonal.add_(damping * mean)
    return hessian, undamped


def inverse_factor(hessian: Tensor, name: str) -> Tensor:
    """The upper triangular U with U^T U = H^-1.

    With the order of rows and columns reversed, H = L L^T gives U as the reversed inverse of L: one factorization
    and one triangular inverse, where inverting H first would lose half of the digits.
    """
    lower, info = torch.linalg.cholesky_ex(hessian.flip(0, 1))
    if int(info) != 0:
        raise NumericError(
            f"{name}: its Hessian is not positive definite: raise --damping (0.1, say), or give more calibration data"
        )
    identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1).contiguous()


def _choose_grid(
    weight: Tensor, scheme: Scheme, scale_dtype: torch.dtype, count: int, importance: Tensor | None
) -> Grid:
    grids = []
    for part in slices(weight):
        groups = weight[part].float().unflatten(1, (count, -1))
        if importance is None:
            grids.append(fit(groups, scheme, scale_dtype))
        else:
            grids.append(search(groups, scheme, scale_dtype, importance.unflatten(0, (count, -1))))
    return Grid(torch.cat([grid.scales for grid in grids]), torch.cat([grid.zeros for grid in grids]))


def _round_columns(columns: Tensor, factor: Tensor, grid: Grid, groups: list[int], scheme: Scheme) -> Tensor:
    """The codes of all columns, in the order they are given.

    Args:
        columns: float32 `[in, out]`, a column of the matrix a row; overwritten.
        factor: see `inverse_factor`, in the same order.
        grid: of all groups, `[out, groups]`.
        groups: the group of each column.

    Returns:
        uint8 `[in, out]`.
    """
    scales, zeros = grid.scales.T.contiguous(), grid.zeros.T.contiguous()
    codes = torch.empty(columns.shape, dtype=torch.uint8, device=columns.device)
    for start in range(0, len(columns), BLOCK):
        stop = min(start + BLOCK, len(columns))
        block, corner = columns[start:stop], factor[start:stop, start:stop]
        errors = torch.empty_like(block)
        for index in range(stop - start):
            group = groups[start + index]
            code = nearest(block[index], scales[group], zeros[group], scheme)
            codes[start + index] = code
            rounded = code.sub_(zeros[group]).mul_(scales[group])
            torch.div(block[index] - rounded, corner[index, index], out=errors[index])
            block[index + 1 :].addr_(corner[index, index + 1 :], errors[index], alpha=-1)
        columns[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return codes

"""GPTQ to paths through a trellis: tiles of 16 columns are rounded together, each to make up for those before it.

With H = U D U^T in blocks of 16 columns (QTIP, Tseng et al., 2024, calls it block LDLQ) the target of a tile includes
the errors of earlier tiles, as that of a column does in `gptq`. The errors of a tile's own columns are taken as equally
expensive; after the rotation they nearly are.
Columns and Hessian are rotated (`qtensor.trellis`), so they stay in their order. Coordinate descent is left out: on
glm-poet a sweep took 1 % off the error on the calibration data, and nothing off the KL on other data.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from warpbus.kernels.ops.trellis import trellis_search
from warpbus.qtensor import QTensor, Scheme
from warpbus.qtensor.qtensor import check_trellis
from warpbus.qtensor.trellis import (
    TILE,
    code_deviation,
    code_table,
    from_tiles,
    pack_symbols,
    rotate,
    states_of,
    to_tiles,
)
from warpbus.quantization.algorithms.factored import FactoredHessian, corrected_target, factored_loss
from warpbus.quantization.algorithms.linear_algebra import narrow, product
from warpbus.quantization.algorithms.weights import check_scales

_SPAN = 128
"""Columns whose errors reach the columns behind them in one product."""

_STRETCH = {2: 1.05, 3: 1.15}
"""By bits, how much wider than the weights of a row the numbers of the trellis are while it is searched."""


def rotated_moments(moments: Tensor) -> Tensor:
    """The moments of rotated inputs, float32 `[in, in]`; also of a drift."""
    return rotate(rotate(moments).T).T.contiguous()


def trellis_matrices(
    weight: Tensor,
    hessians: Sequence[Tensor],
    scheme: Scheme,
    *,
    scale_dtype: torch.dtype,
    drift: Tensor | None,
    names: Sequence[str],
) -> list[tuple[QTensor, Tensor]]:
    """Quantize some rows of several matrices; arguments and result as of `gptq.gptq_matrices`.

    Args:
        hessians: of rotated inputs, in the order of the columns.
        drift: of rotated inputs.
    """
    _, parts, height, size = weight.shape
    found = []
    for index, (own, factor) in enumerate(zip(weight, FactoredHessian.unstack(hessians), strict=True)):
        check_trellis((height, size), names[index], scheme)
        upper = _block_factor(factor.upper)
        words, scales, losses = [], [], []
        for part in own:
            columns = rotate(part).T.contiguous()
            if drift is not None:
                columns = corrected_target(columns, factor, narrow(drift[index]))
            packed, scale, errors = _round(columns, factor, upper, scheme, scale_dtype)
            words.append(packed)
            scales.append(scale)
            losses.append(torch.stack([factored_loss(each, factor) for each in (errors, columns)]))
        check_scales([torch.cat(scales)], [names[index]])
        quantized = QTensor(scheme, torch.cat(words), torch.cat(scales), None, (parts * height, size))
        found.append((quantized, torch.stack(losses)))
    return found


def _block_factor(upper: Tensor) -> Tensor:
    """U of H = U D U^T with D block diagonal and the identity in U's diagonal blocks, from the unit triangular U."""
    size = len(upper)
    corners = torch.stack([upper[start : start + TILE, start : start + TILE] for start in range(0, size, TILE)])
    identity = torch.eye(TILE, device=upper.device).expand_as(corners)
    inverses = torch.linalg.solve_triangular(corners, identity, upper=True, unitriangular=True)
    return torch.einsum("rbi,bij->rbj", upper.view(size, -1, TILE), inverses).reshape(size, size)


def _round(
    columns: Tensor, factor: FactoredHessian, upper: Tensor, scheme: Scheme, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Round tiles of columns one after the other.

    Args:
        columns: float32 `[in, rows]`, rotated.
        upper: see `_block_factor`.

    Returns:
        the words, int32 `[rows, in * bits / 32]`, the scales `[rows, 1]`, and the errors, float32 `[in, rows]`.
    """
    size, rows = columns.shape
    scale = columns.square().mean(0).sqrt() * (_STRETCH[scheme.bits] / code_deviation())
    live = scale.view(-1, TILE).amax(1) > 0  # of the others, which are zeros or fill up, any path will do
    unit = torch.where(scale > 0, 1 / scale, 0.0)
    target = columns * unit
    wanted, numbers = target.clone(), torch.zeros_like(target)
    symbols = torch.zeros(rows // TILE, size // TILE, TILE * TILE // 2, dtype=torch.uint8, device=columns.device)
    for start in range(0, size, _SPAN):
        stop = min(start + _SPAN, size)
        for first in range(start, stop, TILE):
            own = slice(first, first + TILE)
            found = trellis_search(to_tiles(wanted[own].T)[live].contiguous(), scheme.bits)
            symbols[live, first // TILE] = found
            read = code_table(found.device)[states_of(found, scheme.bits)].flatten(1)
            numbers[own] = numbers[own].masked_scatter(
                live.repeat_interleave(TILE).expand(TILE, -1), from_tiles(read, TILE).T
            )
            rest = slice(first + TILE, stop)
            wanted[rest] += upper[own, rest].T @ (target[own] - numbers[own])
        if stop < size:
            errors = narrow(target[start:stop] - numbers[start:stop])
            wanted[stop:] += product(narrow(upper[start:stop, stop:]).T, errors)
    scales = _fitted(columns, numbers, factor).to(scale_dtype)
    packed = pack_symbols(symbols.flatten(0, 1), scheme.bits, size)
    return packed, scales[:, None], columns - numbers * scales.float()


def _fitted(columns: Tensor, numbers: Tensor, factor: FactoredHessian) -> Tensor:
    """The scale of each row with the least error: float32 `[rows]`, 0 for a row of zeros."""
    weighted = product(factor.narrow_hessian, narrow(numbers))
    against, own = (weighted * columns).sum(0), (weighted * numbers).sum(0)
    return torch.where(own > 0, against / own.clamp_min(torch.finfo(torch.float32).tiny), 0.0)

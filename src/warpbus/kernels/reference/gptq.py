"""The inner loops of GPTQ and of coordinate descent, in plain PyTorch: what the CPU runs, a column at a time.

`addcmul_` and not `addr_` carries a column's error on: it gives an element the same bits wherever it stands in a row,
so that a row's result does not depend on the rows beside it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from warpbus.kernels.reference.grid import nearest, search, slices
from warpbus.qtensor import Scheme

# Blocks of columns with fewer weights than that are worked on in one thread.
SINGLE_THREAD_WEIGHTS = 2**20


def round_columns(
    weight: Tensor,
    target: Tensor,
    corner: Tensor,
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor,
    max_code: int,
    centred: Tensor,
    errors: Tensor,
) -> None:
    """The codes of a block of columns and the errors they leave; see `ops.gptq.round_columns`."""
    wanted, corner = target.clone(), _per_part(corner, 3, len(weight))
    with column_threads(weight):
        for index, (scale, zero) in enumerate(_grids(scales, zeros, groups)):
            code = nearest(wanted[:, index], scale, zero, max_code).sub_(zero)
            centred[:, index] = code
            error = weight[:, index] - code.mul_(scale)
            errors[:, index] = error
            wanted[:, index + 1 :].addcmul_(corner[:, index, index + 1 :, None], error[:, None])


def round_again(
    gradient: Tensor,
    corner: Tensor,
    centred: Tensor,
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor,
    max_code: int,
    changes: Tensor,
) -> None:
    """The changes of a block of columns that are rounded anew; see `ops.gptq.round_again`."""
    pending, corner = gradient.clone(), _per_part(corner, 3, len(gradient))
    with column_threads(gradient):
        for index, (scale, zero) in enumerate(_grids(scales, zeros, groups)):
            column = centred[:, index]
            wanted = (column * scale).addcdiv_(pending[:, index], corner[:, index, index, None])
            rounded = nearest(wanted, scale, zero, max_code).sub_(zero)
            change = (rounded - column).mul_(scale)
            changes[:, index] = change
            column.copy_(rounded)
            pending[:, index + 1 :].addcmul_(corner[:, index, index + 1 :, None], change[:, None], value=-1)


def fit_scales(
    gradient: Tensor,
    centred: Tensor,
    members: Tensor,
    corner: Tensor,
    scales: Tensor,
    scale_dtype: torch.dtype,
    changes: Tensor,
) -> None:
    """The change of a group's weights by a better scale; see `ops.gptq.fit_scales`."""
    # A part at a time: then the sums of a part have the same bits whichever parts stand beside it.
    corners, listed = _per_part(corner, 3, len(gradient)), _per_part(members, 2, len(gradient))
    for part, (slopes, codes, scale, change) in enumerate(zip(gradient, centred, scales, changes, strict=True)):
        own = codes[listed[part]]
        slope = (own * slopes).sum(0)
        curvature = (own * (corners[part] @ own)).sum(0)
        wanted = scale + slope / curvature.clamp(min=torch.finfo(torch.float32).tiny)
        step = wanted.to(scale_dtype).float() - scale
        # Rounding to the stored dtype may lose more than the fit gains, and a scale of zero could not be divided by.
        better = (step * (step * curvature - 2 * slope) < 0) & (scale + step != 0) & step.isfinite()
        step = torch.where(better, step, torch.zeros_like(step))
        scale.add_(step)
        change.copy_(own * step)


def clip_search(
    weight: Tensor, importance: Tensor, group_size: int, bits: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scales and zero points of all groups; see `ops.gptq.clip_search`."""
    scheme = Scheme(bits, None, symmetric)
    costs = importance.unflatten(0, (-1, group_size))
    scales = weight.new_empty(len(weight), len(costs), dtype=torch.float32)
    zeros = torch.empty_like(scales)
    for part in slices(weight):
        scales[part], zeros[part] = search(weight[part].float().unflatten(1, costs.shape), scheme, scale_dtype, costs)
    return scales, zeros


def _per_part(tensor: Tensor, stacked: int, parts: int) -> Tensor:
    """The entry of the matrix of each part, `[parts, ...]`; `stacked`: axes of a tensor with an entry per matrix."""
    each = tensor if tensor.dim() == stacked else tensor[None]
    return each.repeat_interleave(parts // len(each), 0) if len(each) > 1 else each.expand(parts, *each.shape[1:])


def _grids(scales: Tensor, zeros: Tensor, groups: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The scales and zero points of each column in turn, both `[parts, rows]`."""
    if groups.dim() == 1 or len(groups) == 1:
        for group in groups.flatten().tolist():
            yield scales[:, group], zeros[:, group]
        return
    every = torch.arange(len(scales))
    for own in _per_part(groups, 2, len(scales)).long().T:
        yield scales[every, own], zeros[every, own]


@contextmanager
def column_threads(block: Tensor) -> Iterator[None]:
    """Within it, a loop over the columns of a small block `[parts, columns, rows]` on the CPU runs in one thread.

    Its tiny operations gain nothing from a second thread, and where something else keeps a core busy, each of them
    would wait until that thread is scheduled: minutes instead of seconds for a matrix.
    """
    threads = torch.get_num_threads()
    small = block.numel() < SINGLE_THREAD_WEIGHTS
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if small:
            torch.set_num_threads(threads)

"""How the shares of a group's ranks become one result."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from warpbus.pool.protocol.group_steps import Combination, ReduceStep

_COMBINE: dict[Combination, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def combine(step: ReduceStep, result: Tensor, shares: Sequence[Tensor]) -> None:
    """Combine shares in the order of their ranks, so that all ranks compute the same bits.

    Args:
        step: how, and of which dtype.
        result: uint8; it may overlap shares.
        shares: uint8, of the size of the result.
    """
    target, typed = result.view(step.dtype), [share.view(step.dtype) for share in shares]
    total = target if _directly(result, shares) else torch.empty_like(target)
    if len(typed) == 1:
        total.copy_(typed[0])
    else:
        _COMBINE[step.combination](typed[0], typed[1], out=total)
    for share in typed[2:]:
        _COMBINE[step.combination](total, share, out=total)
    if step.combination == "avg":
        total.div_(len(typed))
    if total is not target:
        target.copy_(total)


def _directly(result: Tensor, shares: Sequence[Tensor]) -> bool:
    """Whether the result can be written at once: what overlaps it is one of the first two shares, and is read
    element by element just before."""
    start, nbytes = result.data_ptr(), len(result)
    return all(
        abs(share.data_ptr() - start) >= nbytes or (share.data_ptr() == start and rank < 2)
        for rank, share in enumerate(shares)
    )

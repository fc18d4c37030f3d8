"""How the shares of a group's ranks become one result."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from warpbus.pool.protocol.group_steps import Combination, ReduceStep

_COMBINE: dict[Combination, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "avg": Tensor.add_,
    "product": Tensor.mul_,
    "min": lambda total, share: torch.minimum(total, share, out=total),
    "max": lambda total, share: torch.maximum(total, share, out=total),
    "band": Tensor.bitwise_and_,
    "bor": Tensor.bitwise_or_,
    "bxor": Tensor.bitwise_xor_,
}


def combine(step: ReduceStep, result: Tensor, shares: Sequence[Tensor]) -> None:
    """Combine shares in the order of their ranks, so that all ranks compute the same bits."""
    total = shares[0].view(step.dtype).clone()
    for share in shares[1:]:
        _COMBINE[step.combination](total, share.view(step.dtype))
    if step.combination == "avg":
        total.div_(len(shares))
    result.view(step.dtype).copy_(total)

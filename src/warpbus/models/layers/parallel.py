"""Layers of which several processes have a part each (Shoeybi et al., 2019), and what joins their results."""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from warpbus.dist import Group


class Parallel(nn.Module):
    """One process's part of a linear layer. What `part` gives is no result yet: `join` makes it the whole layer's.

    Every process of the group calls it with the same x, or with its part of x, as often and in the same order.
    """

    def __init__(self, part: nn.Module, group: Group) -> None:
        super().__init__()
        self.part = part
        self.group = group

    @abstractmethod
    def join(self, y: Tensor, residual: Tensor | None) -> Tensor:
        """The whole layer's result plus `residual`, the same bits on every process."""

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.part(x), None)


class RowParallel(Parallel):
    """A part of the input: `x` has the columns that this process's weight has, and the results are added up.

    The bias is on one process alone. The residual is added with the sum, rounded once.
    """

    def join(self, y: Tensor, residual: Tensor | None) -> Tensor:
        return self.group.all_reduce(y, residual)


class VocabularyParallel(Parallel):
    """The head: each process scores its own tokens, and every one gets the scores of all.

    Args:
        sizes: how many tokens each process scores.
    """

    def __init__(self, part: nn.Module, group: Group, sizes: list[int]) -> None:
        super().__init__(part, group)
        self.sizes = sizes

    def join(self, y: Tensor, residual: Tensor | None) -> Tensor:
        assert residual is None
        width = max(self.sizes)
        own = y.reshape(-1, y.shape[-1])
        parts = self.group.all_gather(nn.functional.pad(own, (0, width - own.shape[1])))
        if min(self.sizes) == width:
            scores = parts.transpose(0, 1).flatten(1)
        else:
            scores = torch.cat([part[:, :size] for part, size in zip(parts, self.sizes, strict=True)], dim=1)
        return scores.view(*y.shape[:-1], -1)

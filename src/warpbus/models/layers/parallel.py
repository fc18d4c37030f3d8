"""Tensor-parallel layers (Shoeybi et al., 2019): each process computes a part, and collectives combine the results."""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from warpbus.dist import Group


class Parallel(nn.Module):
    """One process's part of a linear layer: `part` computes a partial result, `join` combines those of all processes.

    Every process of the group makes the same calls in the same order, with the same x or with its part of x.
    """

    def __init__(self, part: nn.Module, group: Group) -> None:
        super().__init__()
        self.part = part
        self.group = group

    @abstractmethod
    def join(self, y: Tensor, residual: Tensor | None) -> Tensor:
        """The result of the whole layer plus `residual`, bit-identical on every process."""

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.part(x), None)


class RowParallel(Parallel):
    """Sharded along the input: x has the columns of this process's weight, and an all-reduce adds up the results.

    Only one process has the bias. Sum and residual are rounded once.
    """

    def join(self, y: Tensor, residual: Tensor | None) -> Tensor:
        return self.group.all_reduce(y, residual)


class VocabularyParallel(Parallel):
    """The head: each process computes the logits of its part of the vocabulary, and an all-gather collects them.

    Args:
        sizes: the number of tokens in each process's part of the vocabulary.
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

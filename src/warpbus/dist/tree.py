"""Sums one tensor per share, bit-identical for any number of processes."""

import torch
from torch import Tensor

from warpbus.dist.group import Group
from warpbus.dist.shares import SHARES


class TreeSum:
    """Adds up one tensor per share over the shares of all processes.

    Floating-point addition is not associative. Here the additions follow one fixed binary tree over the shares: share 0
    + share 1, share 2 + share 3, ..., then sums of two shares, then of four. The number of processes only decides where
    an addition is computed. Each process adds up the subtrees within its own shares; the rest of the tree is computed
    for one slice of the elements by each process.

        total = TreeSum(group, (n, n))
        for share in group.shares():
            total.add(share, statistics(share))
        sum_of_all = total.total()

    At most log2(SHARES) + 1 tensors are in memory while shares are added.

    Args:
        group: the processes; each makes its own `TreeSum` and calls `total`.
        shape: of each tensor and of the sum, which are float32.
    """

    def __init__(self, group: Group, shape: tuple[int, ...]) -> None:
        self._group = group
        self._shape = shape
        self._nodes: dict[range, Tensor] = {}
        self._next = group.shares().start

    def add(self, share: int, tensor: Tensor | None) -> None:
        """Add a share's tensor, which the sum takes over and changes in place.

        Shares have to be added in ascending order. A share without data is omitted, or added as None.
        """
        own = self._group.shares()
        if not self._next <= share < own.stop:
            raise ValueError(f"share {share}: the next of this process is one of {self._next} to {own.stop - 1}")
        if tensor is None:
            return
        if tuple(tensor.shape) != self._shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(
                f"share {share}: {tensor.dtype} {tuple(tensor.shape)}: expected torch.float32 {self._shape}, contiguous"
            )
        self._next = share + 1
        self._nodes[range(share, share + 1)] = tensor
        self._merge_up_to(share + 1)

    def total(self) -> Tensor:
        """The sum over all shares, on every process. The `TreeSum` is empty afterwards."""
        self._merge_up_to(SHARES)  # in case the last shares were omitted
        group, nodes = self._group, self._nodes
        self._nodes, self._next = {}, SHARES
        if group.world == 1:
            found = nodes.get(range(SHARES))
            return self._nothing() if found is None else found
        mine = [nodes[node] if node in nodes else self._nothing() for node in _roots(group.shares())]
        return self._add_slices(mine)

    def _merge_up_to(self, share: int) -> None:
        for node in _inner_nodes():
            if node.stop <= share and _is_within(node, self._group.shares()):
                _merge(self._nodes, node)

    def _nothing(self) -> Tensor:
        # x + -0.0 has the bits of x, even for x = -0.0: as if the share did not exist.
        return torch.full(self._shape, -0.0, device=self._group.device)

    def _add_slices(self, mine: list[Tensor]) -> Tensor:
        """Finish the tree: each process sums its slice of the elements over all subtrees; slices are then exchanged.

        Each process sends and receives at most twice the bytes of a tensor, and needs memory for one more.
        """
        group, total = self._group, mine[0]
        flat = [tensor.view(-1) for tensor in mine]
        size = total.numel()
        bounds = [size * rank // group.world for rank in range(group.world + 1)]
        slices = [slice(*bounds[rank : rank + 2]) for rank in range(group.world)]
        own = slices[group.rank]
        own_part = flat[0][own]
        others = [rank for rank in range(group.world) if rank != group.rank]
        parts = dict(zip(_roots(group.shares()), (tensor[own] for tensor in flat), strict=True))
        # One message to each process, whatever the number of tensors.
        received = {rank: own_part.new_empty(len(_roots(group.shares(rank))), len(own_part)) for rank in others}
        group.exchange(
            [(rank, _rows([tensor[slices[rank]] for tensor in flat])) for rank in others],
            list(received.items()),
        )
        for rank, rows in received.items():
            parts.update(zip(_roots(group.shares(rank)), rows, strict=True))
        for node in _inner_nodes():
            _merge(parts, node)
        if group.rank:  # the first process computed its slice in place
            own_part.copy_(parts[range(SHARES)])
        group.exchange([(rank, own_part) for rank in others], [(rank, flat[0][slices[rank]]) for rank in others])
        return total


def _rows(tensors: list[Tensor]) -> Tensor:
    """Stack tensors of the same length; a single one is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


def _inner_nodes() -> list[range]:
    """The inner nodes of the tree over the shares, children before parents."""
    sizes = [2**level for level in range(1, SHARES.bit_length())]
    return [range(start, start + size) for size in sizes for start in range(0, SHARES, size)]


def _is_within(node: range, shares: range) -> bool:
    return shares.start <= node.start and node.stop <= shares.stop


def _roots(shares: range) -> list[range]:
    """The largest nodes of the tree within `shares`: the subtrees that one process can sum by itself."""
    within = [node for node in _inner_nodes() if _is_within(node, shares)]
    within += [range(share, share + 1) for share in shares]
    return sorted(
        (node for node in within if not any(node != other and _is_within(node, other) for other in within)),
        key=lambda node: node.start,
    )


def _merge(nodes: dict[range, Tensor], node: range) -> None:
    """Replace a node's children by their sum, computed in place in the left child."""
    middle = (node.start + node.stop) // 2
    left, right = nodes.pop(range(node.start, middle), None), nodes.pop(range(middle, node.stop), None)
    if left is not None and right is not None:
        left += right
    if left is not None:
        nodes[node] = left
    elif right is not None:
        nodes[node] = right

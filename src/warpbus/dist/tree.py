"""The sum of one tensor a share, with the same bits in a job of any number of processes."""

import torch
from torch import Tensor

from warpbus.dist.group import Group
from warpbus.dist.shares import SHARES


class TreeSum:
    """Adds up one tensor a share, over the shares of all processes.

    Floating-point addition is not associative. Here the additions follow one binary tree, which halves the range of
    shares: share 0 + share 1, share 2 + share 3, ..., then the sums of two, then those of four. Processes only decide
    where an addition is done. A process adds what its own shares allow; of what is left each process adds up one slice
    of the elements, since the tree is the same for every element.

        total = TreeSum(group, (n, n))
        for share in group.shares():
            total.add(share, statistics(share))
        sum_of_all = total.total()

    At most log2(SHARES) + 1 tensors are alive while shares come in.

    Args:
        group: the processes; each makes its own `TreeSum` and calls `total`.
        shape: of each tensor and of the sum.
        dtype: of each tensor and of the sum.
    """

    def __init__(self, group: Group, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        self._group = group
        self._shape = shape
        self._dtype = dtype
        self._nodes: dict[range, Tensor] = {}
        self._next = group.shares().start

    def add(self, share: int, tensor: Tensor | None) -> None:
        """Give a share's tensor, which from then on belongs to the sum and is changed in place.

        Shares come in rising order; one without data is left out, or given as None.
        """
        own = self._group.shares()
        if not self._next <= share < own.stop:
            raise ValueError(f"share {share}: the next of this process is one of {self._next} to {own.stop - 1}")
        if tensor is None:
            return
        if tuple(tensor.shape) != self._shape or tensor.dtype != self._dtype or not tensor.is_contiguous():
            raise ValueError(
                f"share {share}: {tensor.dtype} {tuple(tensor.shape)}: expected {self._dtype} {self._shape}, contiguous"
            )
        self._next = share + 1
        self._nodes[range(share, share + 1)] = tensor
        self._merge_up_to(share + 1)

    def total(self) -> Tensor:
        """The sum over all shares, on every process. The `TreeSum` is empty afterwards."""
        self._merge_up_to(SHARES)  # those of which the last shares were left out
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
        # x + -0.0 has the bits of x also where x is -0.0: as if the share were not there.
        return torch.full(self._shape, -0.0, dtype=self._dtype, device=self._group.device)

    def _add_slices(self, mine: list[Tensor]) -> Tensor:
        """Finish the tree: this process adds up its slice of the elements of all that is left, then all get all slices.

        Each process sends and receives no more than twice a tensor's bytes, and needs memory for one more.
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
        if group.rank:  # the first process's slice is where the sum grew
            own_part.copy_(parts[range(SHARES)])
        group.exchange([(rank, own_part) for rank in others], [(rank, flat[0][slices[rank]]) for rank in others])
        return total


def _rows(tensors: list[Tensor]) -> Tensor:
    """Tensors of one length one below the other; of a single one no copy is made."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


def _inner_nodes() -> list[range]:
    """The nodes of the tree over the shares that have children, each after its children."""
    sizes = [2**level for level in range(1, SHARES.bit_length())]
    return [range(start, start + size) for size in sizes for start in range(0, SHARES, size)]


def _is_within(node: range, shares: range) -> bool:
    return shares.start <= node.start and node.stop <= shares.stop


def _roots(shares: range) -> list[range]:
    """The largest nodes of the tree that lie within `shares`: what one process can add up by itself."""
    within = [node for node in _inner_nodes() if _is_within(node, shares)]
    within += [range(share, share + 1) for share in shares]
    return sorted(
        (node for node in within if not any(node != other and _is_within(node, other) for other in within)),
        key=lambda node: node.start,
    )


def _merge(nodes: dict[range, Tensor], node: range) -> None:
    """Put the sum of a node's children in their place, in place of the left one's elements."""
    middle = (node.start + node.stop) // 2
    left, right = nodes.pop(range(node.start, middle), None), nodes.pop(range(middle, node.stop), None)
    if left is not None and right is not None:
        left += right
    if left is not None:
        nodes[node] = left
    elif right is not None:
        nodes[node] = right

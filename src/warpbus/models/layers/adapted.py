"""Low-rank adapters (LoRA; Hu et al., 2021, arXiv:2106.09685) of a linear layer, with a different adapter per row.

The matrices of all adapters of a layer are concatenated, and every row is multiplied by all of them. Between the two
products, the features of other rows' adapters are set to zero. The products are dense and have fixed shapes whichever
adapters a batch uses, so that one CUDA graph serves all batches. The layer itself does not change, quantized or not.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ALIGNED = 8  # ranks: 16-bit products are fast if rows are multiples of 16 bytes


class Selection:
    """The adapter of each row, for all `Adapted` layers of a model; outside of `rows` no row has one.

    Args:
        source: the objects that the model's adapters were built from, in order.
    """

    def __init__(self, source: Sequence[object]) -> None:
        self.source = tuple(source)
        self._numbers: Tensor | None = None
        self._foreign: dict[tuple[int, ...], Tensor] = {}

    @property
    def active(self) -> bool:
        """Whether rows may have adapters."""
        return self._numbers is not None

    @contextmanager
    def rows(self, numbers: Tensor) -> Iterator[None]:
        """Set the adapters of the rows for calls of the model inside the block.

        Args:
            numbers: int64 `[rows]`: the adapter of each row of the activations, counted from 1 in the order of
                `source`; 0 for none.
        """
        self._numbers = numbers
        try:
            yield
        finally:
            self._numbers = None
            self._foreign = {}

    def foreign(self, ranks: tuple[int, ...], owners: Tensor) -> Tensor:
        """Mask of the columns of other rows' adapters, bool `[rows, columns]`; cached for layers of the same ranks.

        Args:
            owners: int64 `[columns]`, the adapter that each column belongs to.
        """
        assert self._numbers is not None
        if ranks not in self._foreign:
            self._foreign[ranks] = self._numbers[:, None] != owners
        return self._foreign[ranks]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Selection":
        # A model may be copied while the original runs.
        return Selection(self.source)


class Adapted(nn.Module):
    """A linear layer with adapters: `part(x) + (x a^T) b^T` with the a and b of each row's adapter.

    Args:
        part: the linear layer, of any kind.
        adapters: for each of `selection.source` its a, `[rank, in]`, and b, `[out, rank]`; None if the adapter does
            not change this layer.
        selection: the adapter of each row.
        dtype, device: of the activations.
    """

    a: Tensor
    b: Tensor
    owners: Tensor

    def __init__(
        self,
        part: nn.Module,
        adapters: Sequence[tuple[Tensor, Tensor] | None],
        selection: Selection,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.part = part
        self.selection = selection
        self.ranks = tuple(0 if pair is None else len(pair[0]) for pair in adapters)
        used = sum(self.ranks)
        columns = padded(used)
        pairs = [pair for pair in adapters if pair is not None]
        width, height = pairs[0][0].shape[1], pairs[0][1].shape[0]
        self.register_buffer("a", torch.zeros(columns, width, dtype=dtype, device=device))
        self.register_buffer("b", torch.zeros(height, columns, dtype=dtype, device=device))
        self.a[:used] = torch.cat([a.to(dtype) for a, _ in pairs]).to(device)
        self.b[:, :used] = torch.cat([b.to(dtype) for _, b in pairs], dim=1).to(device)
        owners = [number for number, rank in enumerate(self.ranks, start=1) for _ in range(rank)]
        self.register_buffer("owners", torch.tensor(owners + [-1] * (columns - used), device=device))

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """Add the adapters' output for x, `[..., in]`, to y, `[..., out]`, in place."""
        low = F.linear(x.reshape(-1, x.shape[-1]), self.a)
        # Masked, not multiplied by 0: an overflow in one adapter must not reach another one's rows.
        low.masked_fill_(self.selection.foreign(self.ranks, self.owners), 0.0)
        y.view(-1, y.shape[-1]).addmm_(low, self.b.t())
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x)
        return self.add(y, x) if self.selection.active else y


def padded(rank: int) -> int:
    """Columns of adapters whose ranks add up to `rank`, padded for alignment."""
    return -(-rank // _ALIGNED) * _ALIGNED

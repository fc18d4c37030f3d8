"""Low-rank adapters (LoRA; Hu et al., 2021, arXiv:2106.09685) beside a linear, each row's own in one batch.

All adapters of a linear lie side by side, and every row is multiplied by all of them. In between, what does not belong
to the row's own adapter is cleared: so there are two dense products of fixed shapes, whoever asks for which adapter,
and a CUDA graph serves all of them. The linear itself stays as it is, quantized or not.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ALIGNED = 8  # ranks: products of 16 bits are fast where rows are whole pieces of 16 bytes


class Selection:
    """Which adapter each row has, for all `Adapted` of a model: outside of `rows`, none.

    Args:
        source: what the model's adapters were made of, in their order.
    """

    def __init__(self, source: Sequence[object]) -> None:
        self.source = tuple(source)
        self._numbers: Tensor | None = None
        self._foreign: dict[tuple[int, ...], Tensor] = {}

    @property
    def active(self) -> bool:
        """Rows may have adapters."""
        return self._numbers is not None

    @contextmanager
    def rows(self, numbers: Tensor | None) -> Iterator[None]:
        """For the model's calls within.

        Args:
            numbers: int64 `[rows]`, for each row of the activations its adapter, from 1 on in the order of `source`, or
                0 for none. None: no row has any, and the model is computed as without adapters.
        """
        self._numbers = numbers
        try:
            yield
        finally:
            self._numbers = None
            self._foreign = {}

    def foreign(self, ranks: tuple[int, ...], owners: Tensor) -> Tensor:
        """Which columns are not the row's own: bool `[rows, columns]`, computed once for all linears of these ranks.

        Args:
            owners: int64 `[columns]`, the adapter of each.
        """
        assert self._numbers is not None
        if ranks not in self._foreign:
            self._foreign[ranks] = self._numbers[:, None] != owners
        return self._foreign[ranks]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Selection":
        # A copy of a model, which may be made while this one is computed.
        return Selection(self.source)


class Adapted(nn.Module):
    """A linear with adapters: `part(x) + (x a^T) b^T` with the row's own a and b.

    Args:
        part: the linear, of any kind.
        adapters: for each of `selection.source` its a, `[rank, in]`, and b, `[out, rank]`; None where it leaves this
            linear alone.
        selection: says which row has which.
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
        """Add what the rows' adapters make of x, `[..., in]`, to y, `[..., out]`, where it is."""
        low = F.linear(x.reshape(-1, x.shape[-1]), self.a)
        # Cleared and not multiplied by 0: what overflows in one adapter is no other's.
        low.masked_fill_(self.selection.foreign(self.ranks, self.owners), 0.0)
        y.view(-1, y.shape[-1]).addmm_(low, self.b.t())
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x)
        return self.add(y, x) if self.selection.active else y


def padded(rank: int) -> int:
    """Columns that adapters of together so many ranks take."""
    return -(-rank // _ALIGNED) * _ALIGNED

"""Rows of tokens sorted by expert, and the sum of a token's experts: what surrounds the products of many tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.kernels.ops.arguments import HALVES, per_dtype

MOST_EXPERTS = 1023
"""Of a layer: `moe_sort` has a thread for each."""

_SORT = per_dtype(
    "moe/sort.cu",
    "moe_sort",
    "const int* experts, int* order, int* place, int4* tiles, int slots, int count, int rows_of_tile",
    HALVES,
)
_PERMUTE = per_dtype(
    "moe/sort.cu", "moe_permute", "const ELEMENT* x, const int* order, ELEMENT* out, int width, int per_token", HALVES
)
_COMBINE = per_dtype(
    "moe/sort.cu",
    "moe_combine",
    "const ELEMENT* y, const int* place, const float* weights, const ELEMENT* residual, ELEMENT* out, int width, "
    "int per_token",
    HALVES,
)


@dataclass(frozen=True)
class SortedRows:
    """The rows of some tokens, one per slot, sorted by expert and cut into tiles.

    Attributes:
        count: of the rows.
        per_token: of the rows, slots of a token.
        order: int32 `[rows]`, the slot of each row: row i is of token order[i] / per_token; -1 behind the last one.
        place: int32 `[rows]`, where each slot is among them; -1: it belongs to another process.
        tiles: int32 `[1 + most, 4]`, see `moe/sort.cu`.
        most: how many tiles there may be.
        height: the most rows of a tile.
    """

    count: int
    per_token: int
    order: Tensor
    place: Tensor
    tiles: Tensor
    most: int
    height: int

    @classmethod
    def sort(cls, experts: Tensor, count: int, height: int, dtype: torch.dtype) -> "SortedRows":
        """Sort the slots of tokens by the experts int32 `[tokens, slots]`, of which there are `count`.

        Args:
            height: the most rows of a tile.
            dtype: of the rows, float16 or bfloat16.
        """
        rows, per_token = experts.numel(), experts.shape[1]
        most = (rows + (height - 1) * min(rows, count)) // height
        order, place = (torch.empty(rows, dtype=torch.int32, device=experts.device) for _ in range(2))
        tiles = torch.empty(1 + most, 4, dtype=torch.int32, device=experts.device)
        _SORT[dtype](
            1,
            1024,
            experts=experts,
            order=order,
            place=place,
            tiles=tiles,
            slots=rows,
            count=count,
            rows_of_tile=height,
            shared=4 * count,
            dependent=True,
        )
        return cls(rows, per_token, order, place, tiles, most, height)

    @property
    def padded(self) -> int:
        """Of the rows, at least those of a tile: a copy of a tile brings all its rows."""
        return max(self.count, self.height)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of x `[tokens, width]` in the sorted order, `[padded, width]`."""
        width = x.shape[1]
        out = x.new_empty(self.padded, width)
        _PERMUTE[x.dtype](
            self.count, 256, x=x, order=self.order, out=out, width=width, per_token=self.per_token, dependent=True
        )
        return out

    def combine(self, y: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """For each token `residual` plus the sum of its rows of y `[rows, width]` times `weights` `[tokens, slots]`."""
        (tokens, per_token), width = weights.shape, y.shape[1]
        out = y.new_empty(tokens, width)
        _COMBINE[y.dtype](
            tokens,
            256,
            y=y,
            place=self.place,
            weights=weights,
            residual=residual,
            out=out,
            width=width,
            per_token=per_token,
            dependent=True,
        )
        return out

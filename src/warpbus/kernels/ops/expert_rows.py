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
        x: `[rows, width]`, or more rows where a tile is higher: a copy of a tile brings all its rows.
        count: of the rows.
        place: int32 `[rows]`, where each slot is among them; -1: it belongs to another process.
        tiles: int32 `[1 + most, 4]`, see `moe/sort.cu`.
        most: how many tiles there may be.
        height: the most rows of a tile.
    """

    x: Tensor
    count: int
    place: Tensor
    tiles: Tensor
    most: int
    height: int

    @classmethod
    def sort(cls, x: Tensor, experts: Tensor, count: int, height: int) -> "SortedRows":
        """Sort the rows of x `[tokens, width]` by the experts int32 `[tokens, slots]`, of which there are `count`."""
        (tokens, per_token), width = experts.shape, x.shape[1]
        rows = tokens * per_token
        most = (rows + (height - 1) * min(rows, count)) // height
        order, place = (torch.empty(rows, dtype=torch.int32, device=x.device) for _ in range(2))
        tiles = torch.empty(1 + most, 4, dtype=torch.int32, device=x.device)
        _SORT[x.dtype](
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
        out = x.new_empty(max(rows, height), width)
        _PERMUTE[x.dtype](rows, 256, x=x, order=order, out=out, width=width, per_token=per_token, dependent=True)
        return cls(out, rows, place, tiles, most, height)

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

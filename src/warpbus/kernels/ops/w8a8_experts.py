"""Launches the products of a mixture of experts in 8 bits: the kernels of `w8a8`, with a list of rows.

Nothing here checks shapes or dtypes: the operators that call it have done so.
"""

import itertools

import torch
from torch import Tensor

from warpbus.cuda.green import multiprocessors
from warpbus.cuda.tensor_map import fits, tensor_map
from warpbus.kernels.ops.arguments import HALVES, blocks
from warpbus.kernels.ops.tiles_sm80 import Sm80Tiling
from warpbus.kernels.ops.tiles_sm90 import BOX, ROW_BYTES, Sm90Tiling
from warpbus.kernels.ops.w8a8 import AMPERE, CODES, COLUMN_BYTES, ampere_kernel, hopper_kernel, sm80_shared

HOPPER_ROWS = 128
"""Of a tile on Hopper."""

_HOPPER = {
    torch.float8_e4m3fn: Sm90Tiling(HOPPER_ROWS, 128, 5, 2, 0.7),
    torch.int8: Sm90Tiling(HOPPER_ROWS, 128, 6, 1, 0.7),
}
_HOPPER_KERNELS = {
    (codes, dtype, experts): hopper_kernel(_HOPPER[codes], codes, dtype, experts)
    for codes, dtype, experts in itertools.product(CODES, HALVES, (1, 2))
}
_AMPERE_KERNELS = {
    (tiling, codes, dtype): ampere_kernel(tiling, codes, dtype, 1)
    for tiling, codes, dtype in itertools.product(AMPERE, CODES, HALVES)
}
_FEW_ROWS = 16  # kFewRows in w8a8/sm90_w8a8.cu
_NO_MAP = bytes(128)


def hopper(
    x: Tensor,
    x_scales: Tensor,
    weights: Tensor,
    scales: Tensor,
    tiles: Tensor,
    most: int,
    out: Tensor,
    *,
    gated: bool = False,
) -> None:
    """Rows of `out` are rows of x times their expert's weight, on an sm_90a GPU.

    Args:
        x: codes `[rows, k]`, sorted by expert, contiguous, at least `HOPPER_ROWS` rows; k is a multiple of 16.
        x_scales: float32 `[rows]`.
        weights: codes `[experts, n, k]`, contiguous.
        scales: float32 `[experts, n]`, contiguous.
        tiles: int32 `[1 + most, 4]`, see `moe/sort.cu`.
        most: rows of tiles, at most.
        out: `[rows, n]`, contiguous; with a gate `[rows, n / 2]`, `silu(gate) * up` of weights whose first half of the
            rows is the gate.
    """
    n, tiling = out.shape[1], _HOPPER[x.dtype]
    columns = tiling.tile_n // (2 if gated else 1)
    direct = not fits(out)
    _HOPPER_KERNELS[x.dtype, out.dtype, 2 if gated else 1](
        min(most * blocks((n, columns)), multiprocessors(x.device)),
        tiling.threads,
        map_a=tensor_map(x, tiling.tile_m, ROW_BYTES) + tensor_map(x, _FEW_ROWS, ROW_BYTES),
        map_b=tensor_map(weights.flatten(0, 1), columns, ROW_BYTES),
        map_out=_NO_MAP if direct else tensor_map(out, BOX, BOX),
        a_scale=x_scales,
        b_scale=scales,
        bias=None,
        out=out,
        partial=None,
        m=len(out),
        n=n,
        k=x.shape[1],
        part=x.shape[1],
        splits=1,
        group=1,
        direct=direct,
        list=tiles[1:],
        shared=tiling.shared(COLUMN_BYTES),
        dependent=True,
    )


def ampere(
    x: Tensor,
    x_scales: Tensor,
    weights: Tensor,
    scales: Tensor,
    tiles: Tensor,
    most: int,
    tiling: Sm80Tiling,
    out: Tensor,
) -> None:
    """The same on any GPU that has the instructions, without a gate; `tiling` is one of `w8a8.AMPERE`."""
    n, k = weights.shape[1:]
    _AMPERE_KERNELS[tiling, x.dtype, out.dtype](
        most * blocks((n, tiling.tile_n)),
        tiling.threads,
        a=x,
        b=weights,
        a_scale=x_scales,
        b_scale=scales,
        bias=None,
        out=out,
        partial=None,
        m=len(out),
        n=n,
        k=k,
        a_stride=k,
        b_stride=k,
        k_per_split=k,
        list=tiles[1:],
        shared=sm80_shared(tiling),
        dependent=True,
    )

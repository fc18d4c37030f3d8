"""Launching `wna16/sm90_wna16.cu`: quantized weights times many tokens on Hopper."""

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.cuda.kernel import Kernel
from warpbus.cuda.tensor_map import fits, tensor_map
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, blocks, multiprocessors
from warpbus.kernels.ops.packed import TILE_COLUMNS, TILE_ROWS, PackedWeight
from warpbus.kernels.ops.wgmma import addressable
from warpbus.kernels.ops.workspace import counters
from warpbus.kernels.units import unit

_NO_MAP = bytes(128)
_FULL_ENOUGH = 0.9
_GROUP = 4096  # rows of x that are walked together


@dataclass(frozen=True)
class Tiling:
    """How `wna16/sm90_wna16.cu` cuts a product.

    Attributes:
        tokens: rows of x in a tile.
        consumers: warpgroups that multiply, each 64 rows of the weight.
        stages: blocks of k in flight, by the bits of a code.
    """

    tokens: int
    consumers: int
    stages: dict[int, int]

    @property
    def rows(self) -> int:
        """Of the weight in a tile."""
        return 64 * self.consumers

    def shared(self, bits: int) -> int:
        """Bytes: the ring with its barriers, staging buffers, and room to align."""
        stage = (self.tokens * 2 + self.rows * bits // 8) * TILE_COLUMNS + 2 * self.rows // TILE_ROWS * 2 * 32 + 16
        return stage * self.stages[bits] + self.consumers * min(self.tokens, 64) * 64 * 2 + 1024

    def kernel(self, dtype: torch.dtype, bits: int) -> Kernel:
        """The kernel with these tiles."""
        return _kernel(dtype, bits, self.tokens, self.consumers, self.stages[bits])


# From the smallest tile to the largest.
TILINGS = (
    Tiling(16, 3, {4: 18, 8: 12}),
    Tiling(32, 3, {4: 14, 8: 10}),
    Tiling(64, 2, {4: 12, 8: 10}),
    Tiling(64, 3, {4: 12, 8: 9}),
    Tiling(128, 2, {4: 8, 8: 7}),
    Tiling(128, 3, {4: 8, 8: 6}),
    Tiling(256, 2, {4: 5, 8: 4}),
)


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, tiling: Tiling | None = None) -> None:
    """`out = x @ weight.T + bias` on an sm_90a GPU.

    Args:
        x: `[m, k]` in the dtype of the weight.
        bias: `[n]`, contiguous, or `None`.
        out: `[m, n]`, contiguous.
        tiling: one of `TILINGS`; by default the one that should be fastest.
    """
    m, k = x.shape
    n = weight.shape[0]
    bits = weight.bits
    tiling = tiling or choose(m, n, multiprocessors(x.device))
    chunks, rows = blocks((k, TILE_COLUMNS)), blocks((n, TILE_ROWS))
    size = weight.scheme.group_size
    scale_words = 16 if size == 32 else 8
    x = addressable(x)
    scale_map = functools.partial(
        tensor_map, box_rows=tiling.rows // TILE_ROWS, box_columns=scale_words, swizzled=False
    )
    codes = weight.codes.view(rows, -1)
    direct = not fits(out)
    maps = (
        tensor_map(x, tiling.tokens, TILE_COLUMNS),
        tensor_map(codes, tiling.rows // TILE_ROWS, 32 * bits, swizzled=False),
        scale_map(_words(weight.scales)),
        _NO_MAP if weight.zeros is None else scale_map(_words(weight.zeros)),
        _NO_MAP if direct else tensor_map(out, min(tiling.tokens, 64), 64),
    )
    tiles = blocks((m, tiling.tokens), (n, tiling.rows))
    grid = min(multiprocessors(x.device), tiles * chunks)
    waves = _waves(tiles, grid)
    shared_tiles = tiles > waves * grid  # with whole waves the last may hold fewer
    partials = x.new_empty(grid * tiling.rows * tiling.tokens, dtype=torch.float32) if shared_tiles else None
    tiling.kernel(x.dtype, bits)(
        grid,
        128 * (1 + tiling.consumers),
        *(b"".join(maps), bias, out, partials, counters(x.device, grid * tiling.consumers) if shared_tiles else None),
        *(int(weight.zeros is None), m, n, k, chunks),
        *(
            31 if size is None else max(size // TILE_COLUMNS, 1).bit_length() - 1,
            weight.scheme.middle_code,
            scale_words,
        ),
        *(max(_GROUP // tiling.tokens, 1), waves, int(direct)),
        shared=tiling.shared(bits),
        dependent=True,
    )


def _waves(tiles: int, grid: int) -> int:
    """Whole tiles of each block; the rest is shared by all.

    Tiles are whole where a last wave that is not full wastes little: blocks at different places along k would not find
    each other's part of x in L2.
    """
    full = blocks((tiles, grid))
    if tiles >= _FULL_ENOUGH * full * grid:
        return full
    return max(tiles // grid - 1, 0)


def choose(m: int, n: int, processors: int) -> Tiling:
    """The tiling for m rows of x and n rows of the weight.

    Up to 256 rows one that wastes little on rows that are not there: the larger of two if there is such a tile for each
    multiprocessor, else the smaller, of which those that share one leave each other less. Beyond, one of two that
    waste little.
    """
    least, few, short, tall, low, high, wide = TILINGS
    for smaller, larger in ((least, least), (few, few), (short, tall), (low, high), (high, wide)):
        if m <= larger.tokens:
            return larger if blocks((n, larger.rows)) >= processors else smaller
    padded = [blocks((m, tiling.tokens)) * tiling.tokens for tiling in (low, wide)]
    return low if padded[0] < 0.9 * padded[1] else wide


def _words(scales: Tensor) -> Tensor:
    """Scales as int32 `[tiles, groups * 8]`: a word for the rows g and g + 8."""
    return scales.view(torch.int32).view(scales.shape[0], -1)


@functools.cache
def _kernel(dtype: torch.dtype, bits: int, tokens: int, consumers: int, stages: int) -> Kernel:
    declared = unit(
        "wna16/sm90_wna16.cu",
        needs="sm_90a",
        ELEMENT=ELEMENTS[dtype],
        BITS=bits,
        TOKENS=tokens,
        CONSUMERS=consumers,
        STAGES=stages,
    )
    return declared.kernel("sm90_wna16", "640sPPPPiiiiiiiiiii")


for _dtype, _bits, _tiling in itertools.product(HALVES, (4, 8), TILINGS):
    _tiling.kernel(_dtype, _bits)

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

_ROWS = 128  # of the weight in a tile
_CONSUMERS = 2
_THREADS = 128 * (1 + _CONSUMERS)
_NO_MAP = bytes(128)
_GROUP = 4096  # rows of x that are walked together


@dataclass(frozen=True)
class Tiling:
    """How many rows of x are in a tile, and blocks of k in flight by the bits of a code."""

    tokens: int
    stages: dict[int, int]

    def shared(self, bits: int) -> int:
        """Bytes: the ring with its barriers, staging buffers, and room to align."""
        stage = (self.tokens * 2 + _ROWS * bits // 8) * TILE_COLUMNS + 2 * _ROWS // TILE_ROWS * 2 * 32 + 16
        return stage * self.stages[bits] + _CONSUMERS * min(self.tokens, 64) * 64 * 2 + 1024

    def kernel(self, dtype: torch.dtype, bits: int) -> Kernel:
        """The kernel with these tiles."""
        return _kernel(dtype, bits, self.tokens, self.stages[bits])


TILINGS = (
    Tiling(16, {4: 24, 8: 16}),
    Tiling(32, {4: 16, 8: 12}),
    Tiling(64, {4: 12, 8: 10}),
    Tiling(128, {4: 8, 8: 7}),
    Tiling(256, {4: 5, 8: 4}),
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
    tiling = tiling or choose(m)
    chunks, rows = blocks((k, TILE_COLUMNS)), blocks((n, TILE_ROWS))
    size = weight.scheme.group_size
    scale_words = 16 if size == 32 else 8
    x = addressable(x)
    scale_map = functools.partial(
        tensor_map, box_rows=_ROWS // TILE_ROWS, box_columns=scale_words, swizzled=False
    )
    codes = weight.codes.view(rows, -1)
    direct = not fits(out)
    maps = (
        tensor_map(x, tiling.tokens, TILE_COLUMNS),
        tensor_map(codes, _ROWS // TILE_ROWS, 32 * bits, swizzled=False),
        scale_map(_words(weight.scales)),
        _NO_MAP if weight.zeros is None else scale_map(_words(weight.zeros)),
        _NO_MAP if direct else tensor_map(out, min(tiling.tokens, 64), 64),
    )
    tiles = blocks((m, tiling.tokens), (n, _ROWS))
    grid = min(multiprocessors(x.device), tiles * chunks)
    waves = tiles // grid - bool(tiles % grid) if tiles >= grid else 0
    shared_tiles = tiles > waves * grid
    partials = x.new_empty(grid * _ROWS * tiling.tokens, dtype=torch.float32) if shared_tiles else None
    tiling.kernel(x.dtype, bits)(
        grid,
        _THREADS,
        *(b"".join(maps), bias, out, partials, counters(x.device, grid * _CONSUMERS) if shared_tiles else None),
        *(int(weight.zeros is None), m, n, k, chunks),
        *(31 if size is None else max(size // TILE_COLUMNS, 1).bit_length() - 1, scale_words),
        *(max(_GROUP // tiling.tokens, 1), waves, int(direct)),
        shared=tiling.shared(bits),
        dependent=True,
    )


def choose(m: int) -> Tiling:
    """The tiling for m rows of x: the smallest that holds them, or the largest that wastes little."""
    for tiling in TILINGS:
        if m <= tiling.tokens:
            return tiling
    middle, largest = TILINGS[-2:]
    padded = [blocks((m, tiling.tokens)) * tiling.tokens for tiling in (middle, largest)]
    return middle if padded[0] < 0.9 * padded[1] else largest


def _words(scales: Tensor) -> Tensor:
    """Scales as int32 `[tiles, groups * 8]`: a word for the rows g and g + 8."""
    return scales.view(torch.int32).view(scales.shape[0], -1)


@functools.cache
def _kernel(dtype: torch.dtype, bits: int, tokens: int, stages: int) -> Kernel:
    declared = unit(
        "wna16/sm90_wna16.cu", needs="sm_90a", ELEMENT=ELEMENTS[dtype], BITS=bits, TOKENS=tokens, STAGES=stages
    )
    return declared.kernel("sm90_wna16", "640sPPPPiiiiiiiiii")


for _dtype, _bits, _tiling in itertools.product(HALVES, (4, 8), TILINGS):
    _tiling.kernel(_dtype, _bits)

"""The numbers of the trellis schemes: a bit-shift trellis with a computed code, over rotated columns.

The method is that of QTIP (Tseng et al., 2024): the weights of a tile are one path through a trellis, whose states are
overlapping windows of a stream of bits, and a state's numbers are computed from its bits, so that nothing is looked up.

A tile of 16 rows by 16 columns is a cyclic stream of 128 symbols of `2 * bits` bits. State t is the 14 bits of the
stream that begin at symbol t, and gives two weights that lie side by side, in the order in which the lanes of a warp
hold the A fragment of `mma.m16n8k16`: with t = 4 l + i and l = 4 g + q they are in row g + 8 (i % 2), and the columns
2 q + 8 (i // 2) and the next. Symbol t is stored at bit `2 * bits * t`, least significant bit first, in 32-bit words.

The columns are rotated in blocks of up to 128 by random signs and a Hadamard matrix, which makes the weights of a row
resemble normal numbers and spreads outliers of the inputs: W = Q R^T where the trellis gives Q, and W x = Q (R^T x).
"""

import functools
import math

import torch
from torch import Tensor

from warpbus.qtensor.packing import pack, unpack

TILE = 16
"""Rows and columns of a tile."""

WINDOW = 14
"""Bits of a state."""

STATES = 2**WINDOW
STEPS = TILE * TILE // 2
"""States of a tile, two weights each."""

COLUMNS = 32
"""A matrix has a multiple of so many columns, so that 16 rows fill whole words for any number of bits."""

_LARGEST_BLOCK = 128  # columns that are rotated together
_MULTIPLIER = 0xAA44731B
_HASHES = (0x9E3779B1, 0x85EBCA77)


@functools.cache
def _code_table() -> Tensor:
    product = torch.arange(STATES, dtype=torch.int64) * _MULTIPLIER
    parts = torch.stack([(product >> 8 * i & 0xFF).to(torch.uint8).view(torch.int8) for i in range(4)], 1)
    return parts.view(STATES, 2, 2).sum(2) / 128


def code_table(device: torch.device) -> Tensor:
    """The two numbers of each state, float32 `[STATES, 2]`, exact in float16: sums of two signed bytes over 128.

    The bytes are those of `state * multiplier` modulo 2^32, and the first number is the sum of the lower two. Sums of
    two bytes, of which all values are equally frequent, resemble normal numbers, and tensor cores add them.
    """
    return _code_table().to(device)


@functools.cache
def code_deviation() -> float:
    """The standard deviation of the numbers of all states."""
    return float(_code_table().double().square().mean().sqrt())


def states_of(symbols: Tensor, bits: int) -> Tensor:
    """The states of tiles: int64 `[tiles, STEPS]` from symbols uint8 `[tiles, STEPS]`."""
    width, wide = 2 * bits, symbols.long()
    states = torch.zeros_like(wide)
    for following in range(-(-WINDOW // width)):
        states |= wide.roll(-following, 1) << following * width
    return states & (STATES - 1)


def pack_symbols(symbols: Tensor, bits: int, columns: int) -> Tensor:
    """Symbols uint8 `[tiles, STEPS]`, the tiles of 16 rows side by side, as words int32 `[rows, columns * bits / 32]`.

    The words of 16 rows are those of their tiles one after the other.
    """
    return pack(symbols, 2 * bits).view(-1, columns * bits // 32)


def unpack_symbols(words: Tensor, bits: int) -> Tensor:
    """Undo `pack_symbols`."""
    return unpack(words.reshape(-1, 2 * bits * STEPS // 32), 2 * bits, STEPS)


def to_tiles(matrix: Tensor) -> Tensor:
    """A matrix `[rows, columns]` as `[tiles, 2 * STEPS]`: each tile in the order of its states."""
    rows, columns = matrix.shape
    # Axes: band, half of its rows, g; tile of the band, half of its columns, q, one of two neighbours.
    cut = matrix.reshape(rows // TILE, 2, 8, columns // TILE, 2, 4, 2)
    return cut.permute(0, 3, 2, 5, 4, 1, 6).reshape(-1, 2 * STEPS)


def from_tiles(tiles: Tensor, columns: int) -> Tensor:
    """Undo `to_tiles`."""
    cut = tiles.view(-1, columns // TILE, 8, 4, 2, 2, 2)
    return cut.permute(0, 5, 2, 1, 4, 3, 6).reshape(-1, columns)


def trellis_numbers(words: Tensor, bits: int, columns: int) -> Tensor:
    """The numbers that packed symbols stand for, before scales and rotation: float32 `[rows, columns]`."""
    states = states_of(unpack_symbols(words, bits), bits)
    return from_tiles(code_table(words.device)[states].flatten(1), columns)


def rotation_block(columns: int) -> int:
    """How many columns are rotated together: the largest power of two up to 128 that divides `columns`."""
    return min(columns & -columns, _LARGEST_BLOCK)


def rotate(x: Tensor) -> Tensor:
    """x R along the last axis, float32: what the columns of a rotated matrix are multiplied with.

    Args:
        x: floating `[..., columns]`.
    """
    columns = x.shape[-1]
    return _hadamard(x.float() * column_signs(columns, x.device), rotation_block(columns))


def rotate_back(x: Tensor) -> Tensor:
    """x R^T along the last axis, float32: undoes `rotate`."""
    columns = x.shape[-1]
    return _hadamard(x.float(), rotation_block(columns)) * column_signs(columns, x.device)


def _hadamard(x: Tensor, block: int) -> Tensor:
    """Multiply blocks of columns by the symmetric, orthogonal Hadamard matrix of a power of two."""
    shape, width = x.shape, 1
    while width < block:
        pairs = x.reshape(-1, 2, width)
        x = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1)
        width *= 2
    return x.reshape(shape) / math.sqrt(block)


@functools.cache
def column_signs(columns: int, device: torch.device) -> Tensor:
    """1 or -1 for each column, by a hash of its number: float32 `[columns]`."""
    hashed = torch.arange(1, columns + 1, dtype=torch.int64)
    for multiplier in _HASHES:
        hashed = hashed * multiplier & 0xFFFFFFFF
        hashed ^= hashed >> 15
    return (1.0 - 2.0 * (hashed >> 7 & 1).float()).to(device)

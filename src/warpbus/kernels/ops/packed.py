"""`PackedWeight`: a `QTensor` in the order in which the tensor cores take it.

The codes of a tile of 16 rows lie so that the words of a lane, once dequantized, are the A fragments of `mma.m16n8k16`
(and of `wgmma` with A in registers). Lane 4 g + t holds the rows g and g + 8 of the tile and of every 16 columns 2 t,
2 t + 1, 2 t + 8 and 2 t + 9.

2 to 4 bits: tiles of 16 rows by 64 columns. For the columns 16 s to 16 s + 15 a lane has four bytes: of the columns
2 t, 2 t + 8, 2 t + 1 and 2 t + 9. The lowest bits of a byte are the code of row g, the next those of row g + 8. So a
mask picks a pair that is one register of the fragment. With b bits a lane has b words of a tile:

- 4 bits: word s is these four bytes; `[ceil(n / 16)][ceil(k / 64)][lane][word]`.
- 2 bits: the low halves of the bytes of word w are those of s = 2 w, the high halves those of s = 2 w + 1; in the same
  order.
- 3 bits: the bytes take 6 bits. Those of s = 0, 1 and 2 are the low bits of the three words; the upper 2 bits of each
  byte of word i are the bits 2 i and 2 i + 1 of the byte of s = 3. Of a tile first come the words 0 and 1 of all
  lanes, then the words 2.

8 bits: tiles of 16 rows by 32 columns; words 2 s and 2 s + 1 cover the columns 16 s to 16 s + 15: column 2 t of rows g
and g + 8, column 2 t + 1 of both, then the same 8 columns on. Codes of 5 and 6 bits are stored in 8.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.errors import TensorError
from warpbus.kernels.ops.arguments import HALVES, blocks
from warpbus.qtensor import QTensor, Scheme

TILE_ROWS = 16
TILE_COLUMNS = 64
STORED_BITS = (2, 3, 4, 8)
"""The widths of a packed code in bits; the kernels are compiled for each."""
_ROWS_AT_ONCE = 1024  # packed at a time, so that the wide integers in between stay small


@dataclass(frozen=True)
class PackedWeight:
    """A quantized matrix `[n, k]` for the kernels `wna16`.

    Attributes:
        codes: int32, flat; see the module.
        scales: `[tiles of rows, groups, 8, 2]`, float16 or bfloat16: of the rows g and g + 8. Groups past k are zero.
        zeros: like `scales`, whole numbers, or `None` where the scheme is symmetric.
        scheme: of the `QTensor` that it was made from.
        shape: `(n, k)`.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    scheme: Scheme
    shape: tuple[int, int]

    @property
    def bits(self) -> int:
        """Bits of a packed code: 2, 3, 4 or 8. Codes of 5 and 6 bits are stored in 8."""
        return stored_bits(self.scheme)

    @property
    def dtype(self) -> torch.dtype:
        """Of the scales, and of the activations that it can be multiplied with."""
        return self.scales.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def to(self, device: torch.device | str) -> "PackedWeight":
        """The same on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros)

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, the scales and the zero points together."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)


@functools.cache
def scheme_of(bits: int, group: int, symmetric: bool) -> Scheme:
    """The scheme of the numbers that operators take; `group`: columns that share a scale, 0: all."""
    return Scheme(bits, group or None, symmetric)


def stored_bits(scheme: Scheme) -> int:
    """The bits that a packed code takes: one of `STORED_BITS`."""
    return 8 if scheme.bits > 4 else scheme.bits


def check_weight_only(name: str, scheme: Scheme) -> None:
    """Raises TensorError for a scheme whose activations have 8 bits, too, and for FP4 and trellises.

    `wna16` computes with none of them.
    """
    if scheme.is_trellis:
        raise TensorError(f"{name}: the weight is {scheme}, expected w<bits>a16: use trellis_linear")
    if scheme.element is not None:
        raise TensorError(f"{name}: the weight is {scheme}, which no kernel computes with: dequantize it")
    if scheme.activations is not None:
        raise TensorError(f"{name}: the weight is {scheme}, expected w<bits>a16: use w8a8_linear")


def packed_shapes(scheme: Scheme, n: int, k: int) -> tuple[int, tuple[int, int, int, int]]:
    """The number of int32 words of the codes, and the shape of the scales, of a matrix `[n, k]`."""
    rows, columns = blocks((n, TILE_ROWS)), blocks((k, TILE_COLUMNS))
    groups = 1 if scheme.group_size is None else blocks((columns * TILE_COLUMNS, scheme.group_size))
    words = rows * TILE_ROWS * columns * TILE_COLUMNS * stored_bits(scheme) // 32
    return words, (rows, groups, 8, 2)


def pack(weight: QTensor, dtype: torch.dtype) -> PackedWeight:
    """Reorder a quantized matrix, on the device where it is.

    Args:
        dtype: float16 or bfloat16: of the activations; the scales are rounded to it.

    Raises:
        TensorError: another dtype, or a w8a8 scheme.
    """
    check_weight_only("pack", weight.scheme)
    if dtype not in HALVES:
        raise TensorError(f"pack: dtype is {dtype}, expected float16 or bfloat16, the dtype of the activations")
    n, k = weight.shape
    scheme = weight.scheme
    words, shape = packed_shapes(scheme, n, k)
    codes = torch.empty(words, dtype=torch.int32, device=weight.device)
    padding = -k % TILE_COLUMNS
    per_row = (k + padding) * stored_bits(scheme) // 32
    for start, part in _pieces(weight):
        rows = F.pad(part.codes(), (0, padding, 0, -part.shape[0] % TILE_ROWS))
        arranged = _arrange(rows.to(torch.int32), stored_bits(scheme))
        codes[start * per_row : start * per_row + arranged.numel()] = arranged
    zeros = None if weight.zeros is None else _by_tile(weight.zeros.to(dtype), shape)
    return PackedWeight(codes, _by_tile(weight.scales.to(dtype), shape), zeros, scheme, (n, k))


def unpack(packed: PackedWeight) -> QTensor:
    """The quantized matrix that was packed: the same codes, the scales as they were rounded."""
    n, k = packed.shape
    rows, columns = blocks((n, TILE_ROWS)) * TILE_ROWS, blocks((k, TILE_COLUMNS)) * TILE_COLUMNS
    codes = _restore(packed.codes, packed.bits, rows, columns)[:n, :k]
    groups = packed.scheme.groups(k)
    zeros = None if packed.zeros is None else _by_row(packed.zeros, n, groups).to(torch.uint8)
    return QTensor.from_codes(packed.scheme, codes, _by_row(packed.scales, n, groups), zeros)


def _pieces(weight: QTensor) -> Iterator[tuple[int, QTensor]]:
    n = weight.shape[0]
    for start in range(0, n, _ROWS_AT_ONCE):
        yield start, weight.rows(start, min(start + _ROWS_AT_ONCE, n))


# Axes of a matrix [rows, columns] cut up: tile of rows, half h, row g; tile of columns, step s, half p of 16 columns,
# t, one e of two neighbours.


def _arrange(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return _arrange_8(codes)
    steps = _arrange_steps(codes, bits)
    if bits == 2:
        steps = steps[..., 0::2] | steps[..., 1::2] << 4
    elif bits == 3:
        last, spare = steps[..., 3:], torch.arange(0, 6, 2, dtype=torch.int32, device=codes.device)
        words = (steps[..., :3] | (last >> spare & 0x03030303) << 6).flatten(2, 3)
        return torch.cat([words[..., :2].flatten(2), words[..., 2]], dim=-1).flatten()
    return steps.flatten()


def _restore(words: Tensor, bits: int, rows: int, columns: int) -> Tensor:
    if bits == 8:
        return _restore_8(words, rows, columns)
    if bits == 2:
        words = torch.stack([words, words >> 4], dim=-1)
    elif bits == 3:
        tiles = words.view(-1, 96)
        low = torch.cat([tiles[:, :64].view(-1, 32, 2), tiles[:, 64:, None]], dim=-1)
        spare = torch.arange(0, 6, 2, dtype=torch.int32, device=words.device)
        last = ((low >> 6 & 0x03030303) << spare).sum(-1, keepdim=True, dtype=torch.int32)
        words = torch.cat([low, last], dim=-1)
    return _restore_steps(words.flatten(), bits, rows, columns)


def _step_shifts(bits: int, device: torch.device) -> Tensor:
    """Where the codes of 16 columns lie in a word: of (e, p, h)."""
    byte = torch.arange(0, 32, 8, dtype=torch.int32, device=device)
    return torch.stack([byte, byte + bits], dim=-1).flatten()


def _arrange_steps(codes: Tensor, bits: int) -> Tensor:
    """`[tile, tile, g, t, s]`: a word for every 16 columns of a lane."""
    rows, columns = codes.shape
    cut = codes.view(rows // 16, 2, 8, columns // 64, 4, 2, 4, 2)
    ordered = cut.permute(0, 3, 2, 6, 4, 7, 5, 1).flatten(-3)  # ..., (e, p, h)
    return (ordered << _step_shifts(bits, codes.device)).sum(-1, dtype=torch.int32)


def _restore_steps(words: Tensor, bits: int, rows: int, columns: int) -> Tensor:
    codes = ((words[:, None] >> _step_shifts(bits, words.device)) & 2**bits - 1).to(torch.uint8)
    cut = codes.view(rows // 16, columns // 64, 8, 4, 4, 2, 2, 2)  # tile, tile, g, t, s, e, p, h
    return cut.permute(0, 7, 2, 1, 4, 6, 3, 5).reshape(rows, columns)


def _arrange_8(codes: Tensor) -> Tensor:
    rows, columns = codes.shape
    cut = codes.view(rows // 16, 2, 8, columns // 32, 2, 2, 4, 2)
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=codes.device)
    ordered = cut.permute(0, 3, 2, 6, 4, 5, 7, 1).flatten(-2)  # ..., (e, h)
    return (ordered << shifts).sum(-1, dtype=torch.int32).flatten()


def _restore_8(words: Tensor, rows: int, columns: int) -> Tensor:
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=words.device)
    octets = ((words[:, None] >> shifts) & 255).to(torch.uint8)
    cut = octets.view(rows // 16, columns // 32, 8, 4, 2, 2, 2, 2)  # tile, tile, g, t, s, p, e, h
    return cut.permute(0, 7, 2, 1, 4, 5, 3, 6).reshape(rows, columns)


def _by_tile(values: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """`[n, groups]` as `[tiles, groups, 8, 2]`, zero where there is no row or group."""
    tiles, groups = shape[:2]
    padded = F.pad(values, (0, groups - values.shape[1], 0, tiles * TILE_ROWS - values.shape[0]))
    return padded.view(tiles, 2, 8, groups).permute(0, 3, 2, 1).contiguous()


def _by_row(values: Tensor, n: int, groups: int) -> Tensor:
    """The inverse of `_by_tile`."""
    tiles, padded = values.shape[:2]
    return values.permute(0, 3, 2, 1).reshape(tiles * TILE_ROWS, padded)[:n, :groups].contiguous()

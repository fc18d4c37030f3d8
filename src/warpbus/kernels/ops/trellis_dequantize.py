"""Launching `trellis/dequantize.cu`, and the products of many rows, in which cuBLAS multiplies what it writes."""

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.cuda.parameters import Parameters
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, blocks, blocks_in_stride
from warpbus.kernels.ops.trellis_packed import BLOCK, PackedTrellis
from warpbus.kernels.units import unit
from warpbus.qtensor.scheme import TRELLIS_BITS
from warpbus.qtensor.trellis import TILE, rotation_block

_PARAMETERS = Parameters(
    "const uint4* codes, const float* scales, const unsigned char* signs, ELEMENT* out, int blocks, int first_tile, "
    "int tiles, int first_block, int columns, int levels"
)
BUFFER_BYTES = 2**26
"""The limit in bytes of the weights dequantized at a time; at least one tile of rows or block of columns."""

_THREADS = 256  # kThreads in trellis/dequantize.cu

_KERNELS = {
    (dtype, bits): unit("trellis/dequantize.cu", ELEMENT=ELEMENTS[dtype], BITS=bits).kernel(
        "trellis_dequantize", _PARAMETERS
    )
    for dtype, bits in itertools.product(HALVES, TRELLIS_BITS)
}


def dequantize_trellis(weight: PackedTrellis, rows: range, columns: range) -> Tensor:
    """A rectangle of a matrix, in the dtype of its activations.

    Sums of numbers are exact, and a weight is rounded once.

    Args:
        rows: whole tiles of 16.
        columns: whole blocks of 128, but for the last ones of the matrix.

    Returns:
        `[len(rows), len(columns)]`, contiguous.
    """
    if weight.device.type != "cuda":
        return weight.unpack().dequantize(weight.dtype)[rows.start : rows.stop, columns.start : columns.stop]
    out = torch.empty(len(rows), len(columns), dtype=weight.dtype, device=weight.device)
    pieces = blocks((len(rows), TILE), (len(columns), BLOCK))
    _KERNELS[weight.dtype, weight.scheme.bits](
        blocks_in_stride(32 * pieces, _THREADS, weight.device),
        _THREADS,
        codes=weight.codes,
        scales=weight.scales,
        signs=weight.signs,
        out=out,
        blocks=blocks((weight.shape[1], BLOCK)),
        first_tile=rows.start // TILE,
        tiles=len(rows) // TILE,
        first_block=columns.start // BLOCK,
        columns=len(columns),
        levels=rotation_block(weight.shape[1]).bit_length() - 1,
    )
    return out


def multiply_dequantized(x: Tensor, weight: PackedTrellis, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` for x `[m, k]` in the dtype of the weight `[n, k]`, whose rows are dequantized in bands."""
    n, k = weight.shape
    bands = _bands(n, TILE, k)
    if len(bands) == 1:
        return F.linear(x, dequantize_trellis(weight, range(n), range(k)), bias)
    out = x.new_empty(len(x), n)
    for rows in bands:
        band, part = dequantize_trellis(weight, rows, range(k)).T, out[:, rows.start : rows.stop]
        if bias is None:
            torch.mm(x, band, out=part)
        else:
            torch.addmm(bias[rows.start : rows.stop], x, band, out=part)
    return out


def times_dequantized(dy: Tensor, weight: PackedTrellis) -> Tensor:
    """`dy @ weight` for dy `[m, n]` in the dtype of the weight `[n, k]`, whose columns are dequantized in bands."""
    n, k = weight.shape
    out = dy.new_empty(len(dy), k)
    for columns in _bands(k, BLOCK, n):
        torch.mm(dy, dequantize_trellis(weight, range(n), columns), out=out[:, columns.start : columns.stop])
    return out


def _bands(size: int, unit: int, length: int) -> list[range]:
    """`size` rows or columns of `length` elements, cut into equal bands of whole units within the buffer."""
    units = blocks((size, unit))
    count = blocks((units, max(1, BUFFER_BYTES // (2 * unit * length))))
    step = blocks((units, count)) * unit
    return [range(start, min(start + step, size)) for start in range(0, size, step)]

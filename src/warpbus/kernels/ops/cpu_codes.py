"""`wna16` on a CPU with activations in 8 bits: integer products of the codes, by the C++ kernels in `csrc/cpu`.

x is rounded to int8 in blocks of at most 128 columns of one group, each with a scale of its own: its largest magnitude
/ 127. Within a block the products of codes are summed exactly; the blocks' sums times both scales are summed in
float32, in a fixed order. A row has the same bits alone and in any batch.

The error: an element of x is rounded by at most 1/254 of the largest magnitude in its block, so that

    |y - y_exact| <= sum over blocks b of max |x_b| / 254 * sum over columns c in b of |w_c|

and, the roundings being independent, about 0.6 % of the norm of x times that of a row of w for normally distributed x.
"""

import ctypes
import functools
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.cuda.host_compiler import CpuVariant
from warpbus.errors import TensorError
from warpbus.kernels.ops.cpu_library import SCALES, CpuMatrix, Task, as_float, check_operands, pointer
from warpbus.qtensor import QTensor, Scheme

TILE = 16  # rows: kTile in csrc/cpu/matrix.h
_PADDING = 16  # columns: kPadding
_ROWS_AT_ONCE = 2048  # packed or unpacked at a time, so that the codes in between stay small


@dataclass(frozen=True)
class CpuCodes:
    """A `QTensor` in the order of csrc/cpu/matrix.h; `unpack` gives it back exactly.

    Attributes:
        codes: uint8 `[tiles of 16 rows, bytes]`.
        scales: `[tiles, groups, 16]`, float32, bfloat16 or float16.
        zeros: uint8 `[tiles, groups, 16]`, or None where the scheme is symmetric.
        scheme, shape: of the `QTensor`.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    scheme: Scheme
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points together."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    @property
    def matrix(self) -> CpuMatrix:
        """The structure that the kernels take; made for each call, since tensors may move."""
        return CpuMatrix(pointer(self.codes), pointer(self.scales), pointer(self.zeros), *self._sizes)

    @functools.cached_property
    def _sizes(self) -> tuple[int, ...]:
        (n, k), bits = self.shape, stored_bits(self.scheme)
        group, kind = k // self.scales.shape[1], SCALES.index(self.scales.dtype)
        return n, k, group, bits, self.scheme.middle_code, kind, -(-n // TILE)

    def unpack(self) -> QTensor:
        """The matrix that was packed."""
        return QTensor.concatenate([self._rows(first) for first in range(0, self.shape[0], _ROWS_AT_ONCE)])

    def _rows(self, first: int) -> QTensor:
        n, k = self.shape
        rows, groups = min(_ROWS_AT_ONCE, n - first), self.scales.shape[1]
        tiles, bits = slice(first // TILE, -(-(first + rows) // TILE)), stored_bits(self.scheme)
        bytes_ = self.codes[tiles].view(-1, self.codes.shape[1] // (4 * TILE), TILE, 4)
        fields = [bytes_ >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
        codes = torch.stack(fields, dim=2).permute(0, 3, 1, 2, 4).reshape(len(bytes_) * TILE, groups, -1)
        codes = codes[:rows, :, : k // groups].reshape(rows, k)
        scales, zeros = (
            None if part is None else part[tiles].transpose(1, 2).reshape(-1, groups)[:rows].contiguous()
            for part in (self.scales, self.zeros)
        )
        assert scales is not None
        return QTensor.from_codes(self.scheme, codes, scales, zeros)


def stored_bits(scheme: Scheme) -> int:
    """The bits that a code takes: 2, 4 or 8."""
    return {3: 4, 5: 8, 6: 8}.get(scheme.bits, scheme.bits)


def pack_codes(weight: QTensor) -> CpuCodes:
    """Reorder a matrix on the CPU, whose scales have one of the dtypes `SCALES`.

    Takes as much memory as the matrix, and a few MB in between.
    """
    (n, k), (_, groups), bits = weight.shape, weight.scales.shape, stored_bits(weight.scheme)
    tiles, padded = -(-n // TILE), -(-(k // groups) // _PADDING) * _PADDING
    codes = torch.empty(tiles, groups * padded * TILE * bits // 8, dtype=torch.uint8)
    for first in range(0, n, _ROWS_AT_ONCE):
        part = weight.rows(first, min(n, first + _ROWS_AT_ONCE)).codes()
        rows = -(-len(part) // TILE) * TILE
        part = F.pad(part.unflatten(1, (groups, -1)), (0, padded - k // groups, 0, 0, 0, rows - len(part)))
        fields = part.view(rows // TILE, TILE, -1, 8 // bits, 4).permute(3, 0, 2, 1, 4)
        joined = fields[0].clone()
        for which in range(1, len(fields)):
            joined |= fields[which] << which * bits
        codes[first // TILE : (first + rows) // TILE] = joined.flatten(1)
    scales, zeros = (
        None if each is None else F.pad(each, (0, 0, 0, tiles * TILE - n)).view(tiles, TILE, groups).transpose(1, 2)
        for each in (weight.scales, weight.zeros)
    )
    assert scales is not None
    return CpuCodes(
        codes, scales.contiguous(), None if zeros is None else zeros.contiguous(), weight.scheme, weight.shape
    )


class _LinearTask(Task):
    """`Linear` of csrc/cpu/linear.h."""

    _fields_ = (
        ("weight", CpuMatrix),
        *((name, ctypes.c_void_p) for name in ("x", "norm", "bias", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("m", "gates", "threads")),
        ("eps", ctypes.c_double),
    )


def fuses_gates(weight: CpuCodes) -> bool:
    """Whether `codes_linear` computes swiglu for a weight of gates and up: each half is whole tiles."""
    return weight.shape[0] % (2 * TILE) == 0


def codes_linear(
    x: Tensor,
    weight: CpuCodes,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    variant: CpuVariant | None = None,
) -> Tensor:
    """`residual + norm(x) @ weight.T + bias`, or with gates `residual + silu(gate) * up`.

    Args:
        x: float32, bfloat16 or float16 `[..., k]`, on the CPU. It is rounded to 8 bits; see the module. An infinite
            element or NaN makes the row's results NaN.
        weight: `[n, k]`.
        bias: `[n]`, a floating-point tensor.
        norm: the weight `[k]` of an RMSNorm that x goes through first, with `eps`.
        residual: in the shape of the result.
        gated: the first half of the weight's rows gives gates, the second half is multiplied by their silu; not with a
            bias, and only where `fuses_gates`.
        variant: of the kernels; by default the fastest that this CPU runs.

    Returns:
        `[..., n]`, or `[..., n / 2]` with gates, in the dtype of x; computed in float32 and rounded once. The same bits
        at every run, and for a row alone or in any batch.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    check_operands("codes_linear", x, weight.shape, columns, bias=bias, norm=norm, residual=residual)
    if gated and (bias is not None or not fuses_gates(weight)):
        raise TensorError(
            f"codes_linear: gates are fused for weights without a bias whose halves are multiples of {TILE} rows; this "
            f"one has {weight.shape[0]} rows{'' if bias is None else ' and a bias'}: compute them apart"
        )
    m = prod(x.shape[:-1])
    rows, norm, bias, before = as_float(x), as_float(norm), as_float(bias), as_float(residual)
    out = torch.empty(*x.shape[:-1], columns)
    if m:
        task = _LinearTask(
            *(weight.matrix, pointer(rows), pointer(norm), pointer(bias), pointer(before), pointer(out)),
            *(m, gated, torch.get_num_threads(), eps),
        )
        task.run("linear", variant)
    return out if x.dtype == torch.float32 else out.to(x.dtype)

"""`QTensor`: the only form that a quantized matrix has in memory.

File formats convert to and from it; the layout that a kernel wants is derived from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from warpbus.errors import SchemeError, TensorError
from warpbus.qtensor.fp4 import fp4_values
from warpbus.qtensor.packing import pack, packed_words, unpack
from warpbus.qtensor.scheme import Scheme
from warpbus.qtensor.trellis import COLUMNS, TILE, rotate_back, trellis_numbers

_AT_ONCE = 2**22  # weights of a trellis that are dequantized at a time


@dataclass(frozen=True)
class QTensor:
    """A quantized matrix of `out` rows and `in` columns: `weight = (code - zero) * scale`; of FP4 `number * scale`.

    Of a trellis, `number * scale` is the matrix with rotated columns (`qtensor.trellis`).

    Attributes:
        scheme: bits, group size, symmetric or not; or w8a8.
        qweight: int32 `[out, packed_words(in, bits)]`, codes packed along `in` (see `packing`). For a w8a8 scheme the
            values `[out, in]` themselves, int8 or float8_e4m3fn: `weight = value * scale`. Of a trellis, the words of
            each 16 rows are those of their tiles (see `trellis.pack_symbols`).
        scales: floating `[out, groups]`.
        zeros: uint8 `[out, groups]`, or `None` where the scheme is symmetric.
        shape: `(out, in)`.

    Raises:
        SchemeError: if the scheme's group size does not divide `in`, or a trellis has no whole tiles.
        TensorError: if a part has the wrong shape or type.
    """

    scheme: Scheme
    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        out, columns = self.shape
        groups = self.scheme.groups(columns)
        if self.scheme.is_trellis:
            check_trellis(self.shape, "matrix", self.scheme)
        width = columns if self.holds_values else packed_words(columns, self.scheme.bits)
        _expect("qweight", self.qweight, (out, width), self.scheme.dtype)
        _expect("scales", self.scales, (out, groups), None)
        if not self.scales.is_floating_point():
            raise TensorError(f"scales: expected a floating-point type, found {self.scales.dtype}")
        if self.scheme.symmetric != (self.zeros is None):
            raise TensorError(f"zeros: scheme {self.scheme} needs {'none' if self.scheme.symmetric else 'them'}")
        if self.zeros is not None:
            _expect("zeros", self.zeros, (out, groups), torch.uint8)

    @classmethod
    def from_codes(cls, scheme: Scheme, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> "QTensor":
        """Pack unsigned codes `[out, in]` with their scales and zero points `[out, groups]`.

        Raises:
            SchemeError: if the scheme has no codes; see `from_values`.
        """
        out, columns = codes.shape
        if scheme.activations is not None:
            return cls(
                scheme, (codes.to(torch.int16) - scheme.middle_code).to(scheme.dtype), scales, zeros, (out, columns)
            )
        packed = pack(codes, scheme.bits)
        return cls(scheme, packed, scales, None if zeros is None else zeros.to(torch.uint8), (out, columns))

    @classmethod
    def from_values(cls, scheme: Scheme, values: Tensor, scales: Tensor) -> "QTensor":
        """A w8a8 matrix of values int8 or float8_e4m3fn `[out, in]` and scales `[out]` or `[out, 1]`."""
        if scheme.activations is None:
            raise SchemeError(f"a matrix is made of values where the scheme is w8a8, not {scheme}: use from_codes")
        out, columns = values.shape
        return cls(scheme, values, scales.view(-1, 1), None, (out, columns))

    @property
    def device(self) -> torch.device:
        return self.qweight.device

    @property
    def holds_values(self) -> bool:
        """Whether `qweight` has an element for each weight, as w8a8 schemes have, and not packed codes."""
        return self.scheme.activations is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, the scales and the zero points together."""
        parts = [self.qweight, self.scales] + ([] if self.zeros is None else [self.zeros])
        return sum(part.nbytes for part in parts)

    def codes(self) -> Tensor:
        """The unsigned codes, uint8 `[out, in]`; of FP4 its bits. SchemeError if the scheme has none."""
        if self.scheme.is_trellis:
            raise SchemeError(f"{self.scheme}: a trellis has no code for each weight: dequantize it")
        if self.holds_values:
            return (self.qweight.to(torch.int16) + self.scheme.middle_code).to(torch.uint8)
        return unpack(self.qweight, self.scheme.bits, self.shape[1])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights `[out, in]` in `dtype` (that of the scales by default).

        Of a trellis, products are summed in float32 and rounded to `dtype` once. Else:
        The scales are rounded to `dtype` first and multiplied in it: what compressed-tensors does, so that both
        read the same numbers out of the same file.
        """
        dtype = dtype or self.scales.dtype
        if self.holds_values:
            return self.qweight.to(dtype) * self.scales.to(dtype)
        groups = self.scales.shape[1]
        if self.scheme.is_trellis:
            return self._dequantized_trellis(dtype)
        if self.scheme.element is not None:
            numbers = fp4_values(self.codes(), dtype).unflatten(1, (groups, -1))
            return (numbers * self.scales.to(dtype).unsqueeze(-1)).flatten(1)
        zero: Tensor | int = self.scheme.middle_code
        if self.zeros is not None:
            zero = self.zeros.to(torch.int16).unsqueeze(-1)
        centred = self.codes().unflatten(1, (groups, -1)).to(torch.int16) - zero
        return (centred.to(dtype) * self.scales.to(dtype).unsqueeze(-1)).flatten(1)

    def _dequantized_trellis(self, dtype: torch.dtype) -> Tensor:
        columns = self.shape[1]
        found = torch.empty(self.shape, dtype=dtype, device=self.device)
        height = max(1, _AT_ONCE // (TILE * columns)) * TILE
        for start in range(0, self.shape[0], height):
            band = slice(start, start + height)
            numbers = trellis_numbers(self.qweight[band], self.scheme.bits, columns)
            found[band] = rotate_back(numbers * self.scales[band].float())
        return found

    def to(self, device: torch.device | str) -> "QTensor":
        """The same matrix on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return QTensor(self.scheme, self.qweight.to(device), self.scales.to(device), zeros, self.shape)

    @staticmethod
    def concatenate(parts: "Sequence[QTensor]") -> "QTensor":
        """Stack matrices of one scheme and one width on top of each other: `[out_0 + out_1 + ..., in]`."""
        first = parts[0]
        if any(part.scheme != first.scheme or part.shape[1] != first.shape[1] for part in parts):
            described = ", ".join(f"{part.scheme} {part.shape}" for part in parts)
            raise TensorError(f"only matrices of one scheme and width can be stacked, not {described}")
        rows = sum(part.shape[0] for part in parts)
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return QTensor(
            first.scheme,
            torch.cat([part.qweight for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat(zeros) if zeros else None,
            (rows, first.shape[1]),
        )

    @staticmethod
    def side_by_side(parts: "Sequence[QTensor]") -> "QTensor":
        """Join matrices of one scheme and height: `[out, in_0 + in_1 + ...]`.

        Where a scale is a whole row's, those of the first are taken.
        """
        first = parts[0]
        if any(part.scheme != first.scheme or part.shape[0] != first.shape[0] for part in parts):
            described = ", ".join(f"{part.scheme} {part.shape}" for part in parts)
            raise TensorError(f"only matrices of one scheme and height can be joined, not {described}")
        scheme, shape = first.scheme, (first.shape[0], sum(part.shape[1] for part in parts))
        grouped = scheme.group_size is not None
        scales = torch.cat([part.scales for part in parts], 1) if grouped else first.scales
        zeros = first.zeros
        if grouped and zeros is not None:
            zeros = torch.cat([part.zeros for part in parts if part.zeros is not None], 1)
        if first.holds_values:  # as bytes: not every operator knows fp8
            joined = torch.cat([part.qweight.view(torch.uint8) for part in parts], 1).view(scheme.dtype)
        elif all(part.shape[1] * scheme.bits % 32 == 0 for part in parts[:-1]):
            joined = torch.cat([part.qweight for part in parts], 1)
        else:
            joined = pack(torch.cat([part.codes() for part in parts], 1), scheme.bits)
        return QTensor(scheme, joined, scales, zeros, shape)

    def rows(self, start: int, stop: int) -> "QTensor":
        """The rows `[start, stop)` as a matrix of their own (a view); of a trellis whole tiles, else SchemeError."""
        if self.scheme.is_trellis and start % TILE:
            raise SchemeError(f"rows {start} to {stop - 1} of {self.scheme}: expected whole tiles of {TILE} rows")
        zeros = None if self.zeros is None else self.zeros[start:stop]
        shape = (stop - start, self.shape[1])
        return QTensor(self.scheme, self.qweight[start:stop], self.scales[start:stop], zeros, shape)

    def take(self, rows: Tensor) -> "QTensor":
        """The rows with these numbers, int64 `[m]`, as a matrix of their own (a copy).

        Raises:
            SchemeError: rows of a trellis lie together in tiles.
        """
        if self.scheme.is_trellis:
            raise SchemeError(f"single rows of {self.scheme} lie together in tiles: dequantize it")
        zeros = None if self.zeros is None else self.zeros[rows]
        return QTensor(self.scheme, self.qweight[rows], self.scales[rows], zeros, (len(rows), self.shape[1]))

    def columns(self, start: int, stop: int) -> "QTensor":
        """The columns `[start, stop)` as a matrix of their own (a copy); `dequantize` of it is that of these columns.

        Raises:
            SchemeError: if a group would be cut; see `regrouped`. Columns of a trellis are rotated together.
        """
        if self.scheme.is_trellis:
            raise SchemeError(f"columns of {self.scheme} are rotated together: dequantize it")
        out, width = self.shape[0], stop - start
        if self.holds_values:
            return QTensor(self.scheme, self.qweight[:, start:stop].contiguous(), self.scales, None, (out, width))
        size = self.scheme.group_size
        if size is not None and (start % size or stop % size):
            raise SchemeError(
                f"columns {start} to {stop - 1} of a matrix of scheme {self.scheme}: expected whole groups of {size}"
            )
        bits = self.scheme.bits
        if start * bits % 32 == 0 and (stop * bits % 32 == 0 or stop == self.shape[1]):
            first = start * bits // 32
            packed = self.qweight[:, first : first + packed_words(width, bits)].contiguous()
        else:
            packed = pack(self.codes()[:, start:stop], bits)
        groups = slice(None) if size is None else slice(start // size, stop // size)
        zeros = None if self.zeros is None else self.zeros[:, groups].contiguous()
        return QTensor(self.scheme, packed, self.scales[:, groups].contiguous(), zeros, (out, width))

    def regrouped(self, size: int) -> "QTensor":
        """The same matrix in smaller groups of `size` columns, to which its scales and zero points are repeated.

        Raises:
            SchemeError: if `size` is no group size, or does not divide the groups of this matrix.
        """
        own = self.scheme.group_size or self.shape[1]
        if own == size:
            return self
        scheme = replace(self.scheme, group_size=size)
        if own % size:
            raise SchemeError(f"groups of {own} columns cannot be cut into groups of {size}")
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(own // size, 1)
        return QTensor(scheme, self.qweight, self.scales.repeat_interleave(own // size, 1), zeros, self.shape)


def _expect(part: str, tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype | None) -> None:
    if tuple(tensor.shape) != shape:
        raise TensorError(f"{part}: expected shape {list(shape)}, found {list(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise TensorError(f"{part}: expected {dtype}, found {tensor.dtype}")


def check_trellis(shape: tuple[int, int], name: str, scheme: Scheme) -> None:
    """Refuse a matrix that does not consist of whole tiles. Raises SchemeError, which names it."""
    out, columns = shape
    if out % TILE or columns % COLUMNS or 0 in shape:
        raise SchemeError(
            f"{name}: {out} x {columns} cannot be cut into tiles (scheme {scheme}): expected a multiple of {TILE} rows "
            f"and of {COLUMNS} columns: use w3a16 or w2a16"
        )

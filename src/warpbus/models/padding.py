"""Widening a gated MLP with zeros: the model stays the same function, and its matrices fit what reads them.

A new row of gate and up gives silu(0) * 0 = 0, and a new column of down is zero besides.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.errors import UsageError
from warpbus.models.families.family import MAX_SIZE
from warpbus.qtensor import QTensor, Scheme

_GPUS = 4  # that may share a padded FFN without cutting a group or a word
_WORD = 32  # columns that fill whole words, whatever the bits
_CODES_AT_ONCE = 2**22  # while they are packed, each takes some ten bytes


def padded_size(size: int, asked: int | str, group_size: int | None) -> int:
    """The width to which an FFN is padded.

    Args:
        size: its width.
        asked: "none"; "auto": to where 2 and 4 GPUs can share it in whole groups; or the new size.
        group_size: of the down projection; `None` for one scale per row, or no quantization.

    Raises:
        UsageError: if what is asked for is none of these, or smaller than the FFN is.
    """
    if asked == "none":
        return size
    if asked == "auto":
        unit = _GPUS * (group_size or _WORD)
        return -(-size // unit) * unit
    new = int(asked) if str(asked).isascii() and str(asked).isdigit() else -1
    if not size <= new <= MAX_SIZE:
        raise UsageError(
            f"--pad-ffn {asked}: expected auto, none, or a size from {size}, what the FFN has, to {MAX_SIZE}"
        )
    return new


def pad_rows(weight: QTensor, parts: int, rows: int) -> QTensor:
    """Each of the `parts` equal parts of a matrix widened to `rows` rows."""
    height = weight.shape[0] // parts
    blank = blank_matrix(weight.scheme, rows - height, weight.shape[1], weight.scales.dtype)
    pieces = [piece for part in range(parts) for piece in (weight.rows(part * height, (part + 1) * height), blank)]
    return QTensor.concatenate(pieces)


def pad_columns(weight: QTensor, columns: int) -> QTensor:
    """A matrix widened to `columns` columns."""
    return QTensor.concatenate([_pad_columns(piece, columns) for piece in slices(weight)])


def pad_plain(weight: Tensor, parts: int, shape: tuple[int, int]) -> Tensor:
    """Each of the `parts` equal parts of a matrix that is not quantized widened, to `shape` in all."""
    grouped = weight.unflatten(0, (parts, -1))
    rows, columns = shape[0] // parts - grouped.shape[1], shape[1] - weight.shape[1]
    return F.pad(grouped, (0, columns, 0, rows)).flatten(0, 1)


def _pad_columns(weight: QTensor, columns: int) -> QTensor:
    scheme, new = weight.scheme, columns - weight.shape[1]
    if scheme.activations is not None:
        # Padded as bytes: not every operator knows fp8, and both types have zero as a byte of zeros.
        values = F.pad(weight.qweight.view(torch.uint8), (0, new)).view(scheme.dtype)
        return QTensor.from_values(scheme, values, weight.scales)
    if scheme.group_size is None:  # in the one group of each row
        zeros = torch.full_like(weight.scales, scheme.middle_code, dtype=torch.uint8)
        zeros = zeros if weight.zeros is None else weight.zeros
        codes = torch.cat([weight.codes(), zeros.expand(-1, new)], 1)
        return QTensor.from_codes(scheme, codes, weight.scales, weight.zeros)
    blank = blank_matrix(scheme, weight.shape[0], new, weight.scales.dtype)
    return QTensor(
        scheme,
        torch.cat([weight.qweight, blank.qweight], 1),  # whole groups are whole words
        torch.cat([weight.scales, blank.scales], 1),
        None if weight.zeros is None or blank.zeros is None else torch.cat([weight.zeros, blank.zeros], 1),
        (weight.shape[0], columns),
    )


def blank_matrix(scheme: Scheme, rows: int, columns: int, scale_dtype: torch.dtype) -> QTensor:
    """A matrix of zeros on the CPU, its zero points in the middle, where every format can hold them."""
    scales = torch.ones(rows, scheme.groups(columns), dtype=scale_dtype)
    if not scheme.has_codes:
        return QTensor.from_values(scheme, torch.zeros(rows, columns).to(scheme.dtype), scales)
    zeros = None if scheme.symmetric else torch.full(scales.shape, scheme.middle_code, dtype=torch.uint8)
    codes = torch.full((rows, columns), scheme.middle_code, dtype=torch.uint8)
    return QTensor.from_codes(scheme, codes, scales, zeros)


def slices(weight: QTensor) -> Iterator[QTensor]:
    rows, columns = weight.shape
    height = max(1, _CODES_AT_ONCE // columns)
    return (weight.rows(start, min(start + height, rows)) for start in range(0, rows, height))

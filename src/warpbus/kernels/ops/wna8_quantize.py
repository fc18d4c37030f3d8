"""The activations of `wna8`: codes of 8 bits, a scale per token, and with e4m3 sums of the codes."""

from itertools import product

import torch
from torch import Tensor

from warpbus.cuda.parameters import Parameters
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, blocks
from warpbus.kernels.ops.expert_rows import SortedRows
from warpbus.kernels.units import unit

UNIT = 16
"""Columns that a thread of quantize.cu rounds at a time; rows of x have whole units."""

_PARAMETERS = Parameters(
    "const uint4* x, const int* order, uint4* codes, float* scales, uint32* sums, int units, int stride, "
    "int per_token, float factor"
)
_KEPT = 4  # kKept in quantize.cu
_MOST_THREADS = 256
_NEEDS = {torch.int8: "sm_80", torch.float8_e4m3fn: "sm_89"}


def round_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes `[m, k]` in the order of the kernels, see quantize.cu, and float32 scales `[m]`.

    Args:
        x: `[m, k]`, float16 or bfloat16, contiguous; k is a multiple of `UNIT`.
    """
    return _launch(x, torch.int8, 0, None, 1.0)


def round_e4m3(
    x: Tensor, columns: int, factor: float = 1.0, rows: SortedRows | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in float8_e4m3fn, and `factor` times the sums of the codes, float32 `[m, k / columns rounded up]`.

    Rows of the sums begin at multiples of 16 bytes.

    Args:
        columns: of a sum, 64 or 128.
        rows: x are tokens, and the results those of `rows.gather(x)`.
    """
    m, k = len(x) if rows is None else rows.padded, x.shape[1]
    stride = blocks((k, 4 * columns)) * 4
    sums = x.new_empty(m, stride, dtype=torch.float32)[:, : blocks((k, columns))]
    return *_launch(x, torch.float8_e4m3fn, columns, sums, factor, rows), sums


def _launch(
    x: Tensor, dtype: torch.dtype, columns: int, sums: Tensor | None, factor: float, rows: SortedRows | None = None
) -> tuple[Tensor, Tensor]:
    m, k = len(x) if rows is None else rows.padded, x.shape[1]
    codes = torch.empty(m, k, dtype=dtype, device=x.device)
    scales = x.new_empty(m, dtype=torch.float32)
    units = k // UNIT
    _KERNELS[x.dtype, dtype, columns](
        m if rows is None else rows.count,
        min(_MOST_THREADS, 32 * blocks((units, 32 * _KEPT))),
        x=x,
        order=None if rows is None else rows.order,
        per_token=1 if rows is None else rows.per_token,
        codes=codes,
        scales=scales,
        sums=sums,
        units=units,
        stride=0 if sums is None else sums.stride(0),
        factor=factor,
        dependent=True,
    )
    return codes, scales


_KERNELS = {
    (dtype, codes, columns): unit(
        "wna8/quantize.cu",
        needs=_NEEDS[codes],
        ELEMENT=ELEMENTS[dtype],
        E4M3=int(codes == torch.float8_e4m3fn),
        COLUMNS=columns,
    ).kernel("quantize_wna8", _PARAMETERS)
    for dtype, (codes, columns) in product(
        HALVES, ((torch.int8, 0), (torch.float8_e4m3fn, 64), (torch.float8_e4m3fn, 128))
    )
}

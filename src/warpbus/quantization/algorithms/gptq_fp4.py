"""GPTQ to 4-bit floating-point numbers, NVFP4 and MXFP4: their grid is not uniform, so the columns are rounded here.

Order, target and the propagation of errors are those of `gptq`. Coordinate descent, whose steps are integers, is left
out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from warpbus.kernels.reference.fp4 import fp4_scales
from warpbus.kernels.reference.gptq import column_threads
from warpbus.qtensor import QTensor, Scheme, pack
from warpbus.qtensor.fp4 import fp4_codes, fp4_values
from warpbus.quantization.algorithms.factored import FactoredHessian, corrected_target, factored_loss
from warpbus.quantization.algorithms.linear_algebra import narrow, product

_BLOCK = 128
"""Columns whose errors reach the columns behind them in one product."""


def fp4_matrices(
    weight: Tensor, hessians: Sequence[Tensor], scheme: Scheme, *, drift: Tensor | None, names: Sequence[str]
) -> list[tuple[QTensor, Tensor]]:
    """Quantize some rows of several matrices; arguments and result as of `gptq.gptq_matrices`."""
    _, parts, height, size = weight.shape
    count = scheme.groups(size, names[0])
    found = []
    for index, (own, factor) in enumerate(zip(weight, FactoredHessian.unstack(hessians), strict=True)):
        codes, scales, losses = [], [], []
        for part in own:
            columns = part.float().T[factor.order].contiguous()
            if drift is not None and drift.numel():
                columns = corrected_target(columns, factor, narrow(drift[index])[factor.order][:, factor.order])
            rounded = _round(columns, factor, scheme, count)
            codes.append(rounded[0])
            scales.append(rounded[1])
            losses.append(torch.stack([factored_loss(each, factor) for each in (rounded[2], columns)]))
        packed = pack(torch.cat(codes), scheme.bits)
        quantized = QTensor(scheme, packed, torch.cat(scales), None, (parts * height, size))
        found.append((quantized, torch.stack(losses)))
    return found


def _round(columns: Tensor, factor: FactoredHessian, scheme: Scheme, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round columns one after the other.

    Args:
        columns: float32 `[in, rows]`, in the order of the Hessian.
        count: groups of a row.

    Returns:
        the codes, uint8 `[rows, in]`, and scales, float32 `[rows, groups]`, of the columns as they stand in the matrix,
        and the errors, float32 `[in, rows]`, in the order of the Hessian.
    """
    size = len(columns)
    natural = columns[factor.inverse_order].T.unflatten(1, (count, -1))
    scales = fp4_scales(natural, scheme, factor.importance.view(count, -1))
    of_column = scales.T[factor.order // (size // count)]
    wanted, errors = columns.clone(), torch.empty_like(columns)
    codes = torch.empty(columns.shape, dtype=torch.uint8, device=columns.device)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        with column_threads(columns[None, start:stop]):
            for index in range(start, stop):
                codes[index] = fp4_codes(wanted[index] / of_column[index])
                errors[index] = columns[index] - fp4_values(codes[index], torch.float32) * of_column[index]
                carried = factor.upper[index, index + 1 : stop, None] * errors[index]
                wanted[index + 1 : stop] += carried
        if stop < size:
            wanted[stop:] += product(factor.narrow_upper[start:stop, stop:].T, narrow(errors[start:stop]))
    return codes[factor.inverse_order].T.contiguous(), scales, errors

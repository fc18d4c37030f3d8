"""GPTQ (Frantar et al., 2022): round one column after the other and let the columns to come make up for the error.

The error that counts is tr(dW H dW^T), H = X^T X of the layer's inputs X. Columns go in order of falling diagonal of
H ("activation order"), while the groups stay those of the original columns and their grids are chosen beforehand, so
the result needs no index of the columns.
"""

import torch
from torch import Tensor

from warpbus.kernels.ops.gptq import LARGEST_BLOCK, clip_search, round_columns
from warpbus.qtensor import QTensor, Scheme
from warpbus.quantization.algorithms.aim import aim
from warpbus.quantization.algorithms.descent import descend
from warpbus.quantization.algorithms.factored import FactoredHessian, factored
from warpbus.quantization.algorithms.grid import check_scales, check_weight, fit
from warpbus.quantization.algorithms.precision import fast_products

# Sweeps of coordinate descent after the columns are rounded: on glm-poet more of them gain little.
SWEEPS = 3


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    *,
    scale_dtype: torch.dtype,
    damping: float = 0.01,
    activation_order: bool = True,
    clip: bool = True,
    sweeps: int = SWEEPS,
    name: str = "weight",
) -> QTensor:
    """Quantize a matrix for the inputs that it is going to meet.

    Args:
        weight: floating `[out, in]`.
        hessian: float32 `[in, in]`, the second moments X^T X of its inputs, in any unit. A column that never had an
            input (diagonal 0) is rounded to nearest.
        scheme: bits, groups, symmetric or not.
        scale_dtype: dtype of the scales; they are rounded to it before the codes are chosen.
        damping: this share of the mean diagonal is added to the diagonal.
        activation_order: columns with the largest diagonal first; otherwise as they stand.
        clip: choose each group's range by its error; otherwise the full range.
        sweeps: of coordinate descent afterwards (see `descent`); 0 leaves the result of GPTQ.
        name: the matrix, for messages.

    Returns:
        the quantized matrix on the device of `weight`.

    Raises:
        SchemeError: if the group size does not divide `in`.
        NumericError: if there is NaN or infinity in either matrix, or the Hessian is not positive definite.
    """
    scheme.groups(weight.shape[1], name)
    check_weight(weight, name)
    prepared = factored(hessian, damping=damping, activation_order=activation_order, name=name)
    return gptq_rows(weight[None], prepared, scheme, scale_dtype=scale_dtype, clip=clip, sweeps=sweeps, name=name)[0]


def gptq_rows(
    weight: Tensor,
    hessian: FactoredHessian,
    scheme: Scheme,
    *,
    scale_dtype: torch.dtype,
    drift: Tensor | None = None,
    clip: bool = True,
    sweeps: int = SWEEPS,
    name: str = "weight",
) -> tuple[QTensor, Tensor]:
    """Quantize some rows of a matrix; they do not depend on the others.

    Args:
        weight: floating `[parts, rows, in]`: parts of one height, each of which is computed by itself, so that the bits
            of a part do not depend on the other parts.
        hessian: of the matrix.
        scheme, scale_dtype, clip, sweeps, name: as in `gptq`.
        drift: float32 `[in, in]`, see `aim`; without it the weights themselves are aimed at.

    Returns:
        the quantized rows `[parts * rows, in]`, and float64 `[parts, 2]`: of each part tr(dW H dW^T) and tr(W H W^T),
        without damping, W being what was aimed at.

    Raises:
        NumericError: if a scale does not fit `scale_dtype`.
    """
    parts, height, size = weight.shape
    count = scheme.groups(size, name)
    order = hessian.order
    columns = weight.float().transpose(1, 2)[:, order].contiguous()
    if drift is not None:
        drift = drift[order][:, order]
        for part in columns:
            part.copy_(aim(part, hessian, drift))
        del drift
    with fast_products(weight.device):
        scales, zeros = _grid(columns, hessian, scheme, scale_dtype, count, clip)
        check_scales(scales.to(scale_dtype), name)
        groups = (order // (size // count)).int()
        centred, errors = _round(columns, hessian.upper, scales, zeros, groups, scheme)
        if sweeps:
            gradient = _products(hessian.hessian, errors)
            descend(gradient, hessian.hessian, centred, scales, zeros, groups, scheme, scale_dtype, sweeps)
            del gradient
            expanded = scales[:, groups.long()]
            errors = torch.addcmul(columns, centred, expanded, value=-1)
            del expanded
        losses = torch.stack((_losses(errors, hessian), _losses(columns, hessian)), dim=1)
    del columns, errors
    codes = centred.add_(zeros[:, groups.long()]).to(torch.uint8)[:, hessian.inverse_order]
    codes = codes.transpose(1, 2).reshape(parts * height, size)
    grids = [grid.transpose(1, 2).reshape(parts * height, count) for grid in (scales, zeros)]
    stored = QTensor.from_codes(scheme, codes, grids[0].to(scale_dtype), None if scheme.symmetric else grids[1])
    return stored, losses


def _grid(
    columns: Tensor, hessian: FactoredHessian, scheme: Scheme, scale_dtype: torch.dtype, count: int, clip: bool
) -> tuple[Tensor, Tensor]:
    """Scales and zero points, both float32 `[parts, groups, rows]`."""
    inverse, size = hessian.inverse_order, columns.shape[1]
    found = []
    for part in columns:
        weight = part[inverse].T.contiguous()
        if clip:
            bits, symmetric = scheme.bits, scheme.symmetric
            found.append(clip_search(weight, hessian.importance, size // count, bits, symmetric, scale_dtype))
        else:
            found.append(fit(weight.unflatten(1, (count, -1)), scheme, scale_dtype))
    scales, zeros = zip(*found, strict=True)
    return torch.stack([each.T for each in scales]).contiguous(), torch.stack([each.T for each in zeros]).contiguous()


def _round(
    columns: Tensor, upper: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, scheme: Scheme
) -> tuple[Tensor, Tensor]:
    """The codes less their zero points and the errors W - Q of all columns, both float32 `[parts, in, rows]`."""
    target, errors, centred = columns.clone(), torch.empty_like(columns), torch.empty_like(columns)
    for start in range(0, columns.shape[1], LARGEST_BLOCK):
        block = slice(start, start + LARGEST_BLOCK)
        within, members = upper[block, block], groups[block]
        codes, errors[:, block] = round_columns(
            columns[:, block], target[:, block], within, scales, zeros, members, scheme.max_code
        )
        torch.sub(codes, zeros[:, members.long()], out=centred[:, block])
        stop = start + codes.shape[1]
        for part, error in zip(target, errors, strict=True):
            part[stop:].addmm_(upper[block, stop:].T, error[block])
    return centred, errors


def _products(hessian: Tensor, errors: Tensor) -> Tensor:
    """H E of each part."""
    return torch.stack([hessian @ part for part in errors])


def _losses(errors: Tensor, hessian: FactoredHessian) -> Tensor:
    """tr(E^T H E) of each part, without damping: float64 `[parts]`."""
    found = []
    for part in errors:
        weighted = (hessian.hessian @ part).sub_(part * hessian.damped[:, None])
        found.append(weighted.mul_(part).sum(0).sum(dtype=torch.float64))
    return torch.stack(found)

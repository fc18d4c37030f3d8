"""GPTQ (Frantar et al., 2022): round one column after the other and let the columns to come make up for the error.

The error that counts is tr(dW H dW^T), H = X^T X of the layer's inputs X. Columns go in order of falling diagonal of
H ("activation order"), while the groups stay those of the original columns and their grids are chosen beforehand, so
the result needs no index of the columns.
"""

import torch
from torch import Tensor

from warpbus.cuda.graphs import Call, Replayed, at_once
from warpbus.kernels.ops.gptq import LARGEST_BLOCK, clip_search, round_columns
from warpbus.qtensor import QTensor, Scheme
from warpbus.quantization.algorithms.aim import aim
from warpbus.quantization.algorithms.descent import SPAN, carry_over, descend
from warpbus.quantization.algorithms.factored import FactoredHessian, factored
from warpbus.quantization.algorithms.grid import check_scales, check_weight, fit
from warpbus.quantization.algorithms.precision import narrow, product

# Sweeps of coordinate descent after the columns are rounded: on glm-poet a third one takes another 0.5 % off the error
# on the calibration data, and nothing off the perplexity on other data.
SWEEPS = 2


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
    run: Replayed | None = None,
    name: str = "weight",
) -> tuple[QTensor, Tensor]:
    """Quantize some rows of a matrix; they do not depend on the others.

    Args:
        weight: floating `[parts, rows, in]`: parts of one height, each of which is computed by itself, so that the bits
            of a part do not depend on the other parts.
        hessian: of the matrix.
        scheme, scale_dtype, clip, sweeps, name: as in `gptq`.
        drift: float32 `[in, in]`, see `aim`; without it the weights themselves are aimed at.
        run: what launches the loops over the columns as one, where many matrices of one shape are to come.

    Returns:
        the quantized rows `[parts * rows, in]`, and float64 `[parts, 2]`: of each part tr(dW H dW^T) and tr(W H W^T),
        without damping, W being what was aimed at.

    Raises:
        NumericError: if a scale does not fit `scale_dtype`.
    """
    parts, height, size = weight.shape
    drift = weight.new_empty(0) if drift is None else drift
    settings = _settings(scheme, scale_dtype, clip=clip, sweeps=sweeps)
    codes, scales, zeros, losses = (run or at_once)(
        _solve, *(weight, drift, *hessian.tensors), count=scheme.groups(size, name), **settings
    )
    codes, scales, zeros = (each.transpose(1, 2).reshape(parts * height, -1) for each in (codes, scales, zeros))
    stored = scales.to(scale_dtype)
    check_scales(stored, name)
    return QTensor.from_codes(scheme, codes, stored, None if scheme.symmetric else zeros), losses


def call_for(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    scheme: Scheme,
    *,
    scale_dtype: torch.dtype,
    device: torch.device,
) -> Call:
    """What `gptq_rows` gives its `run` for weights `[parts, rows, in]` of a dtype with a drift; of any content."""
    size = shape[2]
    hessian = FactoredHessian.blank(size, device)
    weight, drift = torch.empty(shape, dtype=dtype, device=device), torch.empty_like(hessian.hessian)
    return Call(
        _solve,
        (weight, drift, *hessian.tensors),
        {"count": scheme.groups(size, "weight")} | _settings(scheme, scale_dtype),
    )


def _settings(
    scheme: Scheme, scale_dtype: torch.dtype, *, clip: bool = True, sweeps: int = SWEEPS
) -> dict[str, object]:
    return {"scheme": scheme, "scale_dtype": scale_dtype, "clip": clip, "sweeps": sweeps}


def _solve(
    weight: Tensor,
    drift: Tensor,
    *hessian: Tensor,
    count: int,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    clip: bool,
    sweeps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`gptq_rows` without a wait for the GPU; `drift` is empty where there is none, `count` are the groups of a row.

    Returns:
        the codes, uint8 `[parts, in, rows]`, their scales and zero points, float32 `[parts, groups, rows]`, and what
        `gptq_rows` says of the losses.
    """
    factors = FactoredHessian(*hessian)
    order, size = factors.order, weight.shape[2]
    columns = weight.float().transpose(1, 2)[:, order].contiguous()
    if drift.numel():
        drift = narrow(drift)[order][:, order]
        for part in columns:
            part.copy_(aim(part, factors, drift))
    scales, zeros = _grid(columns, factors, scheme, scale_dtype, count, clip)
    groups = (order // (size // count)).int()
    members = torch.argsort(groups, stable=True).view(count, -1)
    centred, left = _round(columns, factors, scales, zeros, groups, scheme.max_code)
    if sweeps:
        gradient = torch.stack([product(factors.narrow_hessian, part) for part in left])
        descend(
            gradient,
            *(factors, centred, scales, zeros, groups, members),
            max_code=scheme.max_code,
            scale_dtype=scale_dtype,
            sweeps=sweeps,
        )
    errors = torch.addcmul(columns, centred, scales[:, groups.long()], value=-1)
    losses = torch.stack((_losses(errors, factors), _losses(columns, factors)), dim=1)
    codes = centred.add_(zeros[:, groups.long()]).to(torch.uint8)[:, factors.inverse_order]
    return codes, scales, zeros, losses


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
    columns: Tensor, hessian: FactoredHessian, scales: Tensor, zeros: Tensor, groups: Tensor, max_code: int
) -> tuple[Tensor, Tensor]:
    """The codes less their zero points, float32, and the errors W - Q, narrow, of all columns: `[parts, in, rows]`."""
    upper, narrowed = hessian.upper, hessian.narrow_upper
    target, centred = columns.clone(), torch.empty_like(columns)
    errors = torch.empty_like(columns, dtype=narrowed.dtype)
    for first in range(0, columns.shape[1], SPAN):
        end = min(first + SPAN, columns.shape[1])
        for start in range(first, end, LARGEST_BLOCK):
            block = slice(start, min(start + LARGEST_BLOCK, end))
            round_columns(
                *(columns[:, block], target[:, block], upper[block, block], scales, zeros, groups[block], max_code),
                centred=centred[:, block],
                errors=errors[:, block],
            )
            carry_over(target[:, block.stop : end], narrowed[block, block.stop : end], errors[:, block], sign=1)
        carry_over(target[:, end:], narrowed[first:end, end:], errors[:, first:end], sign=1)
    return centred, errors


def _losses(errors: Tensor, hessian: FactoredHessian) -> Tensor:
    """tr(E^T H E) of each part, without damping: float64 `[parts]`."""
    found = []
    for part in errors:
        weighted = product(hessian.narrow_hessian, narrow(part)).sub_(part * hessian.damped[:, None])
        found.append(weighted.mul_(part).sum(0).sum(dtype=torch.float64))
    return torch.stack(found)

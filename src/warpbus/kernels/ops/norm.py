"""`rms_norm` and `layer_norm` over the last axis, with the residual's addition in the same pass."""

import itertools
from typing import Any, overload

import torch
from torch import Tensor

from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import ELEMENTS, aligned, blocks, check_alike, check_shape, per_dtype
from warpbus.kernels.reference import norm as reference

_RMS_NORM = per_dtype(
    "step/norm.cu",
    "rms_norm",
    "const ELEMENT* x, const ELEMENT* residual, const ELEMENT* weight, ELEMENT* out, ELEMENT* total, "
    "long long rows, long long x_stride, int width, int warps, float eps, int vectorised",
)
_LAYER_NORM = per_dtype(
    "step/norm.cu",
    "layer_norm",
    "const ELEMENT* x, const ELEMENT* residual, const ELEMENT* weight, const ELEMENT* bias, ELEMENT* out, "
    "ELEMENT* total, long long rows, long long x_stride, int width, int warps, float eps, int vectorised",
)

_CHUNK = 8  # elements: kChunk in step/chunk.cuh
_CHUNKS_OF_A_THREAD = 2
_WARPS_OF_A_BLOCK = 8  # where a row takes no more
_MOST_WARPS = 32


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Root-mean-square normalization (Zhang and Sennrich, 2019): `x / sqrt(mean(x^2) + eps) * weight`.

    The mean and the normalized values are computed in float32; these are rounded to the dtype of `x` and then
    multiplied by the weight.

    Args:
        x, weight: `[..., d]` and `[d]`, float32, float16 or bfloat16, any sizes; copied where rows of x are not at
            equal distances, or a row is not contiguous.
        residual: in the shape of `x`. With it, `x + residual` (rounded to the dtype) is normalized.

    Returns:
        `[..., d]`, contiguous, in the dtype of `x`; with a residual, that and the sum `x + residual`. The same bits
        at every run, and for a row among any others.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    _check("rms_norm", x, weight, None, residual)
    if residual is None:
        return _rms_norm(x, weight, eps)
    return _add_rms_norm(x, residual, weight, eps)


@overload
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer normalization (Ba et al., 2016): `(x - mean) / sqrt(variance + eps) * weight + bias`.

    Args:
        x, weight, bias: `[..., d]`, `[d]` and `[d]` or none, float32, float16 or bfloat16, any sizes; copied where rows
            of x are not at equal distances, or a row is not contiguous.
        residual: in the shape of `x`. With it, `x + residual` (rounded to the dtype) is normalized.

    Returns:
        `[..., d]`, contiguous, in the dtype of `x`, computed in float32 and rounded once; with a residual, that and
        the sum `x + residual`. The same bits at every run, and for a row among any others.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    _check("layer_norm", x, weight, bias, residual)
    if residual is None:
        return _layer_norm(x, weight, bias, eps)
    return _add_layer_norm(x, residual, weight, bias, eps)


def _check(operator: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    if x.dim() == 0:
        raise TensorError(f"{operator}: x is a scalar, expected [..., d]: reshape it")
    others = {"weight": weight, "bias": bias, "residual": residual}
    given = {name: tensor for name, tensor in others.items() if tensor is not None}
    check_alike(operator, tuple(ELEMENTS), x=x, **given)
    expected = {"weight": (x.shape[-1],), "bias": (x.shape[-1],), "residual": tuple(x.shape)}
    check_shape(operator, expected, f"x has shape {list(x.shape)}", **given)


def warps_of_row(width: int) -> int:
    """How many warps share a row of `width` elements: a power of two, so that each thread has two chunks or fewer."""
    warps = 1
    while warps < _MOST_WARPS and 32 * warps * _CHUNKS_OF_A_THREAD * _CHUNK < width:
        warps *= 2
    return warps


def _launch_rms(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, weight, residual = _in_rows(x), weight.contiguous(), None if residual is None else residual.contiguous()
    out, total = x.new_empty(x.shape), x if residual is None else x.new_empty(x.shape)
    if x.numel():
        grid, block, shape = _geometry(x, residual, weight)
        _RMS_NORM[x.dtype](
            grid, block, x=x, residual=residual, weight=weight, out=out, total=total, eps=eps, **shape, dependent=True
        )
    return out, total


def _launch_layer(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    x, weight, residual = x.contiguous(), weight.contiguous(), None if residual is None else residual.contiguous()
    bias = None if bias is None else bias.contiguous()
    out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    if x.numel():
        grid, block, shape = _geometry(x, residual, weight, bias)
        _LAYER_NORM[x.dtype](
            grid,
            block,
            x=x,
            residual=residual,
            weight=weight,
            bias=bias,
            out=out,
            total=total,
            eps=eps,
            **shape,
            dependent=True,
        )
    return out, total


def _in_rows(x: Tensor) -> Tensor:
    """x itself, if its rows are contiguous and at equal distances; else a copy."""
    if x.is_contiguous():
        return x
    outer = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    even = all(before == stride * size for (_, before), (size, stride) in itertools.pairwise(outer))
    return x if even and (x.stride(-1) == 1 or x.shape[-1] == 1) else x.contiguous()


def _distance(x: Tensor) -> int:
    """From a row of x to the next one, in elements."""
    return next((stride for size, stride in zip(x.shape[-2::-1], x.stride()[-2::-1], strict=True) if size > 1), 0)


def _geometry(x: Tensor, *others: Tensor | None) -> tuple[int, int, dict[str, Any]]:
    """Blocks, threads of a block, and the kernels' arguments rows, x_stride, width, warps (of a row) and vectorised."""
    width, distance = x.shape[-1], _distance(x)
    rows = x.numel() // width
    warps = warps_of_row(width)
    warps_of_block = max(warps, _WARPS_OF_A_BLOCK)
    whole = width % _CHUNK == 0 and distance % _CHUNK == 0
    sizes = {"rows": rows, "x_stride": distance, "width": width, "warps": warps}
    vectorised = whole and aligned(x, *(tensor for tensor in others if tensor is not None))
    return blocks((rows, warps_of_block // warps)), 32 * warps_of_block, {**sizes, "vectorised": vectorised}


_rms_norm = operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    cuda=lambda x, weight, eps: _launch_rms(x, None, weight, eps)[0],
    reference=reference.rms_norm,
    fake=lambda x, weight, eps: x.new_empty(x.shape),
)
_add_rms_norm = operator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    cuda=_launch_rms,
    reference=reference.add_rms_norm,
    fake=lambda x, residual, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
_layer_norm = operator(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> Tensor",
    cuda=lambda x, weight, bias, eps: _launch_layer(x, None, weight, bias, eps)[0],
    reference=reference.layer_norm,
    fake=lambda x, weight, bias, eps: x.new_empty(x.shape),
)
_add_layer_norm = operator(
    "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
    cuda=_launch_layer,
    reference=reference.add_layer_norm,
    fake=lambda x, residual, weight, bias, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
)

"""`wna16`: a linear layer whose weights have 2 to 8 bits and whose activations are floating point.

Three kernels share the weights' one layout (`packed`): `wna16/decode.cu` reads them once for a few tokens and does the
norm before and what follows in the same pass, `wna16/sm90_wna16.cu` multiplies on Hopper's wgmma and
`wna16/sm80_wna16.cu` by mma.sync on every GPU since Ampere. If allowed to, `wna8` rounds many tokens to 8 bits.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.jit import architecture
from warpbus.kernels.operators import operator
from warpbus.kernels.ops import wna8, wna16_decode, wna16_sm80, wna16_sm90
from warpbus.kernels.ops.activation import swiglu
from warpbus.kernels.ops.arguments import HALVES, check_alike, check_projection
from warpbus.kernels.ops.norm import rms_norm
from warpbus.kernels.ops.packed import TILE_ROWS, PackedWeight, check_weight_only, scheme_of, unpack
from warpbus.kernels.reference.wna8 import wna8_linear as reference_wna8
from warpbus.kernels.reference.wna16 import finish
from warpbus.kernels.reference.wna16 import wna16_linear as reference_linear
from warpbus.qtensor import QTensor


def wna16_linear(
    x: Tensor,
    weight: PackedWeight | QTensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    activation: str = "none",
    activation_dtype: torch.dtype | None = None,
) -> Tensor:
    """`residual + activation(norm(x) @ weight.T + bias)`.

    On a GPU from Hopper on, all of it is one kernel where x has up to 16 rows; the norm too, where x fits into shared
    memory beside the weights in flight (16 rows of 4096). With more rows on Hopper, the product's kernel adds the bias
    and computes swiglu. Otherwise kernels of their own compute what surrounds the product.

    Args:
        x: `[..., k]`, finite: an infinite element makes results NaN or infinite. With a `PackedWeight` in its dtype,
            float16 or bfloat16; with a `QTensor` any floating dtype, and the weight is dequantized at every call.
        weight: `[n, k]`, on the same device.
        bias: `[n]`.
        norm: weight `[k]` of an RMSNorm that x goes through first, with `eps`.
        residual: in the shape of the result.
        activation: "none", or "swiglu": `silu(gate) * up`, where the first half of the weight's rows gives the gate.
        activation_dtype: int8 or float8_e4m3fn: from 512 tokens on, round `norm(x)` to it, with a scale per token,
            where `wna8.runs_on` the GPU and `wna8.supports` the scheme.

    Returns:
        `[..., n]`, or `[..., n / 2]` with swiglu, in the dtype of `x`; summed in float32. The same bits at every run.

    Raises:
        TensorError: other shapes, dtypes or devices, or a w8a8 weight.
        UsageError: no such activation.
    """
    check_weight_only("wna16_linear", weight.scheme)
    n, k = weight.shape
    there = check_projection("wna16_linear", n, k, x, activation, bias=bias, norm=norm, residual=residual)
    if isinstance(weight, QTensor):
        return reference_linear(x, weight, bias, norm, eps, residual, activation)
    check_alike("wna16_linear", HALVES, x=x, scales=weight.scales, **there)
    m, group = prod(x.shape[:-1]), weight.scheme.group_size or 0
    columns = n // 2 if activation == "swiglu" else n
    out = _wna16(
        x.reshape(m, k),
        *(weight.codes, weight.scales, weight.zeros, n, weight.scheme.bits, group),
        *(bias, norm, eps, None if residual is None else residual.reshape(m, columns), activation),
        activation_dtype,
    )
    # A view is nothing that LoRA could add its part to in place.
    return out if x.dim() == 2 else out.view(*x.shape[:-1], columns)


class _Around(NamedTuple):
    """The operations around the product: arguments of `wna16_linear`."""

    bias: Tensor | None
    norm: Tensor | None
    eps: float
    residual: Tensor | None
    activation: str
    activation_dtype: torch.dtype | None


def _launch(x: Tensor, weight: PackedWeight, around: _Around) -> Tensor:
    bias, norm, eps, residual, activation, codes = around
    m, (n, k) = len(x), weight.shape
    gated = activation == "swiglu"
    if 0 in (m, n, k):
        return reference_linear(x, unpack(weight), bias, norm, eps, residual, activation)
    bias = None if bias is None else bias.contiguous()
    able = capabilities(architecture(x.device))
    whole_tiles = n // 2 % TILE_ROWS == 0  # of the gate and of up
    if able.tma and wna16_decode.fits(x, weight) and (whole_tiles or not gated):
        if norm is not None and not wna16_decode.norms(x, weight):
            x, norm = rms_norm(x, norm, eps), None
        out = x.new_empty(m, n // 2 if gated else n)
        residual = None if residual is None else residual.contiguous()
        wna16_decode.multiply(x.contiguous(), weight, bias, norm, eps, residual, gated, out)
        return out
    x = x.contiguous() if norm is None else rms_norm(x, norm, eps)
    rounded = None if codes is None or not wna8.fits(x, weight, codes) else codes
    joins = able.wgmma if rounded is None else wna8.joins_gates(able.arch, rounded)
    joined = gated and whole_tiles and joins  # by the product's own kernel
    out = x.new_empty(m, n // 2 if joined else n)
    if rounded is not None:
        wna8.multiply(x, weight, bias, out, rounded, gated=joined)
    elif able.wgmma:
        wna16_sm90.multiply(x, weight, bias, out, gated=joined)
    else:
        wna16_sm80.multiply(x, weight, bias, out)
    if gated and not joined:
        out = swiglu(out)
    return out if residual is None else out.add_(residual)


def _reference(x: Tensor, packed: PackedWeight, around: _Around) -> Tensor:
    weight, (bias, norm, eps, residual, activation, codes) = unpack(packed), around
    if codes is None or len(x) < wna8.LEAST_ROWS or not wna8.supports(weight.scheme, codes):
        return reference_linear(x, weight, bias, norm, eps, residual, activation)
    if norm is not None:
        x = rms_norm(x, norm, eps)
    return finish(reference_wna8(x, weight, bias, codes), residual, activation)


def _fake(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, n: int, *others: Any) -> Tensor:
    activation = others[-2]
    return x.new_empty(x.shape[0], n // 2 if activation == "swiglu" else n)


def _packing(implementation: Callable[[Tensor, PackedWeight, _Around], Tensor]) -> Callable[..., Tensor]:
    """An implementation of the operator, whose parameters are tensors and numbers, from one that takes the weight."""

    def run(
        x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, n: int, bits: int, group: int, *others: Any
    ) -> Tensor:
        scheme = scheme_of(bits, group, zeros is None)
        return implementation(x, PackedWeight(codes, scales, zeros, scheme, (n, x.shape[1])), _Around(*others))

    return run


_wna16 = operator(
    "wna16(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, int n, int bits, int group, Tensor? bias, "
    "Tensor? norm, float eps, Tensor? residual, str activation, ScalarType? activation_dtype) -> Tensor",
    cuda=_packing(_launch),
    reference=_packing(_reference),
    fake=_fake,
)

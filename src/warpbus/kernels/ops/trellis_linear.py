"""`trellis_linear`: a linear layer whose weights are a trellis of 2 or 3 bits, and whose activations have 16.

`trellis/decode.cu` reads the codes once for a few tokens and does what surrounds the product in the same pass. For more
tokens `trellis/dequantize.cu` writes weights into a buffer, which cuBLAS multiplies.
"""

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor

from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.activation import swiglu
from warpbus.kernels.ops.arguments import HALVES, check_alike, check_projection
from warpbus.kernels.ops.norm import rms_norm
from warpbus.kernels.ops.trellis_decode import MOST_TOKENS, TrellisPlan, multiply, plan_of
from warpbus.kernels.ops.trellis_dequantize import multiply_dequantized, times_dequantized
from warpbus.kernels.ops.trellis_packed import PackedTrellis
from warpbus.kernels.reference.wna16 import wna16_linear as reference_linear
from warpbus.qtensor import QTensor, Scheme
from warpbus.qtensor.scheme import TRELLIS
from warpbus.qtensor.trellis import TILE

_PASSES = ((2**26, 3),)
"""Weights of a matrix, and how many times its codes are read for 16 rows each before it is faster to dequantize them.

On an H200 16 rows take 22 us with 4096 x 4096 weights, 54 with 4096 x 13696 and 48 with 27392 x 4096; to dequantize the
weights and multiply them takes 28, 96 and 180 us.
"""


def trellis_linear(
    x: Tensor,
    weight: PackedTrellis | QTensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """`residual + activation(norm(x) @ weight.T + bias)`.

    On a GPU all of it is one kernel where x has up to 16 rows; it rounds x and the rotated x to float16, with a power
    of two for each row, and this to integers of 16 bits. Large matrices are multiplied so by up to 48 rows, 16 at a
    time. With more rows the weights are dequantized, 64 MB at a time.

    Args:
        x: `[..., k]`, finite. With a `PackedTrellis` in its dtype, float16 or bfloat16; with a `QTensor` any floating
            dtype, and the weight is dequantized at every call.
        weight: `[n, k]`, on the same device.
        bias, norm, eps, residual, activation: see `wna16_linear`.

    Returns:
        `[..., n]`, or `[..., n / 2]` with swiglu, in the dtype of `x`; summed in float32. The same bits at every run.

    Raises:
        TensorError: other shapes, dtypes or devices.
        UsageError: no such activation.
    """
    n, k = weight.shape
    given = check_projection("trellis_linear", n, k, x, activation, bias=bias, norm=norm, residual=residual)
    if isinstance(weight, QTensor):
        return reference_linear(x, weight, bias, norm, eps, residual, activation)
    check_alike("trellis_linear", HALVES, x=x, **given)
    if x.dtype != weight.dtype:
        raise TensorError(f"trellis_linear: x is {x.dtype}, the weight expects {weight.dtype}: convert it with .to()")
    m, columns = prod(x.shape[:-1]), n // 2 if activation == "swiglu" else n
    out = _trellis(
        x.reshape(m, k),
        *(weight.codes, weight.scales, weight.signs, n, weight.scheme.bits),
        *(bias, norm, eps, None if residual is None else residual.reshape(m, columns), activation),
    )
    # A view is nothing that LoRA could add its part to in place.
    return out if x.dim() == 2 else out.view(*x.shape[:-1], columns)


def times_trellis(dy: Tensor, weight: PackedTrellis) -> Tensor:
    """`dy @ weight` for dy `[m, n]` in the dtype of the weight `[n, k]`; summed in float32."""
    product: Tensor = _times(dy, weight.codes, weight.scales, weight.signs, weight.shape[1], weight.scheme.bits)
    return product


def _launch(
    x: Tensor,
    weight: PackedTrellis,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    activation: str,
) -> Tensor:
    m, n, gated = len(x), weight.shape[0], activation == "swiglu"
    if m == 0:
        return x.new_empty(0, n // 2 if gated else n)
    x = x.contiguous()
    bias = None if bias is None else bias.contiguous()
    if plans := _plans(x, weight, gated):
        out = x.new_empty(m, n // 2 if gated else n)
        residual = None if residual is None else residual.contiguous()
        if norm is not None and any(plan.slices > 1 for plan in plans):
            x, norm = rms_norm(x, norm, eps), None
        for number, plan in enumerate(plans):
            rows = slice(MOST_TOKENS * number, MOST_TOKENS * (number + 1))
            added = None if residual is None else residual[rows]
            multiply(x[rows], weight, bias, norm, eps, added, gated, out[rows], plan)
        return out
    if norm is not None:
        x = rms_norm(x, norm, eps)
    out = multiply_dequantized(x, weight, bias)
    if gated:
        out = swiglu(out)
    return out if residual is None else out.add_(residual)


def _plans(x: Tensor, weight: PackedTrellis, gated: bool) -> list[TrellisPlan]:
    """How 16 rows of x at a time are multiplied by the codes; none where the weights are to be dequantized."""
    n, k = weight.shape
    passes = next((passes for least, passes in _PASSES if n * k >= least), 1)
    if len(x) > passes * MOST_TOKENS or (gated and n // 2 % TILE):  # a tile would have rows of the gate and of up
        return []
    found = [plan_of(rows, weight, gated) for rows in x.split(MOST_TOKENS)]
    plans = [plan for plan in found if plan is not None]
    return plans if len(plans) == len(found) else []


def _reference(x: Tensor, weight: PackedTrellis, *others: Any) -> Tensor:
    return reference_linear(x, weight.unpack(), *others)


def _packing(implementation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An implementation of the operator, whose parameters are tensors and numbers, from one that takes the weight."""

    def run(x: Tensor, codes: Tensor, scales: Tensor, signs: Tensor, n: int, bits: int, *others: Any) -> Tensor:
        scheme = Scheme(bits, None, element=TRELLIS)
        return implementation(x, PackedTrellis(codes, scales, signs, scheme, (n, x.shape[1]), x.dtype), *others)

    return run


def _fake(x: Tensor, codes: Tensor, scales: Tensor, signs: Tensor, n: int, *others: Any) -> Tensor:
    return x.new_empty(x.shape[0], n // 2 if others[-1] == "swiglu" else n)


def _backward(dy: Tensor, codes: Tensor, scales: Tensor, signs: Tensor, k: int, bits: int) -> Tensor:
    scheme = Scheme(bits, None, element=TRELLIS)
    return times_dequantized(dy, PackedTrellis(codes, scales, signs, scheme, (dy.shape[1], k), dy.dtype))


_trellis = operator(
    "trellis(Tensor x, Tensor codes, Tensor scales, Tensor signs, int n, int bits, Tensor? bias, Tensor? norm, "
    "float eps, Tensor? residual, str activation) -> Tensor",
    cuda=_packing(_launch),
    reference=_packing(_reference),
    fake=_fake,
)
_times = operator(
    "trellis_times(Tensor dy, Tensor codes, Tensor scales, Tensor signs, int k, int bits) -> Tensor",
    cuda=_backward,
    reference=_backward,
    fake=lambda dy, codes, scales, signs, k, bits: dy.new_empty(dy.shape[0], k),
)

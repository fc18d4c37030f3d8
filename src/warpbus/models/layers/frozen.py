"""Gradients through quantized weights, which are not trained themselves (QLoRA; Dettmers et al., 2023).

The forward pass is that of inference. The backward pass, `dx = dy W`, dequantizes columns of W to the dtype of the
activations, at most `BUFFER_BYTES` at a time; dequantized weights are not kept.
"""

import math
from typing import Any

import torch
from torch import Tensor

from warpbus.kernels.operators import autocast
from warpbus.kernels.ops import wna16_linear
from warpbus.kernels.ops.arguments import HALVES, gpu_has_kernels
from warpbus.kernels.ops.cpu_codes import CpuCodes, codes_linear
from warpbus.kernels.ops.cpu_table import CpuTable, table_linear
from warpbus.kernels.ops.packed import PackedWeight
from warpbus.kernels.ops.trellis_linear import times_trellis, trellis_linear
from warpbus.kernels.ops.trellis_packed import PackedTrellis
from warpbus.kernels.ops.w8a8 import w8a8_linear
from warpbus.kernels.ops.wna16_frozen import BUFFER_BYTES, times_packed, wna16_frozen
from warpbus.kernels.reference.w8a8 import w8a8_linear as reference_w8a8_linear
from warpbus.qtensor import QTensor

Form = QTensor | PackedWeight | PackedTrellis | CpuCodes | CpuTable
"""A quantized weight in memory: unpacked, or packed for the kernels of a GPU or of the CPU."""

_COLUMNS = 32  # whole words for any number of bits


def quantized_linear(
    x: Tensor, weight: Form, bias: Tensor | None, *, activation_dtype: torch.dtype | None = None
) -> Tensor:
    """`x @ weight.T + bias` by the kernels of the device.

    See `QuantizedLinear`, and `wna16_linear` for `activation_dtype`.
    """
    if isinstance(weight, CpuCodes):
        return codes_linear(x, weight, bias)
    if isinstance(weight, CpuTable):
        return table_linear(x, weight, bias)
    if isinstance(weight, PackedTrellis) or (isinstance(weight, QTensor) and weight.scheme.is_trellis):
        return trellis_linear(x, weight, bias)
    if isinstance(weight, QTensor) and weight.holds_values:
        kernels = x.dtype in HALVES and gpu_has_kernels(x.device)
        linear = w8a8_linear if kernels else reference_w8a8_linear
        return linear(x, weight.qweight, weight.scales.view(-1).float(), bias)
    return wna16_linear(x, weight, bias, activation_dtype=activation_dtype)


def frozen_linear(x: Tensor, weight: Form, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`, differentiable with respect to x.

    With a w8a8 scheme, and by the CPU's kernels, x is rounded, and the gradient passes through the rounding
    (straight-through estimator; Bengio et al., 2013).

    Args:
        x: `[..., k]` as `quantized_linear` takes it; an enclosing `torch.autocast` converts it.
        weight: `[n, k]`.
        bias: `[n]`; it gets no gradient.

    Returns:
        `[..., n]` in the dtype of x.
    """
    x = autocast(x)
    if isinstance(weight, PackedWeight):
        return wna16_frozen(x, weight, bias)
    y: Tensor = _FrozenLinear.apply(x, weight, bias)
    return y


@torch.no_grad()
def times_frozen(dy: Tensor, weight: Form) -> Tensor:
    """`dy @ weight` for dy `[m, n]` and a quantized weight `[n, k]`, in the dtype of dy."""
    if isinstance(weight, PackedWeight):
        return times_packed(dy, weight)
    if isinstance(weight, PackedTrellis):
        return times_trellis(dy, weight)
    if isinstance(weight, CpuCodes | CpuTable):
        weight = weight.unpack()
    if weight.scheme.is_trellis:  # whose columns are rotated together
        return dy @ weight.dequantize(dy.dtype)
    n, k = weight.shape
    unit = math.lcm(_COLUMNS, weight.scheme.group_size or 1)  # no group may be cut
    at_once = max(1, BUFFER_BYTES // (dy.element_size() * unit * n)) * unit
    dx = dy.new_empty(len(dy), k)
    for start in range(0, k, at_once):
        stop = min(start + at_once, k)
        torch.mm(dy, weight.columns(start, stop).dequantize(dy.dtype), out=dx[:, start:stop])
    return dx


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Form, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return quantized_linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return times_frozen(dy.reshape(-1, dy.shape[-1]), ctx.weight).view(*dy.shape[:-1], -1), None, None

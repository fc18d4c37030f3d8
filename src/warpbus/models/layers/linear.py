"""Norms, quantized linear layers, the dense MLP, and `project`, which computes every projection of a decoder layer.

A projection may do the norm before it and the activation or the residual's sum behind it in the same kernel.
"""

import dataclasses
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpbus.kernels import ops
from warpbus.kernels.ops.activation import gelu, swiglu
from warpbus.kernels.ops.arguments import HALVES, gpu_has_kernels, has_kernels
from warpbus.kernels.ops.cpu_codes import CpuCodes, codes_linear, fuses_gates, pack_codes
from warpbus.kernels.ops.cpu_library import DTYPES, SCALES, is_available
from warpbus.kernels.ops.cpu_table import pack_table
from warpbus.kernels.ops.gemv import gemv
from warpbus.kernels.ops.norm import layer_norm, rms_norm
from warpbus.kernels.ops.packed import PackedWeight, pack, unpack
from warpbus.kernels.ops.trellis_linear import trellis_linear
from warpbus.kernels.ops.trellis_packed import PackedTrellis, pack_trellis
from warpbus.kernels.ops.w8a8 import check_device
from warpbus.models.layer_spec import MatrixSpec, NormSpec
from warpbus.models.layers.adapted import Adapted
from warpbus.models.layers.frozen import Form, frozen_linear, quantized_linear
from warpbus.models.layers.parallel import Parallel
from warpbus.qtensor import QTensor


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (Zhang and Sennrich, 2019), the mean in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if has_kernels(x) and self.weight.dtype == x.dtype:
            return rms_norm(x, self.weight, self.eps)
        if torch.is_grad_enabled() and x.device.type == "cuda" and self.weight.dtype == x.dtype:
            # torch's own kernel has a gradient, and keeps x for it instead of a float32 copy.
            with torch.autocast("cuda", enabled=False):
                return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class LayerNorm(nn.Module):
    """`(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` over the last axis, in float32 and rounded once."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if has_kernels(x) and self.weight.dtype == x.dtype:
            return layer_norm(x, self.weight, self.bias, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = self.weight.to(wide), self.bias.to(wide)
        return F.layer_norm(x.to(wide), weight.shape, weight, bias, self.eps).to(x.dtype)


Norm = RMSNorm | LayerNorm


def make_norm(spec: NormSpec, size: int) -> Norm:
    """A norm over `size` features, of the kind in `spec`."""
    return (LayerNorm if spec.kind == "layer" else RMSNorm)(size, spec.eps)


class QuantizedLinear(nn.Module):
    """`x @ weight.T + bias` with a quantized weight; replaces `torch.nn.Linear`.

    With a w8a8 scheme x is first rounded to 8 bits per token: by the kernels for 16-bit x on GPUs, elsewhere by their
    reference. CPU and GPU results differ only in the order of sums. With other schemes it is not rounded, unless
    `int8_activations` is given: then a CPU rounds it to 8 bits per 128 columns.

    Only the form that the kernels of the device need is kept. `.to()` another device or dtype repacks the weight; this
    is exact except that scales are rounded to the dtype (those of w8a8 and trellises are not). A state dict holds the
    packed form and fits only the same kind of device.

    Args:
        weight: `[out, in]`, packed or not.
        bias: `[out]`.
        dtype: of the activations that it will be multiplied with, which decides the form. None keeps a `QTensor`.
        int8_activations: on a CPU that has the kernels, use those that round x to 8 bits; see `codes_linear`.

    Raises:
        DeviceError: w8a8-fp8 on a GPU older than sm_89, with activations of 16 bits.
    """

    bias: Tensor | None
    activation_dtype: torch.dtype | None
    """The dtype of 8 bits to which products of many tokens round x; see `activation_dtype.round_activations`."""

    def __init__(
        self,
        weight: QTensor | PackedWeight | PackedTrellis,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        int8_activations: bool = False,
    ) -> None:
        super().__init__()
        self.activation_dtype = None
        self.scheme = weight.scheme
        self.out_features, self.in_features = weight.shape
        self.register_buffer("bias", bias)
        self._dtype = dtype if isinstance(weight, QTensor) else weight.dtype
        self._int8_activations = int8_activations
        self._hold(self._arranged(weight) if isinstance(weight, QTensor) else weight)

    @property
    def form(self) -> Form:
        """The weight in the form that is kept."""
        return self._form

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the activations; None if the form does not depend on it."""
        return self._dtype

    @property
    def weight(self) -> QTensor:
        """The quantized matrix `[out, in]`; a packed weight is unpacked at every call."""
        if isinstance(self._form, QTensor):
            return self._form
        return unpack(self._form) if isinstance(self._form, PackedWeight) else self._form.unpack()

    def forward(self, x: Tensor) -> Tensor:
        if _differentiated(x):
            return frozen_linear(x, self._form, self.bias)
        return quantized_linear(x, self._form, self.bias, activation_dtype=self.activation_dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.scheme}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        weight = self.weight
        for name in _tensors(self._form):
            delattr(self, name)
        del self._form
        super()._apply(fn, recurse)
        if weight.holds_values or weight.scheme.is_trellis:
            # As bytes: fp8 and float32 are floating-point types, which `.to(dtype)` would convert.
            values, scales = (fn(part.view(torch.uint8)).view(part.dtype) for part in (weight.qweight, weight.scales))
            moved = QTensor(self.scheme, values, scales, None, weight.shape)
        else:
            zeros = None if weight.zeros is None else fn(weight.zeros)
            moved = QTensor(self.scheme, fn(weight.qweight), fn(weight.scales), zeros, weight.shape)
        if self._dtype is not None:
            self._dtype = fn(torch.empty(0, dtype=self._dtype)).dtype
        self._hold(self._arranged(moved))
        return self

    def _arranged(self, weight: QTensor) -> Form:
        """The weight in the form that the kernels of its device need."""
        dtype = self._dtype
        if dtype is None:
            return weight
        if weight.holds_values:
            if dtype in HALVES and gpu_has_kernels(weight.device):
                check_device("w8a8_linear", weight.scheme.dtype, weight.device)
            return dataclasses.replace(weight, scales=weight.scales.float())
        if weight.device.type == "cpu":
            return self._arranged_for_cpu(weight, dtype)
        if dtype not in HALVES or not gpu_has_kernels(weight.device):
            return weight
        return pack_trellis(weight, dtype) if weight.scheme.is_trellis else pack(weight, dtype)

    def _arranged_for_cpu(self, weight: QTensor, dtype: torch.dtype) -> Form:
        """For `codes_linear`, if activations may be rounded and a compiler makes the kernels; else for `table_linear`,
        or without a fast path as it is."""
        if dtype not in DTYPES or weight.scheme.is_trellis:
            return weight
        if self._int8_activations and weight.scales.dtype in SCALES and is_available():
            return pack_codes(weight)
        return pack_table(weight) or weight

    def _hold(self, form: Form) -> None:
        self._form = form
        for name, tensor in _tensors(form).items():
            self.register_buffer(name, tensor)


def project(
    linear: nn.Module,
    x: Tensor,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """`residual + activation(linear(norm(x)))`, fused as far as the device has kernels for it.

    Args:
        linear: `nn.Linear`, `QuantizedLinear`, a `Parallel` or `Adapted` of one, or any module with the same call.
        x: `[..., in]`.
        residual: `[..., out]`.
        activation: "none"; "swiglu": `silu(gate) * up` of an output that is `[gate, up]`; or "gelu", in its tanh form.
    """
    if isinstance(linear, Parallel):
        return linear.join(project(linear.part, x, norm=norm, activation=activation), residual)
    if isinstance(linear, Adapted):
        if not linear.selection.active:
            return project(linear.part, x, norm=norm, residual=residual, activation=activation)
        x = x if norm is None else norm(x)
        if activation == "none":
            return linear.add(project(linear.part, x, residual=residual), x)
        y = _activated(linear.add(project(linear.part, x), x), activation)
        return y if residual is None else residual + y
    fuses = activation != "gelu" and not isinstance(norm, LayerNorm)  # the kernels support neither
    if isinstance(linear, QuantizedLinear) and fuses:
        form, bias = linear.form, linear.bias
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        if isinstance(form, PackedWeight) and not _differentiated(x, weight, residual):
            return ops.wna16_linear(
                x,
                form,
                bias,
                norm=weight,
                eps=eps,
                residual=residual,
                activation=activation,
                activation_dtype=linear.activation_dtype,
            )
        if isinstance(form, PackedTrellis) and not _differentiated(x, weight, residual):
            return trellis_linear(x, form, bias, norm=weight, eps=eps, residual=residual, activation=activation)
        if isinstance(form, CpuCodes) and not _differentiated(x, weight, residual):
            return _by_codes(x, form, bias, norm=weight, eps=eps, residual=residual, activation=activation)
    if norm is not None:
        x = norm(x)
    y = _by_vector(linear, x) if isinstance(linear, nn.Linear) and _is_vector(linear, x) else linear(x)
    y = _activated(y, activation)
    return y if residual is None else residual + y


def _by_codes(
    x: Tensor,
    weight: CpuCodes,
    bias: Tensor | None,
    *,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    activation: str,
) -> Tensor:
    if activation == "none" or (bias is None and fuses_gates(weight)):
        gated = activation == "swiglu"
        return codes_linear(x, weight, bias, norm=norm, eps=eps, residual=residual, gated=gated)
    y = _activated(codes_linear(x, weight, bias, norm=norm, eps=eps), activation)
    return y if residual is None else residual + y


def _differentiated(*tensors: Tensor | None) -> bool:
    """Whether a gradient is needed, which the kernels do not compute."""
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def _activated(y: Tensor, activation: str) -> Tensor:
    if activation == "gelu":
        return gelu(y) if has_kernels(y) else F.gelu(y, approximate="tanh")
    return _swiglu(y) if activation == "swiglu" else y


def _is_vector(linear: nn.Linear, x: Tensor) -> bool:
    return x.numel() == linear.in_features and has_kernels(x) and linear.weight.dtype == x.dtype


def _by_vector(linear: nn.Linear, x: Tensor) -> Tensor:
    return gemv(linear.weight, x.flatten(), linear.bias).view(*x.shape[:-1], -1)


def _swiglu(x: Tensor) -> Tensor:
    if has_kernels(x) or (_differentiated(x) and x.dtype in HALVES and gpu_has_kernels(x.device)):
        return swiglu(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _tensors(form: Form) -> dict[str, Tensor | None]:
    named = {field.name: getattr(form, field.name) for field in dataclasses.fields(form)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor) or name == "zeros"}


class MLP(nn.Module):
    """`down(inner(x))`, where inner is `silu(gate(x)) * up(x)` (SwiGLU; Shazeer, 2020) or `gelu(up(x))`.

    Gate and up are one fused projection, gate first. Its name is that in the layer's table: `gate_up` or `up`.

    Args:
        widening: the matrix that produces the inner features.
        down: the matrix back to the residual stream.
        gated: whether `widening` is gate and up.
    """

    def __init__(self, widening: MatrixSpec, down: MatrixSpec, *, gated: bool) -> None:
        super().__init__()
        self._widening = widening.name.rpartition(".")[2]
        self._activation = "swiglu" if gated else "gelu"
        self.add_module(self._widening, nn.Linear(widening.shape[1], widening.shape[0], bias=widening.bias))
        self.down = nn.Linear(down.shape[1], down.shape[0], bias=down.bias)

    @property
    def output(self) -> nn.Module:
        """The projection back to the residual stream."""
        return self.down

    def inner(self, x: Tensor, *, norm: Norm | None = None) -> Tensor:
        """The input of `down`, `[..., ffn]`, from x `[..., hidden]`."""
        return project(getattr(self, self._widening), x, norm=norm, activation=self._activation)

    def widen(self, x: Tensor) -> Tensor:
        """The first step of `inner`, up to `activate`."""
        return project(getattr(self, self._widening), x)

    def activate(self, wide: Tensor) -> Tensor:
        """The second step of `inner`, which may have rows of several experts."""
        return _activated(wide, self._activation)

    def forward(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """The output `[..., hidden]`, plus `residual` if there is one."""
        return project(self.down, self.inner(x, norm=norm), residual=residual)

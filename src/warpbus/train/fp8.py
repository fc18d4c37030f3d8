"""Linear layers whose products are of 8-bit floating-point numbers (Micikevicius et al., 2022, "FP8 Formats").

Activations and weights are rounded to e4m3, gradients to e5m2, each tensor with one float32 scale that makes its
largest magnitude the format's largest. Products are summed in float32 and given out in the dtype of the activations.
On GPUs from sm_89 on that is `torch._scaled_mm`; on the CPU the same roundings, multiplied in float32.

A product takes both of its matrices by rows along what is summed: forward x and weight as they are, `dx` the weight by
columns, `dw` both dy and x by columns. Rounding writes either copy, or both, in one pass (`warpbus.kernels.ops.fp8`),
and only that by columns is kept for the backward pass.
"""

from typing import Any

import torch
from torch import Tensor, nn

from warpbus.errors import DeviceError
from warpbus.kernels.operators import autocast, converted
from warpbus.kernels.ops.fp8 import round_to_fp8
from warpbus.kernels.reference import fp8 as reference
from warpbus.models.decoder import Decoder

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = reference.MULTIPLE
"""Of which both sides of a weight have to be multiples; layers that are not stay as they are."""

_OLDEST = (8, 9)


class Fp8Linear(nn.Linear):
    """`torch.nn.Linear` with products in fp8; its weight and bias are trained as they are, in 16 or 32 bits."""

    def forward(self, x: Tensor) -> Tensor:
        x = autocast(x)
        inside, after = _bias(self.bias, x)
        # Within a Function gradients are off, and requires_grad is set even where nobody asks for them.
        learns = torch.is_grad_enabled()
        learning = learns and x.requires_grad, learns and self.weight.requires_grad
        y: Tensor = _Fp8Product.apply(x.reshape(-1, self.in_features), self.weight, inside, *learning)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if after is None else y + after


class FrozenFp8Linear(nn.Module):
    """A linear layer that is not trained: its weight is rounded once, and held as rows and as columns of 8 bits each.

    Args:
        linear: the layer whose product it computes, but for the rounding.
    """

    codes: Tensor
    transposed: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, transposed, scale = _rounded(linear.weight.detach(), E4M3, transposed=True)
        self.register_buffer("codes", codes)
        self.register_buffer("transposed", transposed)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        x = autocast(x)
        inside, after = _bias(self.bias, x)
        rows = x.reshape(-1, self.in_features)
        y: Tensor = _FrozenFp8Product.apply(rows, self.codes, self.transposed, self.scale, inside)
        if x.dim() != 2:  # of a view, LoRA could not add its part in place
            y = y.view(*x.shape[:-1], self.out_features)
        return y if after is None else y + after

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


def use_fp8(model: Decoder) -> int:
    """Compute the layers' linears in fp8: a `FrozenFp8Linear` in place of each that is frozen, else an `Fp8Linear`.

    It comes after LoRA is attached, whose bases it replaces. Quantized linears, the head, and linears of which a side
    is no multiple of 16 stay as they are.

    Returns:
        how many were replaced.

    Raises:
        DeviceError: on a GPU older than sm_89.
    """
    device = model.embedding_device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _OLDEST:
        raise DeviceError(f"fp8 needs a GPU from sm_89 on (Ada, Hopper), {torch.cuda.get_device_name(device)} is older")
    replaced = 0
    for owner in list(model.layers.modules()):
        for name, linear in list(owner.named_children()):
            if type(linear) is nn.Linear and fits(*linear.weight.shape):
                setattr(owner, name, _trained(linear) if linear.weight.requires_grad else FrozenFp8Linear(linear))
                replaced += 1
    return replaced


def fits(rows: int, columns: int) -> bool:
    """Whether the sizes of a matrix are such that its products can be in fp8."""
    return rows % MULTIPLE == 0 and columns % MULTIPLE == 0


def _rounded(x: Tensor, dtype: torch.dtype, *, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """See `round_to_fp8`."""
    if _by_kernels(x):
        return round_to_fp8(x, dtype, transposed=transposed)
    return reference.round_to_fp8(x, dtype, transposed)


def _by_kernels(x: Tensor) -> bool:
    """Whether x is rounded by our kernel, on a GPU.

    While torch.compile traces, it is given plain expressions instead: Inductor cannot look into an operator, and fuses
    those with what stands beside them, a norm or an activation before and a sum behind.
    """
    return x.device.type == "cuda" and not torch.compiler.is_compiling()


def _bias(bias: Tensor | None, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A bias in the dtype of x: what the product adds on its way out, and what is left to be added to it.

    `torch._scaled_mm` takes one where it gives out 16 bits.
    """
    if bias is None:
        return None, None
    bias = bias.to(x.dtype)
    return (bias, None) if _by_kernels(x) and x.dtype != torch.float32 else (None, bias)


def _trained(linear: nn.Linear) -> Fp8Linear:
    made = Fp8Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    made.weight, made.bias = linear.weight, linear.bias
    return made


class _Fp8Product(torch.autograd.Function):
    """`x @ weight.T + bias` for x `[m, k]` and a weight `[n, k]`, which learn or do not."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, x_learns: bool, weight_learns: bool
    ) -> Tensor:
        x_codes, x_columns, x_scale = _rounded(x, E4M3, transposed=weight_learns)
        codes, columns, scale = _rounded(weight, E4M3, transposed=x_learns)
        ctx.save_for_backward(x_columns, x_scale, columns, scale)
        ctx.dtypes = x.dtype, weight.dtype
        return _multiply(x_codes, codes, x_scale, scale, x.dtype, bias, fast=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x_columns, x_scale, columns, scale = ctx.saved_tensors
        dtype, weight_dtype = ctx.dtypes
        dy_codes, dy_columns, dy_scale = _rounded(dy, E5M2, transposed=ctx.needs_input_grad[1])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _multiply(dy_codes, columns, dy_scale, scale, dtype)
        if ctx.needs_input_grad[1]:
            # A GPU rounds it once, on its way out; the CPU to the dtype of the activations first.
            given = weight_dtype if dy.device.type == "cuda" else dtype
            dw = _multiply(dy_columns, x_columns, dy_scale, x_scale, given).to(weight_dtype)
        return dx, dw, dy.sum(0) if ctx.needs_input_grad[2] else None, None, None


class _FrozenFp8Product(torch.autograd.Function):
    """As `_Fp8Product`, with a weight that was rounded before, given as `[n, k]` and as `[k, n]`, and a frozen bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, transposed: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(transposed, scale)
        x_codes, _, x_scale = _rounded(x, E4M3)
        return _multiply(x_codes, codes, x_scale, scale, x.dtype, bias, fast=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        transposed, scale = ctx.saved_tensors
        dy_codes, _, dy_scale = _rounded(dy, E5M2)
        return _multiply(dy_codes, transposed, dy_scale, scale, dy.dtype), None, None, None, None


def _multiply(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    fast: bool = False,
) -> Tensor:
    """`a_scale * b_scale * a @ b.T + bias` of codes `[m, k]` and `[n, k]`, k and n multiples of 16.

    A bias, in `dtype`, is for GPUs. `fast` adds up in the tensor cores' own, narrower registers: for forward products,
    whose errors are not accumulated.
    """
    if a.device.type == "cuda":
        return torch._scaled_mm(
            a, b.t(), scale_a=a_scale, scale_b=b_scale, bias=bias, out_dtype=dtype, use_fast_accum=fast
        )
    return converted((a.float() @ b.float().T) * (a_scale * b_scale), dtype)

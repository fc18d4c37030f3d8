"""Linear layers whose products are of 8-bit floating-point numbers (Micikevicius et al., 2022, "FP8 Formats").

Activations and weights are rounded to e4m3, gradients to e5m2, each tensor with one float32 scale that makes its
largest magnitude the format's largest. Products are summed in float32 and given out in the dtype of the activations.
On GPUs from sm_89 on that is `torch._scaled_mm`; on the CPU the same roundings, multiplied in float32.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpbus.errors import DeviceError
from warpbus.kernels.operators import autocast
from warpbus.models.decoder import Decoder

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Of which both sides of a weight have to be multiples; layers that are not stay as they are."""

_OLDEST = (8, 9)
_SMALLEST = 1e-12  # an amax below is taken for this: the scale of a tensor of zeros is still a number


class Fp8Linear(nn.Linear):
    """`torch.nn.Linear` with products in fp8; its weight and bias are trained as they are, in 16 or 32 bits."""

    def forward(self, x: Tensor) -> Tensor:
        x = autocast(x)
        y: Tensor = _Fp8Product.apply(x.reshape(-1, self.in_features), self.weight)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class FrozenFp8Linear(nn.Module):
    """A linear layer that is not trained: its weight is rounded once, and held as rows and as columns of 8 bits each.

    Args:
        linear: what it computes, but for the rounding.
    """

    codes: Tensor
    transposed: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scale = to_fp8(linear.weight.detach(), E4M3)
        self.register_buffer("codes", codes)
        self.register_buffer("transposed", _transposed(codes))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        x = autocast(x)
        rows = x.reshape(-1, self.in_features)
        y: Tensor = _FrozenFp8Product.apply(rows, self.codes, self.transposed, self.scale)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

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
    device = model.embedding.weight.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _OLDEST:
        raise DeviceError(f"fp8 needs a GPU from sm_89 on (Ada, Hopper), {torch.cuda.get_device_name(device)} is older")
    replaced = 0
    for owner in list(model.layers.modules()):
        for name, linear in list(owner.named_children()):
            if type(linear) is nn.Linear and fits(linear):
                setattr(owner, name, _trained(linear) if linear.weight.requires_grad else FrozenFp8Linear(linear))
                replaced += 1
    return replaced


def fits(linear: nn.Linear) -> bool:
    """Whether the sizes of a layer are such that its products can be in fp8."""
    return linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0


def to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of x `[m, n]`, and the float32 scale, a scalar, that they are to be multiplied with.

    NaN and infinity give codes of NaN.
    """
    scale = torch.linalg.vector_norm(x.detach(), math.inf).float().clamp_min(_SMALLEST) / torch.finfo(dtype).max
    # A matrix of one number, with which the product is in float32; what it makes a little larger than the largest code
    # is rounded down to it.
    return (x.contiguous() * scale.reciprocal().view(1, 1)).to(dtype), scale


def _trained(linear: nn.Linear) -> Fp8Linear:
    made = Fp8Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    made.weight, made.bias = linear.weight, linear.bias
    return made


class _Fp8Product(torch.autograd.Function):
    """`x @ weight.T` for x `[m, k]` and a weight `[n, k]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x_codes, x_scale = to_fp8(x, E4M3)
        codes, scale = to_fp8(weight, E4M3)
        ctx.save_for_backward(x_codes, x_scale, codes, scale)
        ctx.dtypes = x.dtype, weight.dtype
        return _multiply(x_codes, codes, x_scale, scale, x.dtype, fast=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_codes, x_scale, codes, scale = ctx.saved_tensors
        dtype, weight_dtype = ctx.dtypes
        dy_codes, dy_scale = to_fp8(dy, E5M2)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _multiply(dy_codes, _transposed(codes), dy_scale, scale, dtype)
        if ctx.needs_input_grad[1]:
            sides = _padded(_transposed(dy_codes)), _padded(_transposed(x_codes))
            dw = _multiply(*sides, dy_scale, x_scale, dtype).to(weight_dtype)
        return dx, dw


class _FrozenFp8Product(torch.autograd.Function):
    """The same, with a weight that is rounded already, given as `[n, k]` and as `[k, n]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, transposed: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(transposed, scale)
        x_codes, x_scale = to_fp8(x, E4M3)
        return _multiply(x_codes, codes, x_scale, scale, x.dtype, fast=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        transposed, scale = ctx.saved_tensors
        dy_codes, dy_scale = to_fp8(dy, E5M2)
        return _multiply(dy_codes, transposed, dy_scale, scale, dy.dtype), None, None, None


def _multiply(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """`a_scale * b_scale * a @ b.T` of codes `[m, k]` and `[n, k]`, k and n multiples of 16.

    `fast` adds up in the tensor cores' own, narrower registers: for forward products, whose errors are not
    accumulated.
    """
    if a.device.type == "cuda":
        return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)
    return ((a.float() @ b.float().T) * (a_scale * b_scale)).to(dtype)


def _transposed(codes: Tensor) -> Tensor:
    """`codes.T` in memory of its own; as bytes, since not every operator knows fp8."""
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)


def _padded(codes: Tensor) -> Tensor:
    """Columns of zeros added up to a multiple of 16."""
    missing = -codes.shape[1] % MULTIPLE
    return F.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype) if missing else codes

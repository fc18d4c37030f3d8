"""`swiglu` and `gelu`: what stands between the two products of an MLP."""

from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.kernel import Kernel
from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import aligned, blocks, blocks_in_stride, check_alike, per_dtype
from warpbus.kernels.reference import activation as reference

_SWIGLU = per_dtype(
    "step/activation.cu", "swiglu", "const ELEMENT* x, ELEMENT* out, long long chunks, int width, int vectorised"
)
_SWIGLU_BACKWARD = per_dtype(
    "step/activation.cu",
    "swiglu_backward",
    "const ELEMENT* gradient, const ELEMENT* x, ELEMENT* out, long long chunks, int width, int vectorised",
)
_GELU = per_dtype(
    "step/activation.cu", "gelu", "const ELEMENT* x, ELEMENT* out, long long chunks, int width, int vectorised"
)

_CHUNK = 8  # elements: kChunk in step/chunk.cuh
_BLOCK = 256


def swiglu(x: Tensor) -> Tensor:
    """`silu(gate) * up` (Shazeer, 2020); it can be differentiated once.

    Args:
        x: `[..., 2 f]`, gate first, as a fused projection gives it; float32, float16 or bfloat16, any sizes; copied
            where not contiguous.

    Returns:
        `[..., f]`, contiguous, in the dtype of `x`; computed in float32 and rounded once.

    Raises:
        TensorError: another shape or dtype.
    """
    check_alike("swiglu", x=x)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise TensorError(f"swiglu: x has shape {list(x.shape)}, expected [..., 2 f]: give gate and up side by side")
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _swiglu(x)
    y: Tensor = _Swiglu.apply(x)
    return y


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))` (Hendrycks and Gimpel, 2016).

    Args:
        x: of any shape, float32, float16 or bfloat16; copied where not contiguous.

    Returns:
        The shape and dtype of `x`, contiguous; computed in float32 and rounded once.

    Raises:
        TensorError: another dtype.
    """
    check_alike("gelu", x=x)
    return _gelu(x)


def _launch_swiglu(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = _fake_swiglu(x)
    _launch(_SWIGLU[x.dtype], out, x=x)
    return out


def _launch_swiglu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    x, gradient = x.contiguous(), gradient.contiguous()
    out = torch.empty_like(x)
    _launch(_SWIGLU_BACKWARD[x.dtype], out, gradient.shape[-1], gradient=gradient, x=x)
    return out


def _launch_gelu(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(_GELU[x.dtype], out, x=x)
    return out


def _launch(kernel: Kernel, out: Tensor, width: int | None = None, **inputs: Any) -> None:
    """`width`: elements of a row that threads walk along, by default those of a row of `out`."""
    if out.numel() == 0:
        return
    own = out.shape[-1] if out.dim() else 1
    width = own if width is None else width
    chunks = out.numel() // own * blocks((width, _CHUNK))
    vectorised = width % _CHUNK == 0 and aligned(*(each.flatten() for each in (*inputs.values(), out)))
    grid = blocks_in_stride(chunks, _BLOCK, out.device)
    kernel(grid, _BLOCK, **inputs, out=out, chunks=chunks, width=width, vectorised=vectorised, dependent=True)


def _fake_swiglu(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


_swiglu = operator(
    "swiglu(Tensor x) -> Tensor",
    cuda=_launch_swiglu,
    reference=reference.swiglu,
    fake=_fake_swiglu,
)
_swiglu_backward = operator(
    "swiglu_backward(Tensor gradient, Tensor x) -> Tensor",
    cuda=_launch_swiglu_backward,
    reference=reference.swiglu_backward,
    fake=lambda gradient, x: x.new_empty(x.shape),
)


class _Swiglu(torch.autograd.Function):
    """Around the operators, not registered with one: that takes several times as long to call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _swiglu(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _swiglu_backward(gradient, x)


_gelu = operator(
    "gelu(Tensor x) -> Tensor",
    cuda=_launch_gelu,
    reference=reference.gelu,
    fake=lambda x: x.new_empty(x.shape),
)

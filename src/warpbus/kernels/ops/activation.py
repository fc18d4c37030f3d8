"""`swiglu` and `gelu`: what stands between the two products of an MLP."""

import torch
from torch import Tensor

from warpbus.cuda.kernel import Kernel
from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import aligned, blocks, blocks_in_stride, check_alike, per_dtype
from warpbus.kernels.reference import activation as reference

_SWIGLU = per_dtype("step/activation.cu", "swiglu", "PPqii")
_GELU = per_dtype("step/activation.cu", "gelu", "PPqii")

_CHUNK = 8  # elements: kChunk in step/chunk.cuh
_BLOCK = 256


def swiglu(x: Tensor) -> Tensor:
    """`silu(gate) * up` (Shazeer, 2020).

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
    return _swiglu(x)


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
    _launch(_SWIGLU[x.dtype], x, out)
    return out


def _launch_gelu(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(_GELU[x.dtype], x, out)
    return out


def _launch(kernel: Kernel, x: Tensor, out: Tensor) -> None:
    if out.numel() == 0:
        return
    width = out.shape[-1] if out.dim() else 1
    chunks = out.numel() // width * blocks((width, _CHUNK))
    vectorised = width % _CHUNK == 0 and aligned(x.flatten(), out.flatten())
    grid = blocks_in_stride(chunks, _BLOCK, x.device)
    kernel(grid, _BLOCK, x, out, chunks, width, int(vectorised), dependent=True)


def _fake_swiglu(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


_swiglu = operator(
    "swiglu(Tensor x) -> Tensor",
    cuda=_launch_swiglu,
    reference=reference.swiglu,
    fake=_fake_swiglu,
)
_gelu = operator(
    "gelu(Tensor x) -> Tensor",
    cuda=_launch_gelu,
    reference=reference.gelu,
    fake=lambda x: x.new_empty(x.shape),
)

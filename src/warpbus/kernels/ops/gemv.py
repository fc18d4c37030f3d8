"""`gemv`: the product of a 16-bit matrix with one vector, as fast as the memory gives the matrix."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.cuda.kernel import Kernel
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, aligned, blocks, check_alike, check_rank, check_shape
from warpbus.kernels.ops.gemm import ACTIVATIONS, check_epilogue
from warpbus.kernels.reference import gemm as reference
from warpbus.kernels.units import unit


@dataclass(frozen=True)
class Cut:
    """How `gemv/hgemv.cu` cuts a product: warps of a block, rows of a warp, warps that share rows, loads in flight."""

    warps: int
    rows: int
    split: int
    unroll: int


CUTS = (Cut(4, 2, 1, 4), Cut(4, 2, 2, 4), Cut(4, 2, 4, 4))


def gemv(weight: Tensor, x: Tensor, bias: Tensor | None = None, *, activation: str = "none") -> Tensor:
    """`activation(weight @ x + bias)`.

    Args:
        weight, x, bias: `[n, k]`, `[k]` and `[n]`, float16 or bfloat16, any sizes; copied where not contiguous.
        activation: one of `gemm.ACTIVATIONS`, applied in float32.

    Returns:
        `[n]` in the dtype of `weight`; summed in float32 and rounded once. The same bits at every run.

    Raises:
        TensorError: other shapes, dtypes or devices.
        UsageError: no such activation.
    """
    check_rank("gemv", 2, weight=weight)
    check_rank("gemv", 1, x=x)
    check_alike("gemv", HALVES, weight=weight, x=x, **({} if bias is None else {"bias": bias}))
    n, k = weight.shape
    check_shape("gemv", {"x": (k,)}, f"weight has {k} columns, and x needs as many elements", x=x)
    check_epilogue("gemv", n, bias, activation)
    return _gemv(weight, x, bias, activation)


def launch(weight: Tensor, x: Tensor, bias: Tensor | None, activation: int, out: Tensor, cut: Cut) -> None:
    """`out = activation(weight @ x + bias)` for contiguous CUDA tensors."""
    n, k = weight.shape
    vector = 8 if aligned(weight, x) else 1
    grid = blocks((n, cut.rows * cut.warps // cut.split))
    _kernel(weight.dtype, cut, vector, activation)(grid, 32 * cut.warps, weight, x, bias, out, n, k, dependent=True)


def choose(n: int, k: int) -> Cut:
    """The cut for a shape: rows are shared by more warps where there are few of them."""
    return CUTS[0]


@functools.cache
def _kernel(dtype: torch.dtype, cut: Cut, vector: int, activation: int) -> Kernel:
    declared = unit(
        "gemv/hgemv.cu",
        ELEMENT=ELEMENTS[dtype],
        WARPS=cut.warps,
        ROWS=cut.rows,
        SPLIT=cut.split,
        UNROLL=cut.unroll,
        VECTOR=vector,
        ACTIVATION=activation,
    )
    return declared.kernel("hgemv", "PPPPii")


def _launch(weight: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    if weight.numel() == 0:
        return reference.gemv(weight, x, bias, activation)
    out = weight.new_empty(weight.shape[0])
    bias = None if bias is None else bias.contiguous()
    cut = choose(*weight.shape)
    launch(weight.contiguous(), x.contiguous(), bias, ACTIVATIONS[activation], out, cut)
    return out


_gemv = operator(
    "gemv(Tensor weight, Tensor x, Tensor? bias, str activation) -> Tensor",
    cuda=_launch,
    reference=reference.gemv,
    fake=lambda weight, x, bias, activation: weight.new_empty(weight.shape[0]),
    autocast=True,
)

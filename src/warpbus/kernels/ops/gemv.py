"""`gemv`: the product of a 16-bit matrix with one vector, as fast as the memory gives the matrix."""

import functools
import itertools

import torch
from torch import Tensor

from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.kernels.operators import autocast, operator
from warpbus.kernels.ops.arguments import (
    ACTIVATIONS,
    ELEMENTS,
    HALVES,
    aligned,
    blocks,
    check_alike,
    check_epilogue,
    check_rank,
    check_shape,
)
from warpbus.kernels.reference import gemm as reference
from warpbus.kernels.units import unit

_PARAMETERS = Parameters(
    "const ELEMENT* weight, const ELEMENT* x, const ELEMENT* bias, ELEMENT* y, int n, int k, int activation"
)
_UNROLL = 2  # 16-byte loads in flight in a lane
_SHORT = 2048  # elements: up to here a row is shared by fewer warps
# Warps of a block, and warps that share a row. Either way a multiprocessor has 64 KB of loads in flight, in no more
# blocks than that takes: each costs time to start.
_LONG_ROWS, _SHORT_ROWS = (4, 4), (8, 2)


def gemv(weight: Tensor, x: Tensor, bias: Tensor | None = None, *, activation: str = "none") -> Tensor:
    """`activation(weight @ x + bias)`.

    Args:
        weight, x, bias: `[n, k]`, `[k]` and `[n]`, float16 or bfloat16 (or any under
            `torch.autocast`), any sizes; copied where not contiguous.
        activation: one of `arguments.ACTIVATIONS`, applied in float32.

    Returns:
        `[n]` in the dtype of `weight`; summed in float32 and rounded once. The same bits at every run. For a
        gradient use `gemm.linear`.

    Raises:
        TensorError: other shapes, dtypes or devices.
        UsageError: no such activation.
    """
    check_rank("gemv", 2, weight=weight)
    check_rank("gemv", 1, x=x)
    weight, x, bias = autocast(weight), autocast(x), None if bias is None else autocast(bias)
    check_alike("gemv", HALVES, weight=weight, x=x, **({} if bias is None else {"bias": bias}))
    n, k = weight.shape
    check_shape("gemv", {"x": (k,)}, f"weight has {k} columns, and x needs as many elements", x=x)
    check_epilogue("gemv", n, bias, activation)
    return _gemv(weight, x, bias, activation)


@functools.cache
def _kernel(dtype: torch.dtype, warps: int, split: int, vector: int) -> Kernel:
    declared = unit(
        "gemv/hgemv.cu",
        ELEMENT=ELEMENTS[dtype],
        WARPS=warps,
        SPLIT=split,
        UNROLL=_UNROLL,
        VECTOR=vector,
    )
    return declared.kernel("hgemv", _PARAMETERS)


def launch(weight: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The operator on a GPU; its arguments are checked."""
    if weight.numel() == 0:
        return reference.gemv(weight, x, bias, activation)
    out = weight.new_empty(weight.shape[0])
    bias = None if bias is None else bias.contiguous()
    given, weight, x = weight, weight.contiguous(), x.contiguous()
    vector = 8 if aligned(weight, x) else 1
    n, k = weight.shape
    warps, split = _SHORT_ROWS if k <= _SHORT else _LONG_ROWS
    grid = blocks((n, warps // split))
    _kernel(weight.dtype, warps, split, vector)(
        grid,
        32 * warps,
        weight=weight,
        x=x,
        bias=bias,
        y=out,
        n=n,
        k=k,
        activation=ACTIVATIONS[activation],
        # The read-only path may not load what a copy just ahead still writes.
        dependent=weight is given,
    )
    return out


_gemv = operator(
    "gemv(Tensor weight, Tensor x, Tensor? bias, str activation) -> Tensor",
    cuda=launch,
    reference=reference.gemv,
    fake=lambda weight, x, bias, activation: weight.new_empty(weight.shape[0]),
)


for _dtype, _vector in itertools.product(HALVES, (8, 1)):
    _kernel(_dtype, *_LONG_ROWS, _vector)
    _kernel(_dtype, *_SHORT_ROWS, _vector)

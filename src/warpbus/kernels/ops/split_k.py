"""Products whose sum over k is split among blocks: the choice, the partial sums and the kernel that adds them up."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from warpbus.kernels.ops.arguments import HALVES, blocks, per_dtype

_REDUCE = per_dtype(
    "gemm/split_k_reduce.cu",
    "split_k_reduce",
    "const float* partial, const ELEMENT* bias, ELEMENT* out, int splits, int m, int n, long long out_stride, "
    "int activation",
    HALVES,
)
_BLOCK = 128  # kThreads in split_k_reduce.cu
_CHUNK = 8  # columns of a thread

_AnyTiling = TypeVar("_AnyTiling")


def cheapest(
    tilings: Sequence[_AnyTiling],
    k: int,
    splits: Sequence[int],
    step: Callable[[_AnyTiling], int],
    cost: Callable[[_AnyTiling, int], float],
) -> tuple[_AnyTiling, int]:
    """The tiling of least cost, and how much of k a block sums.

    Splitting k gives work to multiprocessors that would have none, where the product has few tiles. A second kernel
    then reads all partial sums.

    Args:
        splits: numbers of parts of k to consider.
        step: of a tiling: parts of k are a multiple of it.
        cost: of a tiling whose blocks sum a part of k; the first of equals is taken.
    """
    choices = []
    for tiling in tilings:
        for count in splits:
            part = blocks((max(k, 1), count * step(tiling))) * step(tiling)
            choices.append((cost(tiling, part), tiling, part))
    _, tiling, part = min(choices, key=lambda choice: choice[0])
    return tiling, part


def partial_sums(splits: int, out: Tensor) -> Tensor | None:
    """Uninitialized float32 `[splits, m, n rounded up to 8]` for the sums of `out [m, n]`; None without a split."""
    m, n = out.shape
    columns = blocks((n, _CHUNK)) * _CHUNK
    return torch.empty(splits, m, columns, dtype=torch.float32, device=out.device) if splits > 1 else None


def reduce(partial: Tensor | None, bias: Tensor | None, out: Tensor, activation: int = 0) -> None:
    """`out = activation(sum of the partial sums + bias)`, added in the order of the splits; nothing without a split.

    Args:
        partial: of `partial_sums`.
        bias: `[n]`, contiguous, in the dtype of `out`.
        out: `[m, n]`, float16 or bfloat16, row-major.
        activation: a number of `arguments.ACTIVATIONS`.
    """
    if partial is None:
        return
    splits, m, columns = partial.shape
    _REDUCE[out.dtype](
        blocks((m * columns // _CHUNK, _BLOCK)),
        _BLOCK,
        partial=partial,
        bias=bias,
        out=out,
        splits=splits,
        m=m,
        n=out.shape[1],
        out_stride=out.stride(0),
        activation=activation,
    )

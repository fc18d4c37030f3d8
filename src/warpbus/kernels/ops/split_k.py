"""Products whose sum over k is split among blocks: the partial sums and the kernel that adds them up."""

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

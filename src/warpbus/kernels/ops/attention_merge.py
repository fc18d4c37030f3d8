"""`merge_attention`: attention to two sets of keys, joined to that to all of them."""

import torch
from torch import Tensor

from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import (
    HALVES,
    blocks,
    check_alike,
    check_rank,
    check_shape,
    contiguous_aligned,
    per_dtype,
)
from warpbus.kernels.reference.attention import merge_attention as reference

_MERGE = per_dtype(
    "attention/merge.cu",
    "merge_attention",
    "const ELEMENT* a, const ELEMENT* b, const float* lse_a, const float* lse_b, ELEMENT* out, long long chunks, "
    "int heads, int width, int lse_a_stride, int lse_b_stride",
    HALVES,
)
_CHUNK, _THREADS = 8, 256  # elements of a thread, and threads of a block


def merge_attention(a: Tensor, b: Tensor, lse_a: Tensor, lse_b: Tensor) -> Tensor:
    """Attention of the same queries to two sets of keys, joined to that to all keys (Milakov and Gimelshein, 2018).

    Args:
        a, b: `[tokens, heads, features]`, float16 or bfloat16; on a GPU, features are a multiple of 8.
        lse_a, lse_b: float32 `[heads, tokens]`: the logarithms of the sums of exp(scores) with each set.

    Returns:
        as `a`, contiguous; computed in float32 and rounded once.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    check_rank("merge_attention", 3, a=a, b=b)
    check_alike("merge_attention", HALVES, a=a, b=b)
    tokens, heads, width = a.shape
    sums = (heads, tokens)
    because = f"a has {tokens} tokens and {heads} heads of {width} features"
    expected = {"b": (tokens, heads, width), "lse_a": sums, "lse_b": sums}
    check_shape("merge_attention", expected, because, b=b, lse_a=lse_a, lse_b=lse_b)
    check_alike("merge_attention", (torch.float32,), lse_a=lse_a, lse_b=lse_b)
    if lse_a.device != a.device or (a.is_cuda and width % _CHUNK):
        raise TensorError(
            f"merge_attention: a is on {a.device} with {width} features, lse_a on {lse_a.device}: expected one device, "
            f"and on a GPU a multiple of {_CHUNK} features"
        )
    merged: Tensor = _merge(a, b, lse_a, lse_b)
    return merged


def _launch(a: Tensor, b: Tensor, lse_a: Tensor, lse_b: Tensor) -> Tensor:
    a, b = contiguous_aligned(a), contiguous_aligned(b)
    lse_a, lse_b = (each if each.stride(1) == 1 else each.contiguous() for each in (lse_a, lse_b))
    out = torch.empty_like(a)
    chunks = a.numel() // _CHUNK
    if chunks:
        _MERGE[a.dtype](
            blocks((chunks, _THREADS)),
            _THREADS,
            a=a,
            b=b,
            lse_a=lse_a,
            lse_b=lse_b,
            out=out,
            chunks=chunks,
            heads=a.shape[1],
            width=a.shape[2],
            lse_a_stride=lse_a.stride(0),
            lse_b_stride=lse_b.stride(0),
            dependent=True,
        )
    return out


_merge = operator(
    "merge_attention(Tensor a, Tensor b, Tensor lse_a, Tensor lse_b) -> Tensor",
    cuda=_launch,
    reference=reference,
    fake=lambda a, *others: a.new_empty(a.shape),
)

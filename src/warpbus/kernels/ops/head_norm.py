"""`head_norm`: RMSNorm of the queries and keys of each head, in one launch."""

from torch import Tensor

from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import HALVES, aligned, blocks, check_alike, check_shape, per_dtype
from warpbus.kernels.reference import norm as reference

_KERNELS = per_dtype(
    "step/head_norm.cu",
    "head_norm",
    "ELEMENT* qkv, const ELEMENT* q_weight, const ELEMENT* k_weight, int rows, int heads, int kv_heads, int head_dim, "
    "float eps",
    HALVES,
)
_WARPS_OF_A_BLOCK = 4
_CHUNK = 8  # elements: kChunk in step/chunk.cuh
_MOST_HEAD_DIM = 512


def head_norm(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, heads: int, eps: float) -> None:
    """Norm the queries and keys of a fused projection in place, each head alone (QK norm, as in Qwen 3 and GLM-4.5).

    Args:
        qkv: `[..., (heads + 2 kv_heads) head_dim]`, contiguous, float16 or bfloat16: all queries, keys, values.
        q_weight, k_weight: `[head_dim]`, in the same dtype.
        heads: of the queries.
        eps: added to the mean of squares.

    The bits are those of `rms_norm` of each head.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    check_alike("head_norm", HALVES, qkv=qkv, q_weight=q_weight, k_weight=k_weight)
    if q_weight.dim() != 1:
        raise TensorError(f"head_norm: q_weight has shape {list(q_weight.shape)}, expected [head_dim]")
    check_shape("head_norm", {"k_weight": tuple(q_weight.shape)}, "as q_weight", k_weight=k_weight)
    head_dim = len(q_weight)
    others = qkv.shape[-1] - heads * head_dim
    if not qkv.is_contiguous() or others <= 0 or others % (2 * head_dim):
        raise TensorError(
            f"head_norm: qkv has shape {list(qkv.shape)} and strides {list(qkv.stride())}, expected "
            f"(heads + 2 kv_heads) of {head_dim} features, {heads} heads, contiguous"
        )
    _head_norm(qkv.view(-1, qkv.shape[-1]), q_weight, k_weight, heads, eps)


def _launch(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, heads: int, eps: float) -> None:
    head_dim = len(q_weight)
    kv_heads = (qkv.shape[1] // head_dim - heads) // 2
    whole = q_weight.is_contiguous() and k_weight.is_contiguous() and aligned(qkv, q_weight, k_weight)
    if not whole or head_dim % _CHUNK or head_dim > _MOST_HEAD_DIM:
        _reference(qkv, q_weight, k_weight, heads, eps)
        return
    _KERNELS[qkv.dtype](
        blocks((len(qkv) * (heads + kv_heads), _WARPS_OF_A_BLOCK)),
        32 * _WARPS_OF_A_BLOCK,
        qkv=qkv,
        q_weight=q_weight,
        k_weight=k_weight,
        rows=len(qkv),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=eps,
        dependent=True,
    )


def _reference(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, heads: int, eps: float) -> None:
    split = qkv.unflatten(-1, (-1, len(q_weight)))
    kv_heads = (split.shape[1] - heads) // 2
    for part, weight in ((split[:, :heads], q_weight), (split[:, heads : heads + kv_heads], k_weight)):
        part.copy_(reference.rms_norm(part, weight, eps))


_head_norm = operator(
    "head_norm(Tensor(a!) qkv, Tensor q_weight, Tensor k_weight, int heads, float eps) -> ()",
    cuda=_launch,
    reference=_reference,
    fake=lambda qkv, q_weight, k_weight, heads, eps: None,
)

"""`mla_attention`: multi-head latent attention of rows of queries over the cache of latents."""

import torch
from torch import Tensor

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import check_alike, check_rank, check_shape
from warpbus.kernels.ops.cache import check_indices, check_stored
from warpbus.kernels.reference import mla as reference


def mla_attention(
    q: Tensor,
    positions: Tensor,
    blocks: Tensor,
    latents: Tensor,
    *,
    value_dim: int,
    scale: float,
    limit: int,
    selected: Tensor | None = None,
) -> Tensor:
    """Attend to all latents up to a position (MLA in its absorbed form; DeepSeek-V2, arXiv:2405.04434, section 2.1).

    All heads share one KV head: a token's key is its latent with its rotary key, its value the first part of the key.
    On a GPU torch's operators do the work. They copy all latents up to `limit` for each row, and never wait for the
    GPU.

    Args:
        q: `[b, heads, d]`, rotated; float16, bfloat16 or float32.
        positions: int32 `[b]`: the last position that each row attends to; each at least 0 and less than `limit`, which
            is not checked, since it would take the GPU's answer.
        blocks: int32 `[b, n]`: the row's block table, position p is in block `blocks[row, p // B]` of the cache.
            Entries past a row's position are not used, whatever they are.
        latents: the cache, `[blocks, 1, B, d]` in the dtype of `q`, B a power of two from 16 to 256; any strides, the
            last one 1. What is past a row's position may be anything, also NaN.
        value_dim: leading features of a key that are its value.
        scale: of the scores.
        limit: greater than all positions.
        selected: bool `[b, tokens]`, at least the tokens of `ceil(limit / B)` blocks: rows attend to these only. Each
            row has at least one up to its position.

    Returns:
        `[b, heads, value_dim]` in the dtype of `q`.

    Raises:
        TensorError: other shapes, dtypes, strides or devices.
        UsageError: `limit` does not fit the block table, or `value_dim` the latents.
    """
    name = "mla_attention"
    check_rank(name, 3, q=q)
    check_rank(name, 2, blocks=blocks)
    check_alike(name, q=q)
    check_stored(name, "latents", latents, q.dtype, None, "scales")
    batch, _, size = q.shape
    if latents.shape[1] != 1 or latents.shape[3] != size or latents.device != q.device:
        raise TensorError(
            f"{name}: latents have shape {list(latents.shape)} on {latents.device}: give [blocks, 1, tokens of a "
            f"block, {size}] on {q.device}, with the features of q"
        )
    one_each = {"positions": (batch,), "blocks": (batch, blocks.shape[1])}
    check_shape(name, one_each, f"one for each of the {batch} rows of q", positions=positions, blocks=blocks)
    check_indices(name, q.device, torch.int32, positions=positions, blocks=blocks)
    if not 1 <= value_dim <= size:
        raise UsageError(f"{name}: value_dim is {value_dim}: give one from 1 to {size}, the features of q")
    held = blocks.shape[1] * latents.shape[2]
    if not 0 < limit <= held:
        raise UsageError(f"{name}: limit is {limit}, with blocks for {held} tokens: give one from 1 up to that")
    read = -(-limit // latents.shape[2]) * latents.shape[2]
    if selected is not None and (
        selected.dtype != torch.bool
        or selected.device != q.device
        or selected.dim() != 2
        or len(selected) != batch
        or selected.shape[1] < read
    ):
        raise TensorError(
            f"{name}: selected is {selected.dtype} {list(selected.shape)} on {selected.device}: give torch.bool "
            f"[{batch}, {read}] on {q.device}"
        )
    return _mla_attention(q, positions, blocks, latents, value_dim, scale, limit, selected)


_mla_attention = operator(
    "mla_attention(Tensor q, Tensor positions, Tensor blocks, Tensor latents, int value_dim, float scale, int limit, "
    "Tensor? selected) -> Tensor",
    cuda=reference.mla_attention,
    reference=reference.mla_attention,
    fake=lambda q, positions, blocks, latents, value_dim, *others: q.new_empty(*q.shape[:2], value_dim),
)

"""Attention of one new token a row over the cache of keys and values, in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.kernels.reference.cache import INT4, gather, hadamard, write
from warpbus.kernels.reference.rope import rotate


def decode_attention(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    blocks: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    heads: int,
    interleaved: bool,
    limit: int,
    stored: bool,
) -> Tensor:
    """Writes the new keys and values unless they are `stored`, and attends to all up to them. See `ops.attention`."""
    if len(qkv) == 0:
        return qkv.new_empty(0, heads, qkv.shape[1] // (heads + 2 * keys.shape[1]))
    kv_heads, size = keys.shape[1], keys.shape[2]
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=1)
    last = positions.long()[:, None]
    angles = table.index_select(0, positions)
    if not stored:
        slots = (blocks.gather(1, last // size) * size + last % size)[:, 0]
        write(rotate(k, angles, interleaved), slots, keys, key_scales)
        write(v, slots, values, value_scales)
    named, seen, begin = visible(positions, blocks, size, limit)
    hidden = ~seen[:, None, begin:, None]
    k, v = gather(keys, key_scales, named, qkv.dtype), gather(values, value_scales, named, qkv.dtype)
    for past in (k, v):
        past[:, :, begin:].masked_fill_(hidden, 0.0)
    # The queries of a group stand where torch has the tokens of one sequence: keys and values are read once for all.
    queries = rotate(q, angles, interleaved)
    if keys.dtype == INT4:  # keys and values stay in their rotated basis: fewer vectors are rotated
        queries = hadamard(queries)
    grouped = queries.unflatten(1, (kv_heads, -1))
    attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen[:, None, None]).flatten(1, 2)
    return hadamard(attended) if keys.dtype == INT4 else attended


def visible(positions: Tensor, blocks: Tensor, size: int, limit: int) -> tuple[Tensor, Tensor, int]:
    """Where rows find the tokens that they attend to.

    Args:
        positions: int32 `[b]`: the last position that each row attends to.
        blocks: int32 `[b, n]`: block tables.
        size: tokens of a block.
        limit: greater than all positions.

    Returns:
        the blocks to read, `[b, ceil(limit / size)]`, all of them valid; bool `[b, tokens]`, which of their tokens a
        row attends to; and a token before which every row attends to all.
    """
    last = positions.long()[:, None]
    # A row's own first block stands for those it does not have: their entries may be anything.
    named = blocks[:, : -(-limit // size)]
    starts = torch.arange(0, named.shape[1] * size, size, device=positions.device)
    named = torch.where(starts <= last, named, named[:, :1])
    seen = torch.arange(named.shape[1] * size, device=positions.device) <= last
    # Cache contents past a row's position may not be computed with, not even times 0. Ahead of the shortest
    # row's last block there is nothing to clear; a GPU would have to be waited for to know where that is.
    begin = int(positions.min()) // size * size if positions.device.type == "cpu" else 0
    return named, seen, begin


def merge_attention(a: Tensor, b: Tensor, lse_a: Tensor, lse_b: Tensor) -> Tensor:
    """See `warpbus.kernels.ops.attention_merge.merge_attention`."""
    share = torch.sigmoid(lse_b - lse_a).T[..., None]
    return torch.lerp(a.float(), b.float(), share).to(a.dtype)

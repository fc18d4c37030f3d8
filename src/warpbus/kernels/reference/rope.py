"""Rotary positions of a list of tokens and the write into the cache of keys and values, in plain PyTorch."""

import torch
from torch import Tensor

from warpbus.kernels.reference.cache import write


def rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first `rotary_dim` dimensions of each head in float32, rounded once; see `ops.rope`.

    Args:
        x: `[..., tokens, heads, head_dim]`; `angles`: float32 `[tokens, rotary_dim]`, cosines and then sines.
    """
    rotary = angles.shape[-1]
    cos, sin = angles[:, None, : rotary // 2], angles[:, None, rotary // 2 :]
    wide, rest = x[..., :rotary].float(), x[..., rotary:]
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((joined.to(x.dtype), rest), dim=-1)


def rope_and_cache(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    fixed_key_scales: Tensor | None,
    fixed_value_scales: Tensor | None,
    heads: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """The rotated queries and keys; keys and values are written into the cache. See `ops.rope`."""
    kv_heads = keys.shape[1]
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=1)
    angles = table.index_select(0, positions)
    q, k = (rotate(x, angles, interleaved) for x in (q, k))
    write(k, slots, keys, key_scales, fixed_key_scales)
    write(v, slots, values, value_scales, fixed_value_scales)
    return q, k

"""Rotary positions of a prompt and the write into the cache of keys and values, in plain PyTorch."""

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first `rotary_dim` dimensions of each head in float32, rounded once; see `ops.rope`.

    Args:
        x: `[batch, tokens, heads, head_dim]`; `angles`: float32 `[tokens, rotary_dim]`, cosines and then sines.
    """
    rotary = angles.shape[-1]
    cos, sin = angles[:, None, : rotary // 2], angles[:, None, rotary // 2 :]
    wide, rest = x[..., :rotary].float(), x[..., rotary:]
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((joined.to(x.dtype), rest), dim=-1)


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of `x` `[..., head_dim]` in int8 or float8_e4m3fn, and float32 scales `[...]`: absmax / 127 or / 448."""
    wide = x.float()
    scales = wide.abs().amax(-1) / LARGEST[dtype]
    ratios = (wide / scales[..., None]).masked_fill(scales[..., None] == 0, 0.0)
    codes = ratios.clamp(-LARGEST[dtype], LARGEST[dtype])
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scales


def rope_and_cache(
    qkv: Tensor,
    table: Tensor,
    start: int,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    heads: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """The rotated queries and keys; keys and values are written into the cache. See `ops.rope`."""
    batch, tokens, _ = qkv.shape
    kv_heads = keys.shape[1]
    end = start + tokens
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=2)
    q, k = (rotate(x, table[start:end], interleaved) for x in (q, k))
    for x, cache, scales in ((k, keys, key_scales), (v, values, value_scales)):
        written = x.transpose(1, 2)
        if scales is not None:
            written, scales[:batch, :, start:end] = quantize(written, cache.dtype)
        cache[:batch, :, start:end] = written
    return q, k

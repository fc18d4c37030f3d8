"""Attention of one new token a row over the cache of keys and values, in plain PyTorch."""

import torch
from torch import Tensor

from warpbus.kernels.reference.rope import quantize, rotate


def decode_attention(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    heads: int,
    interleaved: bool,
    limit: int,
) -> Tensor:
    """Writes the new keys and values at `positions` and attends to all up to them, in float32. See `ops.attention`."""
    batch = qkv.shape[0]
    kv_heads = keys.shape[1]
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=1)
    places = positions.long()
    # A row of the batch stands where `rotate` has the tokens of one sequence.
    q, k = (rotate(x[None], table[places], interleaved)[0] for x in (q, k))
    rows = torch.arange(batch, device=qkv.device)
    seen = torch.arange(limit, device=qkv.device) <= positions[:, None]
    attended = []
    for written, cache, scales in ((k, keys, key_scales), (v, values, value_scales)):
        if scales is not None:
            written, scales[rows, :, places] = quantize(written, cache.dtype)
        cache[rows, :, places] = written
        wide = cache[:batch, :, :limit].float()
        if scales is not None:
            wide = wide * scales[:batch, :, :limit, None]
        # What lies past a row's position is no number that may be computed with, not even times 0.
        attended.append(wide.masked_fill(~seen[:, None, :, None], 0.0))
    grouped = q.float().unflatten(1, (kv_heads, -1))
    scores = grouped @ attended[0].transpose(-1, -2) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    return (weights @ attended[1]).flatten(1, 2).to(qkv.dtype)

"""The cache of keys and values in blocks, in plain PyTorch: what goes in and what comes out."""

import torch
from torch import Tensor

from warpbus.kernels.reference.grid import LARGEST, nearest_values


def quantize(x: Tensor, dtype: torch.dtype, fixed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes of `x` `[..., head_dim]` in int8 or float8_e4m3fn, and float32 scales `[...]`: absmax / 127 or / 448.

    With `fixed`, float32 `[kv_heads]` for the last but one dimension of `x`, these are the scales, and what exceeds the
    largest code becomes it.
    """
    wide = x.float()
    scales = wide.abs().amax(-1) / LARGEST[dtype] if fixed is None else fixed.expand(x.shape[:-1])
    ratios = (wide / scales[..., None]).masked_fill(scales[..., None] == 0, 0.0)
    return nearest_values(ratios, dtype), scales


def write(new: Tensor, slots: Tensor, cache: Tensor, scales: Tensor | None, fixed: Tensor | None = None) -> None:
    """Write a vector of each head `[t, kv_heads, d]` to each of `slots` `[t]`, as codes where there are scales.

    `fixed`: see `quantize`.
    """
    size = cache.shape[2]
    blocks, offsets = slots // size, slots % size
    if scales is not None:
        new, scales[blocks, :, offsets] = quantize(new, cache.dtype, fixed)
    _plain(cache)[blocks, :, offsets] = _plain(new)


def gather(cache: Tensor, scales: Tensor | None, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """What the blocks `[b, n]` of `b` sequences hold: `[b, kv_heads, n * B, d]` in `dtype`, in memory of its own."""
    found = _picked(_plain(cache), blocks).view(cache.dtype)
    if scales is not None:
        return (found.float() * _picked(scales, blocks)[..., None]).to(dtype).transpose(0, 1)
    return found.to(dtype).transpose(0, 1)


def gather_cache(cache: Tensor, scales: Tensor | None, blocks: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """The first `tokens` tokens of the blocks `[n]`: `[tokens, kv_heads, d]`. See `ops.cache`."""
    count = -(-tokens // cache.shape[2])
    found = gather(cache, scales, blocks[None, :count], dtype)
    return found[0, :, :tokens].transpose(0, 1).contiguous()


def _picked(cache: Tensor, blocks: Tensor) -> Tensor:
    """`[kv_heads, b, n * B, ...]` of `[blocks, kv_heads, B, ...]`: copied once, since heads stay outside."""
    heads_first, which = cache.transpose(0, 1), blocks.flatten()
    # Not `index_select`: of a cache with layers in between it would copy all blocks. On the CPU whole blocks are copied
    # several times faster than torch gathers elements.
    if which.device.type == "cpu" and len(which):
        found = torch.stack([heads_first[:, block] for block in which.tolist()], dim=1)
    else:
        found = heads_first[:, which]
    return found.unflatten(1, blocks.shape).flatten(2, 3)


def _plain(stored: Tensor) -> Tensor:
    """Codes as bytes, which torch picks and puts on every device; float8 it does not."""
    return stored.view(torch.uint8) if stored.element_size() == 1 else stored

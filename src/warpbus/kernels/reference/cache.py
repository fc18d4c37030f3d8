"""The cache of keys and values in blocks, in plain PyTorch: what goes in and what comes out."""

import torch
from torch import Tensor

from warpbus.kernels.reference.grid import LARGEST, nearest_values

INT4 = torch.uint8
"""The dtype of a cache of 4-bit codes, two per byte: element 2i of a vector in the lower half of byte i, 2i + 1 in the
upper half. A code c stands for (c - 7.5) times the vector's scale, in the basis of `hadamard`."""

_LEVELS = 16


def stored_length(size: int, dtype: torch.dtype) -> int:
    """Elements of a cache of a dtype that hold a vector of `size` dimensions."""
    return size // 2 if dtype == INT4 else size


def hadamard(x: Tensor) -> Tensor:
    """Multiply the last dimension by the orthonormal Hadamard matrix, its own inverse, in float32, rounded once.

    A length that is not a power of two is divided into blocks of the largest power of two that divides it. Outliers of
    a vector are spread over its block, so that 4 bits suffice (QuaRot; Ashkboos et al., 2024).
    """
    wide, block, step = x.float(), x.shape[-1] & -x.shape[-1], 1
    while step < block:
        first, second = wide.unflatten(-1, (-1, 2, step)).unbind(-2)
        wide = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return (wide * block**-0.5).to(x.dtype)


def quantize(x: Tensor, dtype: torch.dtype, fixed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes of `x` `[..., head_dim]` in int8 or float8_e4m3fn, and float32 scales `[...]`: absmax / 127 or / 448.

    For `INT4`: codes `[..., head_dim / 2]` of the rotated vectors; the scales are their absmax / 8, so that 16
    intervals of one scale each cover them.

    With `fixed`, float32 `[kv_heads]` for the last but one dimension of `x`, these are the scales, and what exceeds the
    largest code becomes it.
    """
    if dtype == INT4:
        return _quantize_int4(x)
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
    """The contents of the blocks `[b, n]` of `b` sequences: `[b, kv_heads, n * B, d]` in `dtype`, in memory of its own.

    Of `INT4`, the rotated vectors.
    """
    found = _picked(_plain(cache), blocks).view(cache.dtype)
    if cache.dtype == INT4:
        found = _unpacked(found)
    if scales is not None:
        return (found.float() * _picked(scales, blocks)[..., None]).to(dtype).transpose(0, 1)
    return found.to(dtype).transpose(0, 1)


def gather_cache(cache: Tensor, scales: Tensor | None, blocks: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """The first `tokens` tokens of the blocks `[n]`: `[tokens, kv_heads, d]`. See `ops.cache`."""
    count = -(-tokens // cache.shape[2])
    if cache.dtype == INT4:
        found = hadamard(gather(cache, scales, blocks[None, :count], torch.float32)).to(dtype)
    else:
        found = gather(cache, scales, blocks[None, :count], dtype)
    return found[0, :, :tokens].transpose(0, 1).contiguous()


def _quantize_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes and scales, see `quantize`."""
    rotated = hadamard(x.float())
    scales = rotated.abs().amax(-1) / (_LEVELS // 2)
    ratios = (rotated / scales[..., None]).masked_fill(scales[..., None] == 0, 0.0)
    codes = ratios.floor().add_(_LEVELS // 2).clamp_(0, _LEVELS - 1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales


def _unpacked(packed: Tensor) -> Tensor:
    """The numbers that the scales multiply, float32 `[..., head_dim]`."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return codes.float() - (_LEVELS - 1) / 2


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

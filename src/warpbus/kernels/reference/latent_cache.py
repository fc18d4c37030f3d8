"""The FP8 cache of latents of multi-head latent attention, in plain PyTorch: what goes in and what comes out.

A token is a row of bytes: the latent in e4m3, one float32 scale per `GROUP` features of it, and the rotary key in the
dtype of the activations. Each of the three parts begins at a multiple of 16 bytes; what is left over is zero. For
latents of 512 features and rotary keys of 64 in 16 bits these are 512 + 16 + 128 = 656 bytes, the layout of FlashMLA.

A scale is the smallest power of two with which no code exceeds 448, from 2^-24 to 2^7. So a code times its scale is
exact in bfloat16, and in float16 down to its smallest number; greater features become 57,344. The scale of a group with
a NaN is NaN. Powers of two cost e4m3, which has an exponent itself, no precision.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.kernels.reference.cache import gather, write
from warpbus.kernels.reference.grid import LARGEST, nearest_values

LATENT_CODES = torch.float8_e4m3fn
"""The dtype of an FP8 cache of latents `[blocks, 1, B, token_bytes(...)]`, of which only the codes have it."""

GROUP = 128
"""Features of a latent that share a scale."""

_PIECE = 16  # bytes
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-24, 2.0**7
_MANTISSA = 2**23 - 1  # of a float32


def token_bytes(rank: int, rope_dim: int, dtype: torch.dtype) -> int:
    """Bytes of a token in an FP8 cache: latents of `rank` features, rotary keys of `rope_dim` in `dtype`."""
    return _places(rank, rope_dim, dtype)[-1]


def quantize(latent: Tensor, rank: int) -> Tensor:
    """Tokens as they are cached: uint8 `[t, token_bytes]` of latents with rotary keys `[t, rank + rope_dim]`."""
    scales_at, rotary_at, size = _places(rank, latent.shape[1] - rank, latent.dtype)
    wide, count = _grouped(latent[:, :rank].float()), -(-rank // GROUP)
    ratios = wide.abs().amax(-1) / LARGEST[LATENT_CODES]
    ratios.clamp_(_SMALLEST_SCALE, _LARGEST_SCALE)
    powers = ((ratios.view(torch.int32) + _MANTISSA) & ~_MANTISSA).view(torch.float32)
    scales = torch.where(ratios.isnan(), ratios, powers)
    codes = nearest_values(wide / scales[..., None], LATENT_CODES).flatten(1)[:, :rank]
    found = torch.zeros(len(latent), size, dtype=torch.uint8, device=latent.device)
    found[:, :rank] = codes.contiguous().view(torch.uint8)
    found[:, scales_at : scales_at + 4 * count] = scales.contiguous().view(torch.uint8)
    rotary = latent[:, rank:].contiguous().view(torch.uint8)
    found[:, rotary_at : rotary_at + rotary.shape[1]] = rotary
    return found


def dequantize(cached: Tensor, rank: int, rope_dim: int, dtype: torch.dtype) -> Tensor:
    """Latents with rotary keys, `[..., rank + rope_dim]` in `dtype`, of tokens as they are cached, contiguous uint8
    `[..., token_bytes]`; rounded once."""
    scales_at, rotary_at, _ = _places(rank, rope_dim, dtype)
    count = -(-rank // GROUP)
    codes = cached[..., :rank].contiguous().view(LATENT_CODES).float()
    scales = cached[..., scales_at : scales_at + 4 * count].contiguous().view(torch.float32)
    latent = (_grouped(codes) * scales[..., None]).flatten(-2)[..., :rank]
    rotary = cached[..., rotary_at : rotary_at + dtype.itemsize * rope_dim].contiguous().view(dtype)
    return torch.cat((latent.to(dtype), rotary), dim=-1)


def write_latents(new: Tensor, rank: int, slots: Tensor, latents: Tensor) -> Tensor:
    """Write tokens `[t, rank + rope_dim]` to slots `[t]` of a cache; what is read from there, in the dtype of `new`."""
    if latents.dtype != LATENT_CODES:
        write(new[:, None], slots, latents, None)
        return new
    cached = quantize(new, rank)
    write(cached[:, None], slots, latents.view(torch.uint8), None)
    return dequantize(cached, rank, new.shape[1] - rank, new.dtype)


def read_latents(latents: Tensor, blocks: Tensor, rank: int, rope_dim: int, dtype: torch.dtype) -> Tensor:
    """What the blocks `[b, n]` of `b` sequences hold: `[b, 1, n * B, rank + rope_dim]` in `dtype`, in memory of its
    own."""
    if latents.dtype != LATENT_CODES:
        return gather(latents, None, blocks, dtype)
    return dequantize(gather(latents, None, blocks, LATENT_CODES).view(torch.uint8), rank, rope_dim, dtype)


def read_slots(latents: Tensor, slots: Tensor, rank: int, rope_dim: int, dtype: torch.dtype) -> Tensor:
    """As `read_latents`, of single tokens by their slots `[b, n]` (block * B + token in the block): `[b, 1, n, rank +
    rope_dim]`."""
    size = latents.shape[2]
    of_bytes = latents.dtype == LATENT_CODES
    found = (latents.view(torch.uint8) if of_bytes else latents)[slots // size, 0, slots % size]
    return (dequantize(found, rank, rope_dim, dtype) if of_bytes else found)[:, None]


def gather_latents(
    latents: Tensor, blocks: Tensor, tokens: int, rank: int, rope_dim: int, dtype: torch.dtype
) -> Tensor:
    """The first `tokens` tokens of the blocks `[n]`: `[tokens, rank + rope_dim]`. See `ops.latent_cache`."""
    count = -(-tokens // latents.shape[2])
    return read_latents(latents, blocks[None, :count], rank, rope_dim, dtype)[0, 0, :tokens].contiguous()


def _places(rank: int, rope_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Where scales and rotary key begin in a token's bytes, and how many bytes there are."""
    scales_at = _padded(rank)
    rotary_at = scales_at + _padded(4 * -(-rank // GROUP))
    return scales_at, rotary_at, rotary_at + _padded(rope_dim * dtype.itemsize)


def _padded(size: int) -> int:
    return -(-size // _PIECE) * _PIECE


def _grouped(latent: Tensor) -> Tensor:
    """Latents `[..., rank]` as `[..., groups, GROUP]`, the last group filled up with zeros."""
    rest = -latent.shape[-1] % GROUP
    return F.pad(latent, (0, rest)).unflatten(-1, (-1, GROUP))

"""The block types of GGUF: how runs of consecutive weights of a row are stored.

A row is cut into blocks of 32 or 256 weights. All fields are little-endian, `d`, `m` and `dmin` are float16:

    Q4_0  d, 16 bytes             w = d (q - 8); weight i is the low nibble of byte i, weight i + 16 the high nibble
    Q4_1  d, m, 16 bytes          w = d q + m
    Q5_0  d, 32 bits, 16 bytes    w = d (q - 16); bit i is the fifth bit of weight i, the nibbles are as in Q4_0
    Q5_1  d, m, 32 bits, 16 bytes w = d q + m
    Q8_0  d, 32 int8              w = d q
    Q4_K  d, dmin, 12 bytes, 128 bytes              eight groups of 32: w = d scale q - dmin min
    Q5_K  d, dmin, 12 bytes, 32 bytes, 128 bytes    the same with a fifth bit
    Q6_K  128 bytes, 64 bytes, 16 int8 scales, d    16 groups of 16: w = d scale (q - 32)

The 12 bytes hold eight 6-bit scales and eight 6-bit minima. Source: the GGUF specification of llama.cpp.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Weights of a block of the types without `_K`, and of a group of Q4_K and Q5_K."""

_SUPER = 256


@dataclass(frozen=True)
class BlockType:
    """A storage type of GGUF.

    Attributes:
        name: as llama.cpp writes it, for instance `Q4_K`.
        number: in the file.
        size: weights of a block; 1 for plain numbers.
        nbytes: bytes of a block.
        dtype: of plain numbers; None for blocks.
        decode: uint8 `[blocks, nbytes]` to float32 `[blocks, size]`; None for plain numbers.
    """

    name: str
    number: int
    size: int
    nbytes: int
    dtype: torch.dtype | None = None
    decode: Callable[[Tensor], Tensor] | None = None


def half(raw: Tensor) -> Tensor:
    """The float16 number in two bytes: uint8 `[blocks, 2]` to float32 `[blocks, 1]`."""
    return raw.contiguous().view(torch.float16).float()


def nibbles(raw: Tensor) -> Tensor:
    """uint8 `[..., n]` to uint8 `[..., 2 n]`: all low nibbles, then all high nibbles."""
    return torch.cat([raw & 15, raw >> 4], -1)


def fifth_bits(raw: Tensor) -> Tensor:
    """The bits of Q5_0 and Q5_1: uint8 `[blocks, 4]` to 0 or 16, uint8 `[blocks, 32]`."""
    bits = (raw.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(1) << 4


def q4_0_codes(raw: Tensor) -> Tensor:
    """The codes 0 to 15 of Q4_0 blocks, uint8 `[blocks, 32]`."""
    return nibbles(raw[:, 2:])


def q5_0_codes(raw: Tensor) -> Tensor:
    """The codes 0 to 31 of Q5_0 blocks, uint8 `[blocks, 32]`."""
    return nibbles(raw[:, 6:]) | fifth_bits(raw[:, 2:6])


def q8_0_codes(raw: Tensor) -> Tensor:
    """The values of Q8_0 blocks plus 128, uint8 `[blocks, 32]`."""
    return raw[:, 2:] ^ 128


def _q4_0(raw: Tensor) -> Tensor:
    return half(raw[:, :2]) * (q4_0_codes(raw).float() - 8)


def _q4_1(raw: Tensor) -> Tensor:
    return half(raw[:, :2]) * nibbles(raw[:, 4:]).float() + half(raw[:, 2:4])


def _q5_0(raw: Tensor) -> Tensor:
    return half(raw[:, :2]) * (q5_0_codes(raw).float() - 16)


def _q5_1(raw: Tensor) -> Tensor:
    codes = nibbles(raw[:, 8:]) | fifth_bits(raw[:, 4:8])
    return half(raw[:, :2]) * codes.float() + half(raw[:, 2:4])


def _q8_0(raw: Tensor) -> Tensor:
    return half(raw[:, :2]) * raw[:, 2:].contiguous().view(torch.int8).float()


def unpack_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and minima of Q4_K and Q5_K: uint8 `[blocks, 12]` to two of `[blocks, 8]`."""
    first, second, third = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], 1)
    return scales, torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], 1)


def pack_scales(scales: Tensor, minima: Tensor) -> Tensor:
    """Undo `unpack_scales`."""
    first = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    second = minima[:, :4] | (minima[:, 4:] >> 4 << 6)
    return torch.cat([first, second, (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4], 1)


def _grouped(raw: Tensor, codes: Tensor) -> Tensor:
    """The weights of Q4_K and Q5_K from the codes `[blocks, 8, 32]`."""
    scales, minima = unpack_scales(raw[:, 4:16])
    steps, offsets = half(raw[:, :2]) * scales.float(), half(raw[:, 2:4]) * minima.float()
    return (steps.unsqueeze(-1) * codes.float() - offsets.unsqueeze(-1)).flatten(1)


def _pairs(raw: Tensor) -> Tensor:
    """128 bytes whose runs of 32 hold the low nibbles of one group and the high ones of the next: `[blocks, 8, 32]`."""
    return nibbles(raw.unflatten(1, (4, GROUP))).view(-1, 8, GROUP)


def _q4_k(raw: Tensor) -> Tensor:
    return _grouped(raw, _pairs(raw[:, 16:]))


def _q5_k(raw: Tensor) -> Tensor:
    fifth = (raw[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1)) & 1
    return _grouped(raw, _pairs(raw[:, 48:]) | fifth << 4)


def _q6_k(raw: Tensor) -> Tensor:
    low = nibbles(raw[:, :128].unflatten(1, (2, 64)))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = (raw[:, 128:192].reshape(-1, 2, 1, GROUP) >> shifts) & 3
    codes = low.view(-1, 2, 4, GROUP) | high << 4
    scales = half(raw[:, 208:]) * raw[:, 192:208].contiguous().view(torch.int8).float()
    return (scales.unsqueeze(-1) * (codes.reshape(-1, 16, 16).float() - 32)).flatten(1)


TYPES = {
    each.name: each
    for each in (
        BlockType("F32", 0, 1, 4, torch.float32),
        BlockType("F16", 1, 1, 2, torch.float16),
        BlockType("BF16", 30, 1, 2, torch.bfloat16),
        BlockType("Q4_0", 2, GROUP, 18, decode=_q4_0),
        BlockType("Q4_1", 3, GROUP, 20, decode=_q4_1),
        BlockType("Q5_0", 6, GROUP, 22, decode=_q5_0),
        BlockType("Q5_1", 7, GROUP, 24, decode=_q5_1),
        BlockType("Q8_0", 8, GROUP, 34, decode=_q8_0),
        BlockType("Q4_K", 12, _SUPER, 144, decode=_q4_k),
        BlockType("Q5_K", 13, _SUPER, 176, decode=_q5_k),
        BlockType("Q6_K", 14, _SUPER, 210, decode=_q6_k),
    )
}
"""The types that are read and written, by name."""

BY_NUMBER = {each.number: each for each in TYPES.values()}
PLAIN = {each.dtype: each for each in TYPES.values() if each.dtype is not None}
"""The types of plain numbers, by dtype."""

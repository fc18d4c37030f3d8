"""Packing small unsigned integers into 32-bit words: a dense little-endian stream of bits.

Value `i` of a row occupies bits `[i * bits, (i + 1) * bits)` of the row, least significant bit first. For 2, 4
and 8 bits a word holds a whole number of values; 32 values of 3 bits fill three words and some straddle two.
"""

import torch
from torch import Tensor


def packed_words(count: int, bits: int) -> int:
    """How many 32-bit words hold `count` values of `bits` bits."""
    return -(-count * bits // 32)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack unsigned codes along the last axis.

    Args:
        codes: `[..., n]`, any integer dtype, values in `[0, 2**bits)`.
        bits: 1 to 8.

    Returns:
        int32 `[..., packed_words(n, bits)]`; unused high bits of the last word are zero.
    """
    count = codes.shape[-1]
    words = packed_words(count, bits)
    if 32 % bits == 0:
        per_word = 32 // bits
        padded = torch.nn.functional.pad(codes.to(torch.int32), (0, words * per_word - count))
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
        # Distinct bits, so a wrapping sum is the same as an "or".
        return (padded.unflatten(-1, (words, per_word)) << shifts).sum(-1, dtype=torch.int32)
    position = torch.arange(count, device=codes.device) * bits
    word, shift = position // 32, position % 32
    wide = codes.to(torch.int64) << shift
    stream = torch.zeros(*codes.shape[:-1], words + 1, dtype=torch.int64, device=codes.device)
    stream.index_add_(-1, word, wide & 0xFFFFFFFF)
    stream.index_add_(-1, word + 1, wide >> 32)
    signed = torch.where(stream >= 2**31, stream - 2**32, stream)
    return signed[..., :words].to(torch.int32)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo `pack`.

    Args:
        packed: int32 `[..., packed_words(count, bits)]`.
        bits: 1 to 8.
        count: the number of values in a row.

    Returns:
        uint8 `[..., count]`.
    """
    mask = 2**bits - 1
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
        values = (packed.unsqueeze(-1) >> shifts) & mask
        return values.flatten(-2)[..., :count].to(torch.uint8)
    # Eight values fill `bits` bytes: gather these into one integer and cut it up.
    chunks = -(-count // 8)
    stream = packed.contiguous().view(torch.uint8)
    padded = torch.nn.functional.pad(stream, (0, max(0, chunks * bits - stream.shape[-1])))
    wide = torch.int32 if bits < 4 else torch.int64
    chunk_bytes = padded[..., : chunks * bits].unflatten(-1, (chunks, bits)).to(wide)
    byte_shifts = torch.arange(0, 8 * bits, 8, dtype=wide, device=packed.device)
    joined = (chunk_bytes << byte_shifts).sum(-1, keepdim=True, dtype=wide)
    shifts = torch.arange(0, 8 * bits, bits, dtype=wide, device=packed.device)
    return ((joined >> shifts) & mask).flatten(-2)[..., :count].to(torch.uint8)

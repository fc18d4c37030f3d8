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
    if 8 % bits == 0:
        # A byte holds a whole number of values: bytes are a quarter of the memory that words would take in between.
        per_byte = 8 // bits
        padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, words * 4 * per_byte - count))
        packed = torch.zeros(*codes.shape[:-1], words, dtype=torch.int32, device=codes.device)
        stream = packed.view(torch.uint8)
        for place, values in enumerate(padded.unflatten(-1, (words * 4, per_byte)).unbind(-1)):
            stream |= values << (place * bits)
        return packed
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
    # Not only contiguous: an axis of length 1 may have any stride then, which the view of bytes refuses.
    words = packed.contiguous().as_strided((packed.numel(),), (1,))
    stream = words.view(torch.uint8).view(*packed.shape[:-1], 4 * packed.shape[-1])
    if 8 % bits == 0:
        places = [(stream >> shift) & mask for shift in range(0, 8, bits)]
        return torch.stack(places, -1).flatten(-2)[..., :count]
    # Eight values fill `bits` bytes: gather these into one integer and cut it up.
    chunks = -(-count // 8)
    padded = torch.nn.functional.pad(stream, (0, max(0, chunks * bits - stream.shape[-1])))
    wide = torch.int32 if bits < 4 else torch.int64
    chunk_bytes = padded[..., : chunks * bits].unflatten(-1, (chunks, bits)).to(wide)
    byte_shifts = torch.arange(0, 8 * bits, 8, dtype=wide, device=packed.device)
    joined = (chunk_bytes << byte_shifts).sum(-1, keepdim=True, dtype=wide)
    shifts = torch.arange(0, 8 * bits, bits, dtype=wide, device=packed.device)
    return ((joined >> shifts) & mask).flatten(-2)[..., :count].to(torch.uint8)

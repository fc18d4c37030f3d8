"""`pack` and `unpack`: against a stream of bits built with Python's integers."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warpbus.qtensor import pack, packed_words, unpack


@st.composite
def rows_of_codes(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    bits = draw(st.integers(1, 8))
    count = draw(st.integers(1, 70))
    row = st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count)
    return bits, draw(st.lists(row, min_size=1, max_size=3))


@settings(deadline=None, max_examples=150)
@given(rows_of_codes())
def test_words_are_a_little_endian_stream_of_bits(drawn: tuple[int, list[list[int]]]) -> None:
    bits, rows = drawn
    packed = pack(torch.tensor(rows), bits)
    words = packed_words(len(rows[0]), bits)
    assert packed.dtype == torch.int32
    assert packed.shape == (len(rows), words)
    for row, found in zip(rows, packed.tolist(), strict=True):
        stream = sum(code << (index * bits) for index, code in enumerate(row))
        assert [word & 0xFFFFFFFF for word in found] == [(stream >> (32 * word)) & 0xFFFFFFFF for word in range(words)]


@settings(deadline=None, max_examples=150)
@given(rows_of_codes())
def test_unpack_undoes_pack(drawn: tuple[int, list[list[int]]]) -> None:
    bits, rows = drawn
    codes = torch.tensor(rows)
    back = unpack(pack(codes, bits), bits, codes.shape[-1])
    assert back.dtype == torch.uint8
    assert torch.equal(back, codes.to(torch.uint8))


def test_any_leading_axes_and_integer_dtypes() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 8, (2, 3, 5, 33), generator=generator)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        packed = pack(codes.to(dtype), 3)
        assert packed.shape == (2, 3, 5, 4)
        assert torch.equal(unpack(packed, 3, 33), codes.to(torch.uint8))


def test_a_transposed_view_packs_like_its_copy() -> None:
    codes = torch.arange(60).reshape(6, 10) % 16
    assert torch.equal(pack(codes.T, 4), pack(codes.T.contiguous(), 4))


def test_the_first_value_is_the_lowest_nibble() -> None:
    assert pack(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), 4).tolist() == [0x87654321 - 2**32]


def test_transposed_and_empty_tensors() -> None:
    """An axis of length 1 or 0 may have any stride."""
    for bits in range(1, 9):
        for rows, count in ((1, 1), (1, 5), (5, 1), (3, 40), (0, 4), (4, 0)):
            codes = torch.arange(count * rows).view(count, rows).T % 2**bits
            packed = pack(codes, bits)
            assert packed.shape == (rows, packed_words(count, bits))
            # The same words, one apart in memory from the next.
            spread = torch.stack([packed, packed], -1)[..., 0]
            assert torch.equal(unpack(spread, bits, count), codes.to(torch.uint8))

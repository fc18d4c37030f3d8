"""Packed weights: nothing is lost in either direction, and every code lies where the tensor cores look for it."""

import itertools

import pytest
import torch

from warpbus.errors import TensorError
from warpbus.kernels.ops.packed import PackedWeight, pack, packed_shapes, unpack
from warpbus.qtensor import QTensor, Scheme

SCHEMES = [
    f"w{bits}a16{group}{asym}"
    for bits, group, asym in itertools.product((2, 3, 4, 5, 6, 8), ("", "-g32", "-g64", "-g128"), ("", "-asym"))
]
DTYPES = [torch.float16, torch.bfloat16]


def quantized(scheme, n, k, dtype=torch.float32):
    scheme = Scheme.parse(scheme)
    generator = torch.Generator().manual_seed(n * 1000 + k)
    shape = n, scheme.groups(k)
    codes = torch.randint(0, scheme.max_code + 1, (n, k), dtype=torch.uint8, generator=generator)
    scales = torch.randn(shape, generator=generator).to(dtype)
    zeros = torch.randint(0, scheme.max_code + 1, shape, dtype=torch.uint8, generator=generator)
    return QTensor.from_codes(scheme, codes, scales, None if scheme.symmetric else zeros)


def same(found, expected):
    assert found.scheme == expected.scheme
    assert found.shape == expected.shape
    assert torch.equal(found.qweight, expected.qweight)
    assert torch.equal(found.scales, expected.scales)
    assert (found.zeros is None) == (expected.zeros is None)
    assert found.zeros is None or torch.equal(found.zeros, expected.zeros)


def places(row, column, k, bits):
    """Word and bit of each bit of a code, from the lowest on, as the module says."""
    h, lane, (p, t, e) = row // 8 % 2, row % 8 * 4 + column % 8 // 2, (column % 16 // 8, column % 8 // 2, column % 2)
    if bits == 8:
        word = ((row // 16 * -(-k // 64) * 2 + column // 32) * 32 + lane) * 4 + 2 * (column % 32 // 16) + p
        return [(word, 16 * e + 8 * h + i) for i in range(8)]
    tile, step, byte = (row // 16 * -(-k // 64) + column // 64) * 32 * bits, column % 64 // 16, 16 * e + 8 * p
    assert t == lane % 4
    if bits == 4:
        return [(tile + 4 * lane + step, byte + 4 * h + i) for i in range(4)]
    if bits == 2:
        return [(tile + 2 * lane + step // 2, byte + step % 2 * 4 + 2 * h + i) for i in range(2)]
    lanes_words = [tile + 2 * lane, tile + 2 * lane + 1, tile + 64 + lane]
    if step < 3:
        return [(lanes_words[step], byte + 3 * h + i) for i in range(3)]
    return [(lanes_words[(3 * h + i) // 2], byte + 6 + (3 * h + i) % 2) for i in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_was_packed_comes_back(scheme, dtype):
    size = Scheme.parse(scheme).group_size
    for n, k in [(1, 128), (16, 128), (37, 384), *([(19, 3 * size)] if size else [(5, 1), (33, 100), (2, 65)])]:
        weight = quantized(scheme, n, k, dtype)
        same(unpack(pack(weight, dtype)), weight)


def test_groups_of_32_need_not_fill_the_last_64_columns():
    weight = quantized("w4a16-g32-asym", 21, 96, torch.float16)
    packed = pack(weight, torch.float16)
    assert packed.scales.shape == (2, 4, 8, 2)
    assert not packed.scales[:, 3].any()
    same(unpack(packed), weight)


@pytest.mark.parametrize("scheme", ["w4a16", "w3a16-asym", "w8a16"])
def test_more_rows_than_are_packed_at_once(scheme):
    weight = quantized(scheme, 2100, 70, torch.bfloat16)
    same(unpack(pack(weight, torch.bfloat16)), weight)


@pytest.mark.parametrize(("n", "k"), [(16, 64), (30, 200), (17, 64), (50, 130)])
@pytest.mark.parametrize("scheme", ["w2a16", "w3a16", "w4a16-asym", "w8a16", "w8a16-asym"])
def test_every_code_lies_where_the_module_says(scheme, n, k):
    weight = quantized(scheme, n, k)
    packed = pack(weight, torch.float16)
    left = [word & 0xFFFFFFFF for word in packed.codes.tolist()]
    for row, codes in enumerate(weight.codes().tolist()):
        for column, code in enumerate(codes):
            for i, (word, bit) in enumerate(places(row, column, k, packed.bits)):
                assert left[word] >> bit & 1 == code >> i & 1
                left[word] &= ~(1 << bit)
    assert not any(left)  # what stands for no column or row is zero


def test_places_of_the_first_codes():
    """As fragment A of mma.m16n8k16 has them: lane 0 holds rows 0 and 8, columns 0, 1, 8 and 9."""
    scale = torch.ones(16, 1)
    for scheme, expected in [
        ("w4a16", [0x87654321]),
        ("w8a16", [0x06050201, 0x08070403]),
        ("w2a16", [0x03090309]),
        ("w3a16", [0x07352311]),
    ]:
        codes = torch.zeros(16, 64, dtype=torch.uint8)
        for value, (row, column) in enumerate(
            [(0, 0), (8, 0), (0, 8), (8, 8), (0, 1), (8, 1), (0, 9), (8, 9)], start=1
        ):
            codes[row, column] = value % 2 ** Scheme.parse(scheme).bits
        packed = pack(QTensor.from_codes(Scheme.parse(scheme), codes, scale), torch.float16)
        words = [word & 0xFFFFFFFF for word in packed.codes.tolist()]
        assert words == expected + [0] * (len(words) - len(expected))


@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w8a16-g64-asym", "w3a16-g128-asym", "w2a16-asym"])
def test_scales_and_zero_points_of_the_rows_g_and_g_plus_8(scheme):
    weight = quantized(scheme, 43, 256, torch.float16)
    packed = pack(weight, torch.float16)
    for values, of_rows in [(packed.scales, weight.scales), (packed.zeros, weight.zeros)]:
        for row in range(48):
            expected = of_rows[row].half() if row < 43 else torch.zeros(of_rows.shape[1])
            assert torch.equal(values[row // 16, :, row % 8, row // 8 % 2], expected.half())


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_rounded_once(dtype):
    weight = quantized("w4a16-g64", 20, 128, torch.float32)
    packed = pack(weight, dtype)
    assert packed.dtype == dtype
    assert torch.equal(unpack(packed).scales, weight.scales.to(dtype))
    assert torch.equal(unpack(packed).dequantize(), weight.dequantize(dtype))


@pytest.mark.parametrize(("n", "k"), [(0, 64), (16, 0), (1, 1), (17, 65), (4096, 13696)])
@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-g32", "w3a16-g64-asym", "w8a16", "w2a16-g128"])
def test_shapes_are_known_beforehand(scheme, n, k):
    scheme = Scheme.parse(scheme)
    words, shape = packed_shapes(scheme, n, k)
    rows, columns = -(-n // 16) * 16, -(-k // 64) * 64
    assert words == rows * columns * scheme.bits // 32
    assert shape == (rows // 16, -(-columns // scheme.group_size) if scheme.group_size else 1, 8, 2)
    if n * k and n < 100 and (scheme.group_size is None or k % scheme.group_size == 0):
        packed = pack(quantized(str(scheme), n, k), torch.float16)
        assert (packed.codes.numel(), tuple(packed.scales.shape)) == (words, shape)


@pytest.mark.parametrize("scheme", ["w4a16", "w3a16-g32-asym", "w8a16-g64"])
def test_matrices_without_rows_or_columns(scheme):
    for n, k in [(0, 128), (20, 0), (0, 0)]:
        weight = quantized(scheme, n, k, torch.float16)
        same(unpack(pack(weight, torch.float16)), weight)


def test_what_a_packed_weight_says_of_itself():
    packed = pack(quantized("w3a16-g64-asym", 20, 128), torch.bfloat16)
    assert packed.bits == 3
    assert packed.device == torch.device("cpu")
    assert packed.nbytes == 32 * 128 * 3 // 8 + 2 * (2 * 2 * 8 * 2 * 2)
    symmetric = pack(quantized("w8a16", 16, 64), torch.float16)
    assert isinstance(symmetric, PackedWeight)
    assert symmetric.zeros is None
    assert symmetric.nbytes == 16 * 64 + 32


def test_other_dtypes_are_rejected():
    with pytest.raises(TensorError, match=r"pack: dtype is torch\.float32, expected float16 or bfloat16, the dtype of"):
        pack(quantized("w4a16", 16, 64), torch.float32)

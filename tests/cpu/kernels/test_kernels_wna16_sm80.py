"""The mma.sync product with packed weights without a GPU: a model of its dequantization and its places; its plans."""

import itertools

import numpy as np
import pytest
import torch

from warpbus.kernels.ops import wna16_sm80
from warpbus.kernels.ops.packed import pack
from warpbus.qtensor import QTensor, Scheme

A100, ADA = 164 * 1024, 100 * 1024  # bytes of shared memory of a multiprocessor
TILINGS = {"large": wna16_sm80.LARGE, "medium": wna16_sm80.MEDIUM, "small": wna16_sm80.SMALL}
DTYPES = [torch.float16, torch.bfloat16]
LANES = np.arange(32)


def quantized(scheme, n, k):
    generator = torch.Generator().manual_seed(n * 1000 + k)
    shape = n, scheme.groups(k)
    codes = torch.randint(0, scheme.max_code + 1, (n, k), dtype=torch.uint8, generator=generator)
    scales = torch.randn(shape, generator=generator).half()
    zeros = torch.randint(0, scheme.max_code + 1, shape, dtype=torch.uint8, generator=generator)
    return QTensor.from_codes(scheme, codes, scales, None if scheme.symmetric else zeros)


def as_pairs(values, dtype):
    """The low and the high halves of registers, as numbers."""
    return values.to(torch.int32).view(dtype).view(*values.shape, 2)


def twice(bits):
    return bits << 16 | bits


def joined(words, mask, base):
    """A value of two bytes that is a power of two and, in its last places, a code: `join_bits`."""
    bits = words.to(torch.int64) & 0xFFFFFFFF & twice(mask) | twice(base)
    return torch.where(bits >= 2**31, bits - 2**32, bits)


def integers(words, zeros, bits, dtype):
    """`Codes<T, Bits>::integers` in dequantize.cuh, `[..., 4 registers, 2 columns]`, for words `[..., kWords]` of lanes
    and zero points `[..., 2 rows]`; each step rounded to dtype as there."""
    words, zeros = words.to(torch.int64) & 0xFFFFFFFF, zeros.to(dtype)
    registers = []
    for i in range(4):
        zero = zeros[..., i % 2, None]
        if bits == 4 and dtype is torch.float16:
            word = words[..., 0] >> 8 * (i // 2)
            if i % 2 == 0:
                registers.append(as_pairs(joined(word, 0x000F, 0x6400), dtype) + (-1024 - zero))
            else:
                registers.append(as_pairs(joined(word, 0x00F0, 0x6400), dtype) * 0.0625 + (-64 - zero))
        elif bits == 4:
            registers.append(as_pairs(joined(words[..., 0] >> 4 * i, 0x000F, 0x4300), dtype) + (-128 - zero))
        elif dtype is torch.float16:
            word = words[..., i // 2] >> 8 * (i % 2)
            registers.append(as_pairs(joined(word, 0x00FF, 0x6400), dtype) + (-1024 - zero))
        else:
            octets = torch.stack([words[..., i // 2] >> 8 * (i % 2 + 2 * column) & 0xFF for column in range(2)], dim=-1)
            sums = (octets + 0x4B000000).to(torch.int32).view(torch.float32)
            difference = sums - (zero.float() + 2**23)
            upper = difference.view(torch.int32) >> 16  # the lower half is all zeros
            assert torch.equal(upper << 16, difference.view(torch.int32))
            registers.append(upper.to(torch.int16).view(dtype))
    return torch.stack(registers, dim=-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["w4a16-g64", "w4a16-g32-asym", "w3a16-asym", "w2a16", "w8a16-g128-asym", "w8a16"])
def test_packed_words_become_the_dequantized_weight_bit_for_bit(scheme, dtype):
    weight = quantized(Scheme.parse(scheme), 32, 128)
    packed = pack(weight, dtype)
    # [tile of rows, 16 columns, lane, words]
    words = packed.codes.view(2, 2 * packed.bits // 4, 32, -1, packed.bits // 4).permute(0, 1, 3, 2, 4).flatten(1, 2)
    size = packed.scheme.group_size or 128
    group = torch.arange(0, 128, 16) // size
    rows = LANES // 4
    scales = packed.scales[:, group][:, :, rows]
    middle = torch.tensor(float(packed.scheme.middle_code), dtype=dtype)
    zeros = middle.expand(scales.shape) if packed.zeros is None else packed.zeros[:, group][:, :, rows]
    registers = integers(words, zeros, packed.bits, dtype) * scales[..., [0, 1, 0, 1], None]

    out = torch.full((2, 16, 128), float("nan"), dtype=dtype)
    for step, register, column in itertools.product(range(8), range(4), range(2)):
        columns = step * 16 + 2 * (LANES % 4) + register // 2 * 8 + column  # fragment A of mma.m16n8k16, PTX ISA
        out[:, rows + register % 2 * 8, columns] = registers[:, step, :, register, column]
    assert torch.equal(out.flatten(0, 1), weight.dequantize(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_minus_every_zero_point_is_exact(bits, dtype):
    codes, zeros = torch.meshgrid(torch.arange(2**bits), torch.arange(2**bits), indexing="ij")
    word = codes * (0x11111111 if bits == 4 else 0x01010101)
    found = integers(word[..., None].expand(*word.shape, 2), zeros[..., None].expand(*zeros.shape, 2), bits, dtype)
    assert torch.equal(found.double(), (codes - zeros).double()[..., None, None].expand(found.shape))


def banks_apart(addresses, bytes_each):
    """Whether accesses that are served together, given in bytes, touch no bank at two places."""
    words = {address // 4 + word for address in addresses for word in range(bytes_each // 4)}
    return len({word % 32 for word in words}) == len(words)


@pytest.mark.parametrize("warp_n", sorted({tiling.warp_n for tiling in TILINGS.values()}))
def test_epilogue_transposes_fragments_without_bank_conflicts(warp_n):
    pitch, lanes_of_row = warp_n + 4, warp_n // 8
    patch = np.full(8 * pitch, -1)
    for block, below, pair in itertools.product(range(warp_n // 16), range(2), range(2)):
        row, column = LANES % 4 * 2 + pair, block * 16 + LANES // 4 + 8 * below
        target = row * pitch + column
        patch[target] = row * 1000 + column
        assert banks_apart((target * 4).tolist(), 4)
    half = LANES // 4 % 2 if lanes_of_row == 8 else np.zeros_like(LANES)
    column = LANES % lanes_of_row * 8
    for row0 in range(0, 8, 32 // lanes_of_row):
        row = row0 + LANES // lanes_of_row
        source = row * pitch + column
        first, second = source + half * 4, source + (1 - half) * 4
        for offsets in (first, second):
            for quarter in range(0, 32, 8):  # 16 bytes a lane: a quarter of a warp at a time
                assert banks_apart((offsets[quarter : quarter + 8] * 4).tolist(), 16)
        low, high = np.where(half == 1, second, first), np.where(half == 1, first, second)
        offsets = np.concatenate([low[:, None] + np.arange(4), high[:, None] + np.arange(4)], axis=1)
        np.testing.assert_array_equal(patch[offsets], (row * 1000 + column)[:, None] + np.arange(8))


@pytest.mark.parametrize(("tiles_m", "tiles_n"), [(1, 1), (1, 9), (9, 1), (8, 8), (13, 7), (17, 20)])
def test_every_tile_is_visited_once(tiles_m, tiles_n):
    visited = []
    for block in range(tiles_m * tiles_n):  # tile_place in schedule.cuh
        band, within = divmod(block, 8 * tiles_n)
        height = min(tiles_m - band * 8, 8)
        visited.append((band * 8 + within % height, within // height))
    assert sorted(visited) == list(itertools.product(range(tiles_m), range(tiles_n)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", TILINGS)
def test_tilings_fit_every_gpu(name, bits):
    tiling = TILINGS[name]
    shared = tiling.shared(bits)
    assert shared <= 99 * 1024
    assert tiling.resident * (shared + 1024) <= 164 * 1024  # on sm_80, of which 1 KB a block is reserved
    assert tiling.tile_m % tiling.warp_m == tiling.tile_n % tiling.warp_n == 0
    assert tiling.threads // 32 * 8 * (tiling.warp_n + 4) * 4 <= shared  # the epilogue takes the place of the stages


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TILINGS)
def test_kernels_keep_their_registers(name, dtype, bits):
    pytest.importorskip("cuda.core", reason="the compiler comes with the extra cuda")
    tiling = TILINGS[name]
    resources = tiling.kernel(dtype, bits).resources("sm_80")
    assert (resources.spill_stores, resources.spill_loads, resources.stack) == (0, 0, 0)
    assert resources.registers * tiling.threads * tiling.resident <= 65_536


@pytest.mark.parametrize("multiprocessors", [16, 84, 108, 132])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "size", [(1, 1, 0), (1, 1, 1), (17, 4096, 13696), (1024, 27392, 4096), (4096, 4096, 4096), (64, 64, 100_000)]
)
def test_plans_cover_k(size, bits, multiprocessors):
    tiling, part = wna16_sm80.plan(*size, bits, multiprocessors, A100)
    assert tiling in wna16_sm80.TILINGS
    assert part > 0
    assert part % 64 == 0
    assert part < size[2] + 64 or size[2] == 0


@pytest.mark.parametrize(
    ("m", "expected"), [(17, "small"), (32, "small"), (64, "medium"), (128, "large"), (2048, "large")]
)
def test_tiles_are_as_high_as_x_has_rows(m, expected):
    tiling, _ = wna16_sm80.plan(m, 27392, 4096, 4, 108, A100)
    assert tiling is TILINGS[expected]


def test_many_tiles_are_not_split():
    for m in (17, 64, 256, 4096):
        assert wna16_sm80.plan(m, 27392, 4096, 4, 108, A100)[1] == 4096


def test_few_tiles_with_a_long_sum_are_split():
    tiling, part = wna16_sm80.plan(32, 128, 65_536, 4, 108, A100)
    assert tiling.tiles(32, 128) * -(-65_536 // part) >= 32


@pytest.mark.parametrize(
    ("bits", "shared_memory", "blocks"),
    [(4, A100, [2, 3, 4]), (8, A100, [2, 3, 4]), (4, ADA, [1, 2, 3]), (8, ADA, [1, 1, 2])],
)
def test_blocks_of_a_multiprocessor_share_its_memory(bits, shared_memory, blocks):
    found = [tiling.resident_within(bits, shared_memory) for tiling in wna16_sm80.TILINGS]
    assert found == blocks
    for tiling, count in zip(wna16_sm80.TILINGS, blocks, strict=True):
        assert count * (tiling.shared(bits) + 1024) <= shared_memory


def test_a_plan_knows_how_many_blocks_have_room():
    """On GPUs with 100 KB a wave of small tiles is shorter."""
    plans = [wna16_sm80.plan(32, n, 4096, 8, 108, room) for room in (A100, ADA) for n in range(128, 65_536, 128)]
    assert plans[: len(plans) // 2] != plans[len(plans) // 2 :]

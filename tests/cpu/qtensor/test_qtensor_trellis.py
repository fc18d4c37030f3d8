"""Matrices that are paths through a trellis: their numbers, the rotation, and parts of a matrix."""

import pytest
import torch

from warpbus.errors import SchemeError
from warpbus.qtensor import QTensor, Scheme
from warpbus.qtensor.trellis import (
    code_table,
    from_tiles,
    pack_symbols,
    rotate,
    rotate_back,
    rotation_block,
    states_of,
    to_tiles,
    unpack_symbols,
)


def random_matrix(bits: int, rows: int = 48, columns: int = 96) -> QTensor:
    generator = torch.Generator().manual_seed(bits)
    tiles = rows * columns // 256
    symbols = torch.randint(2 ** (2 * bits), (tiles, 128), dtype=torch.uint8, generator=generator)
    scales = torch.rand(rows, 1, generator=generator) + 0.5
    return QTensor(
        Scheme(bits, None, element="trellis"), pack_symbols(symbols, bits, columns), scales, None, (rows, columns)
    )


def test_names():
    for name in ("w2a16-trellis", "w3a16-trellis"):
        scheme = Scheme.parse(name)
        assert (str(scheme), scheme.bits, scheme.group_size) == (name, int(name[1]), None)
        assert not scheme.has_codes
        assert scheme.bits_per_weight(4096) == scheme.bits + 16 / 4096
    with pytest.raises(SchemeError, match="a trellis of 4 bits is not supported: use w3a16-trellis"):
        Scheme.parse("w4a16-trellis")
    with pytest.raises(SchemeError, match="one scale per row"):
        Scheme(3, 128, element="trellis")


@pytest.mark.parametrize("bits", [2, 3])
def test_numbers_follow_from_the_bits_of_the_words(bits):
    matrix = random_matrix(bits)
    words, columns = matrix.qweight.flatten().tolist(), matrix.shape[1]
    per_tile = 8 * bits
    rotated = rotate(matrix.dequantize(torch.float32)) / matrix.scales
    for tile, step in ((0, 0), (1, 77), (17, 127)):
        stream = sum(
            (word & 0xFFFFFFFF) << 32 * place for place, word in enumerate(words[tile * per_tile :][:per_tile])
        )
        cyclic = stream | stream << 256 * bits
        state = cyclic >> 2 * bits * step & 0x3FFF
        parts = (state * 0xAA44731B & 0xFFFFFFFF).to_bytes(4, "little")
        sums = [sum(int.from_bytes(parts[i : i + 1], signed=True) for i in (j, j + 1)) for j in (0, 2)]
        lane, register = divmod(step, 4)
        row = tile // (columns // 16) * 16 + lane // 4 + 8 * (register % 2)
        column = tile % (columns // 16) * 16 + 2 * (lane % 4) + 8 * (register // 2)
        torch.testing.assert_close(rotated[row, column : column + 2], torch.tensor(sums) / 128)


@pytest.mark.parametrize("bits", [2, 3])
def test_packing_is_undone(bits):
    symbols = torch.randint(2 ** (2 * bits), (6, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_symbols(pack_symbols(symbols, bits, 96), bits), symbols)
    following = states_of(symbols, bits)
    assert torch.equal(following.roll(-1, 1) & (1 << 14 - 2 * bits) - 1, following >> 2 * bits)
    matrix = torch.arange(32 * 64).view(32, 64)
    assert torch.equal(from_tiles(to_tiles(matrix), 64), matrix)


def test_numbers_are_exact_in_float16_and_distinct_enough():
    table = code_table(torch.device("cpu"))
    assert torch.equal(table.half().float(), table)
    assert table.mean().abs() < 0.02
    assert float((table[:, 0] * table[:, 1]).mean().abs()) < 0.03


@pytest.mark.parametrize(("columns", "block"), [(4096, 128), (13696, 128), (896, 128), (96, 32), (64, 64)])
def test_rotations_are_orthogonal_in_blocks(columns, block):
    assert rotation_block(columns) == block
    basis = torch.eye(block, columns)
    rotated = rotate(basis)
    torch.testing.assert_close(rotated @ rotated.T, torch.eye(block))
    assert not rotated[:, block:].any()
    torch.testing.assert_close(rotated[:, :block].abs(), torch.full((block, block), block**-0.5))
    torch.testing.assert_close(rotate_back(rotated), basis)


def test_bands_of_rows_are_matrices():
    matrix = random_matrix(3)
    whole = matrix.dequantize()
    assert torch.equal(matrix.rows(16, 48).dequantize(), whole[16:])
    joined = QTensor.concatenate([matrix.rows(32, 48), matrix.rows(0, 32)])
    assert torch.equal(joined.dequantize(), torch.cat([whole[32:], whole[:32]]))
    assert matrix.nbytes == 48 * 96 * 3 // 8 + 48 * 4
    for call in (lambda: matrix.rows(8, 24), lambda: matrix.columns(0, 32), matrix.codes, lambda: random_matrix(3, 40)):
        with pytest.raises(SchemeError):
            call()

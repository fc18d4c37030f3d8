"""GGUF files: blocks against a plain reading of their specification, headers against damage."""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from warpbus.errors import CheckpointError, WarpbusError
from warpbus.formats.gguf.blocks import TYPES, pack_scales, unpack_scales
from warpbus.formats.gguf.encoding import ENCODERS, assemble, encode
from warpbus.formats.gguf.file import GGUFHeader, PlannedTensor, is_gguf, read_header, write_file
from warpbus.formats.hub import find_model

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "negative": -3,
    "number": 0.5,
    "flag": True,
    "texts": ["a", "月"],
    "integers": [1, -2],
    "empty": [],
}


def random_blocks(name: str, count: int = 20) -> Tensor:
    """Blocks of random bytes whose float16 fields are finite."""
    kind = TYPES[name]
    raw = torch.randint(0, 256, (count, kind.nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    halves = {"Q6_K": [208], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0]}.get(name, [0, 2])
    for start in halves:
        raw[:, start + 1] &= 0xBF  # the exponent's highest bit
    return raw


def _half(raw: bytes) -> float:
    return float(struct.unpack("<e", raw)[0])


def _scale(raw: bytes, group: int) -> tuple[int, int]:
    """Scale and minimum of a group of Q4_K or Q5_K."""
    if group < 4:
        return raw[group] & 63, raw[group + 4] & 63
    low, first, second = raw[group + 4], raw[group - 4] >> 6, raw[group] >> 6
    return low & 15 | first << 4, low >> 4 | second << 4


def one_weight(name: str, raw: bytes, i: int) -> float:
    """Weight `i` of a block, read as the specification says it."""
    start = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8}.get(name)
    if start is not None:
        code = raw[start + i % 16] >> (4 * (i // 16)) & 15
        if name.startswith("Q5"):
            code |= (int.from_bytes(raw[start - 4 : start], "little") >> i & 1) << 4
        d = _half(raw[:2])
        return d * code + _half(raw[2:4]) if name.endswith("1") else d * (code - (8 if name == "Q4_0" else 16))
    if name == "Q8_0":
        return _half(raw[:2]) * struct.unpack("b", raw[2 + i : 3 + i])[0]
    if name == "Q6_K":
        half, part, place = i // 128, i % 128 // 32, i % 32
        low = raw[64 * half + 32 * (part & 1) + place] >> (4 * (part // 2)) & 15
        high = raw[128 + 32 * half + place] >> (2 * part) & 3
        return _half(raw[208:]) * struct.unpack("b", raw[192 + i // 16 : 193 + i // 16])[0] * ((low | high << 4) - 32)
    group, place = i // 32, i % 32
    scale, minimum = _scale(raw[4:16], group)
    first = 16 if name == "Q4_K" else 48
    code = raw[first + 32 * (group // 2) + place] >> (4 * (group % 2)) & 15
    if name == "Q5_K":
        code |= (raw[16 + place] >> group & 1) << 4
    return _half(raw[:2]) * scale * code - _half(raw[2:4]) * minimum


@pytest.mark.parametrize("name", ENCODERS)
def test_blocks_are_decoded_as_the_specification_says(name):
    raw, kind = random_blocks(name), TYPES[name]
    assert kind.decode is not None
    expected = [[one_weight(name, bytes(block.tolist()), i) for i in range(kind.size)] for block in raw]
    # float32 products of float16 fields, rounded at most twice
    torch.testing.assert_close(
        kind.decode(raw).double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("name", ENCODERS)
def test_blocks_are_those_of_the_gguf_package(name):
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    raw, kind = random_blocks(name), TYPES[name]
    found = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(kind.number)))
    assert kind.decode is not None
    torch.testing.assert_close(kind.decode(raw), found, rtol=0, atol=0)


# Root mean square errors of normal numbers in parts of their deviation, a tenth above what the encoders reach.
ERRORS = {"Q4_0": 0.09, "Q4_1": 0.078, "Q5_0": 0.046, "Q5_1": 0.037, "Q8_0": 0.006}
ERRORS |= {"Q4_K": 0.078, "Q5_K": 0.04, "Q6_K": 0.021}


@pytest.mark.parametrize("name", ENCODERS)
def test_rounding_is_as_good_as_the_type_allows(name):
    kind = TYPES[name]
    weights = torch.randn(200, kind.size, generator=torch.Generator().manual_seed(2)) * 0.05
    blocks = encode(name, weights)
    assert blocks.dtype == torch.uint8
    assert blocks.shape == (200, kind.nbytes)
    assert kind.decode is not None
    error = (kind.decode(blocks) - weights).square().mean().sqrt() / weights.std()
    assert float(error) < ERRORS[name]


@pytest.mark.parametrize("name", ENCODERS)
def test_zeros_and_constants_are_kept(name):
    kind = TYPES[name]
    assert kind.decode is not None
    assert not kind.decode(encode(name, torch.zeros(1, kind.size))).any()
    for constant in (0.25, -0.25):
        weights = torch.full((1, kind.size), constant)
        torch.testing.assert_close(kind.decode(encode(name, weights)), weights, rtol=0.01, atol=0)


def test_codes_of_blocks_come_back():
    generator = torch.Generator().manual_seed(3)
    scales = torch.rand(9, generator=generator).half().float()
    for name, top, middle in (("Q4_0", 16, 8), ("Q5_0", 32, 16), ("Q8_0", 256, 128)):
        codes = torch.randint(0, top, (9, 32), dtype=torch.uint8, generator=generator)
        decode = TYPES[name].decode
        assert decode is not None
        assert torch.equal(decode(assemble(name, codes, scales)), (codes.float() - middle) * scales[:, None])


def test_scales_and_minima_survive_packing():
    parts = torch.randint(0, 64, (2, 30, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    assert torch.equal(torch.stack(unpack_scales(pack_scales(*parts))), parts)


def write(path: Path, metadata: dict[str, Any] | None = None) -> dict[str, Tensor]:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    blocks = random_blocks("Q4_0", 4)
    planned = {
        "a": PlannedTensor((2, 3), TYPES["F32"], lambda: tensors["a"]),
        "b": PlannedTensor((5,), TYPES["BF16"], lambda: tensors["b"]),
        "c": PlannedTensor((2, 64), TYPES["Q4_0"], lambda: blocks),
    }
    write_file(path, METADATA if metadata is None else metadata, planned, lambda name, data: None)
    return tensors | {"c": blocks}


def test_what_is_written_is_read(tmp_path):
    tensors = write(tmp_path / "m.gguf")
    header = read_header(tmp_path / "m.gguf")
    assert header.metadata == METADATA
    assert {name: (each.shape, each.kind.name) for name, each in header.tensors.items()} == {
        "a": ((2, 3), "F32"),
        "b": ((5,), "BF16"),
        "c": ((2, 64), "Q4_0"),
    }
    assert torch.equal(header.tensors["a"].read_rows(1, 2).view(torch.float32), tensors["a"][1:])
    assert torch.equal(header.tensors["c"].read_rows(0, 2).view(4, 18), tensors["c"])


def test_the_gguf_package_reads_what_is_written(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    tensors = write(tmp_path / "m.gguf", {key: value for key, value in METADATA.items() if value != []})
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.get_field("texts").contents() == ["a", "月"]
    assert reader.get_field("number").contents() == 0.5
    found = {each.name: each for each in reader.tensors}
    assert torch.equal(torch.from_numpy(found["a"].data.copy()), tensors["a"])
    assert found["c"].data.tobytes() == tensors["c"].numpy().tobytes()


def refused(path: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        read_header(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


HEAD = b"GGUF" + struct.pack("<I", 3)
MANY = 2**62


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "it has 0 bytes"),
        (b"GG", "it has 2 bytes"),
        (b"GGUX" + bytes(60), "does not begin with GGUF"),
        (b"GGUF\0\0\0\3" + bytes(60), "version 50331648 is not supported"),
        (HEAD + struct.pack("<QQ", MANY, 0), "tensors, expected"),
        (HEAD + struct.pack("<QQ", 0, MANY), "keys, expected"),
        (HEAD + struct.pack("<QQ", 0, 1), "goes past byte 24"),
        (HEAD + struct.pack("<QQQ", 0, 1, MANY), "bytes of a string"),
        (HEAD + struct.pack("<QQ", 0, 1) + text(b"\xff") + bytes(9), "not UTF-8"),
        (HEAD + struct.pack("<QQ", 0, 1) + text(b"k") + struct.pack("<I", 13), "unknown type 13"),
        (HEAD + struct.pack("<QQ", 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 4, MANY), "items of"),
        (HEAD + struct.pack("<QQ", 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 4, 2**22), "goes past"),
        (HEAD + struct.pack("<QQ", 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1), "unsupported type 9"),
        (HEAD + struct.pack("<QQ", 0, 2) + 2 * (text(b"k") + struct.pack("<IB", 0, 1)), "occurs twice"),
        (HEAD + struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<I", 2**31), "dimensions"),
        (HEAD + struct.pack("<QQ", 1, 0) + tensor(b"t", [0, 4]), "impossible shape"),
        (HEAD + struct.pack("<QQ", 1, 0) + tensor(b"t", [2**40, 2**40]), "impossible shape"),
        (HEAD + struct.pack("<QQ", 1, 0) + tensor(b"t", [33, 4], 2), "impossible shape"),
        (HEAD + struct.pack("<QQ", 1, 0) + tensor(b"t", [32], 10), "type 10, which is not supported"),
        (HEAD + struct.pack("<QQ", 1, 0) + tensor(b"t", [2**30]), "ends at byte"),
        (HEAD + struct.pack("<QQ", 1, 0) + tensor(b"t", [1], 0, 2**63), "ends at byte"),
        (HEAD + struct.pack("<QQ", 2, 0) + tensor(b"t", [1]) + tensor(b"u", [1]) + bytes(64), "overlaps"),
        (HEAD + struct.pack("<QQ", 2, 0) + tensor(b"t", [1]) + tensor(b"t", [1], 0, 32) + bytes(99), "occurs twice"),
        (HEAD + struct.pack("<QQ", 0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 0), "alignment is 0"),
    ],
)
def test_damage_is_named_before_memory_is_taken(tmp_path, data, match):
    (tmp_path / "m.gguf").write_bytes(data)
    refused(tmp_path / "m.gguf", match)


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write(path)
    return path.read_bytes()


@settings(max_examples=400)
@given(data=st.data())
def test_any_damage_is_read_or_refused_in_one_line(intact, tmp_path_factory, data):
    damaged = bytearray(intact)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place : place + 1] = data.draw(st.binary(min_size=0, max_size=9))
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(damaged[: data.draw(st.integers(1, len(damaged)))])
    try:
        found: GGUFHeader | str = read_header(path)
    except WarpbusError as error:
        found = str(error)
    if isinstance(found, str):
        assert "\n" not in found
    else:
        assert sum(each.nbytes for each in found.tensors.values()) <= path.stat().st_size


def test_a_file_that_is_no_gguf_is_reported_apart(tmp_path):
    write(tmp_path / "named-otherwise")
    (tmp_path / "other").write_bytes(b"text")
    assert is_gguf(tmp_path / "named-otherwise")
    assert not is_gguf(tmp_path / "other")
    assert not is_gguf(tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"general.architecture": "mamba"}, "general.architecture: 'mamba' is not supported"),
        ({"general.architecture": 5}, "expected a text"),
        ({}, "tensor 'a' is not known in the architecture llama"),
    ],
)
def test_models_of_other_kinds_are_refused_by_name(tmp_path, monkeypatch, change, match):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "m.gguf", METADATA | change)
    with pytest.raises(CheckpointError, match=match):
        find_model(tmp_path / "m.gguf")
    assert not list(tmp_path.glob("cache/warpbus/gguf/*"))

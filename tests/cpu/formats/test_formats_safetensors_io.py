"""Safetensors files: against the format's own library, and against damage of every kind."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from warpbus.errors import CheckpointError
from warpbus.formats import safetensors_io
from warpbus.formats.safetensors_io import DTYPES, read_header, write_file


def random_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for name, dtype in sorted(DTYPES.items())
    }
    return tensors | {"scalar": torch.tensor(1.5), "none": torch.empty(0, 4), "层.权重": torch.ones(1, 2, 3, 4)}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype
        and first[name].shape == second[name].shape
        and torch.equal(first[name].float(), second[name].float())
        for name in first
    )


def encode(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", random_tensors())
    assert same(load_file(tmp_path / "a.safetensors"), random_tensors())


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    save_file(random_tensors(), tmp_path / "a.safetensors")
    assert same(
        {name: entry.read() for name, entry in read_header(tmp_path / "a.safetensors").items()}, random_tensors()
    )


def test_written_files_are_marked_as_pytorch_and_aligned(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write_file(file, {"byte": torch.ones(3, dtype=torch.uint8), "wide": torch.ones(2, dtype=torch.int64)})
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    assert json.loads(raw[8 : 8 + length])["__metadata__"] == {"format": "pt"}
    assert read_header(file)["wide"].offset % 8 == 0


def test_a_tensor_that_is_not_aligned_is_read(tmp_path: Path) -> None:
    values = torch.tensor([1.0, -2.5, 3.25])
    header = {"byte": entry(shape=[1], offsets=[0, 1]), "floats": entry("F32", [3], [1, 13])}
    file = tmp_path / "a.safetensors"
    file.write_bytes(encode(header, b"\x07" + values.numpy().tobytes()))
    assert torch.equal(read_header(file)["floats"].read(), values)


def test_changing_a_tensor_does_not_change_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write_file(file, {"x": torch.zeros(1000)})
    read_header(file)["x"].read().fill_(1)
    assert read_header(file)["x"].read().count_nonzero() == 0


def test_a_tensor_outlives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write_file(file, {"x": torch.arange(1000)})
    tensor = read_header(file)["x"].read()
    file.unlink()
    assert torch.equal(tensor, torch.arange(1000))


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write_file(file, {"x": torch.zeros(100_000)})
    stored = read_header(file)["x"]
    os.truncate(file, 1000)
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        stored.read()


def test_a_file_is_read_in_the_memory_of_a_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_io, "MAPPED_BYTES", 2**21)
    file = tmp_path / "a.safetensors"
    write_file(file, {f"x{number}": torch.full((2**20,), number, dtype=torch.uint8) for number in range(8)})
    for name, stored in read_header(file).items():
        tensor = stored.read()
        assert tensor.unique().tolist() == [int(name[1:])]
        assert resident(file) <= 2**21 + 2**16
        del tensor


def resident(file: Path) -> int:
    """Bytes of a file's maps that are in the main memory of this process."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0]:
            inside = fields[-1] == str(file)
        elif inside and fields[0] == "Rss:":
            found += int(fields[1]) * 1024
    return found


DAMAGED = {
    "empty": (b"", "truncated: its header promises 8 bytes, the file has 0: download it again"),
    "no header": (struct.pack("<Q", 100) + b"{}", "truncated: its header promises 108 bytes, the file has 10"),
    "absurd header": (struct.pack("<Q", 2**60) + b"{}", "not a safetensors file: its header would have 1,152,921,504"),
    "web page": (b"<!DOCTYPE html><html></html>", "not a safetensors file"),
    "not JSON": (encode(b"{'a': 1}"), "damaged: its header is not JSON"),
    "not UTF-8": (encode(b'{"\xff": 1}'), "damaged: its header is not JSON"),
    "nested too deep": (encode(b"[" * 100_000), "damaged: its header is not JSON"),
    "long number": (encode(b"9" * 10_000), "damaged: its header is not JSON"),
    "not an object": (encode([]), "its header is not a JSON object"),
    "twice": (encode(b'{"a": {}, "a": {}}'), "a name appears twice"),
    "entry not an object": (encode({"a": 5}), "tensor a lacks its dtype"),
    "no offsets": (encode({"a": {"dtype": "U8", "shape": [1]}}), "tensor a lacks its dtype, shape or data_offsets"),
    "unknown dtype": (encode({"a": entry("Q3")}, bytes(4)), "tensor a has dtype Q3, which is not supported"),
    "dtype not text": (encode({"a": entry([1])}, bytes(4)), "which is not supported"),
    "negative shape": (encode({"a": entry(shape=[-4])}, bytes(4)), "tensor a has an impossible shape"),
    "fractional shape": (encode({"a": entry(shape=[4.0])}, bytes(4)), "tensor a has an impossible shape"),
    "true as a size": (encode({"a": entry(shape=[True], offsets=[0, 1])}, bytes(1)), "an impossible shape"),
    "shape not a list": (encode({"a": entry(shape=4)}, bytes(4)), "tensor a has an impossible shape"),
    "overflowing shape": (encode({"a": entry(shape=[2**40, 2**40, 0], offsets=[0, 0])}), "an impossible shape"),
    "too many axes": (encode({"a": entry(shape=[1] * 65, offsets=[0, 1])}, bytes(1)), "an impossible shape"),
    "negative offset": (encode({"a": entry(offsets=[-4, 0])}, bytes(4)), "impossible data_offsets"),
    "backward offsets": (encode({"a": entry(offsets=[4, 0])}, bytes(4)), "impossible data_offsets"),
    "three offsets": (encode({"a": entry(offsets=[0, 4, 8])}, bytes(8)), "impossible data_offsets"),
    "wrong size": (
        encode({"a": entry(shape=[1234])}, bytes(4)),
        r"tensor a of shape \[1234\] needs 1,234 bytes, its data_offsets give 4",
    ),
    "gap": (encode({"a": entry(offsets=[1, 5])}, bytes(5)), "tensor a begins at byte 1, not 0"),
    "overlap": (encode({"a": entry(), "b": entry(offsets=[2, 6])}, bytes(6)), "tensor b begins at byte 2, not 4"),
    "beyond the end": (encode({"a": entry()}, bytes(3)), "truncated: its header promises"),
    "more than promised": (encode({"a": entry()}, bytes(5)), "1 bytes follow the last tensor"),
    "line break in a name": (encode({"a\nb": 5}), r"tensor 'a\\nb' lacks"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_reported_in_one_line(kind: str, tmp_path: Path) -> None:
    content, message = DAMAGED[kind]
    file = tmp_path / "model-00002.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert len(str(caught.value).splitlines()) == 1


def test_a_truncated_download_says_how_much_is_there(tmp_path: Path) -> None:
    file = tmp_path / "model-00002.safetensors"
    write_file(file, {"x": torch.zeros(1000)})
    whole = file.stat().st_size
    os.truncate(file, 1000)
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    promised = f"its header promises {whole:,} bytes, the file has 1,000"
    assert str(caught.value) == f"{file}: truncated: {promised}: download it again"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a\.safetensors: cannot be read: No such file"):
        read_header(tmp_path / "a.safetensors")


def ends_well(file: Path) -> bool:
    """Whether all tensors can be read from the bytes that are there, or else a line says why not."""
    try:
        return sum(stored.read().nbytes for stored in read_header(file).values()) <= file.stat().st_size
    except CheckpointError as error:
        return len(str(error).splitlines()) == 1


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_bytes_end_in_a_good_read_or_a_sentence(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "fuzz.safetensors"
    write_file(file, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.uint8)})
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(("set", "insert", "cut", "truncate"))):
            case "set":
                raw[position] = data.draw(st.sampled_from(b'0123456789-[]{}",:eE.\x00\xff') | st.integers(0, 255))
            case "insert":
                raw[position:position] = data.draw(st.binary(min_size=1, max_size=8))
            case "cut":
                del raw[position : position + data.draw(st.integers(1, 8))]
            case "truncate":
                del raw[position + 1 :]
        if not raw:
            break
    file.write_bytes(raw)
    assert ends_well(file)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(("F32", "U8", 0, 4)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(("F32", "U8", "I64")) | json_values,
        "shape": st.lists(st.integers(0, 4) | json_values, max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | json_values,
    }
)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(max_size=4), entries | json_values, max_size=3) | json_values, st.binary(max_size=40))
def test_any_header_ends_in_a_good_read_or_a_sentence(tmp_path: Path, header: Any, data: bytes) -> None:
    file = tmp_path / "fuzz.safetensors"
    file.write_bytes(encode(header, data))
    assert ends_well(file)

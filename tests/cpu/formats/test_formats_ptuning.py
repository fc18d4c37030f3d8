"""ChatGLM's prefixes: the two forms of their files, what is refused, and that no file can do harm."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from warpbus.errors import CheckpointError, StorageError, WarpbusError
from warpbus.formats.ptuning import is_prefix, read_prefix, write_prefix

START = "transformer.prefix_encoder."
COLUMNS = 12
PLAIN = {f"{START}embedding.weight": torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(0))}


def projection(inner: int, width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "embedding.weight": (3, width),
        "trans.0.weight": (inner, width),
        "trans.0.bias": (inner,),
        "trans.2.weight": (COLUMNS, inner),
        "trans.2.bias": (COLUMNS,),
    }
    return {f"{START}{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(directory: Path, tensors: dict[str, Tensor], form: str = "safetensors", **settings: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "chatglm", "pre_seq_len": 3} | settings))
    if form == "safetensors":
        save_file(tensors, directory / "model.safetensors")
    else:
        torch.save(tensors, directory / "pytorch_model.bin")
    return directory


def refused(directory: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_prefix(directory, COLUMNS)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_reads(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in PLAIN.items()}
    found = read_prefix(write(tmp_path, tensors, form), COLUMNS)
    assert found.dtype == torch.float32
    assert torch.equal(found, PLAIN[f"{START}embedding.weight"].to(dtype).float())


def test_what_else_is_in_a_model_is_left_alone(tmp_path: Path) -> None:
    others = {"transformer.embedding.word_embeddings.weight": torch.ones(4, 4)}
    assert torch.equal(read_prefix(write(tmp_path, PLAIN | others), COLUMNS), PLAIN[f"{START}embedding.weight"])


def test_names_without_the_model(tmp_path: Path) -> None:
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in PLAIN.items()}
    assert torch.equal(read_prefix(write(tmp_path, tensors), COLUMNS), PLAIN[f"{START}embedding.weight"])


@pytest.mark.parametrize(("inner", "width"), [(8, 8), (8, COLUMNS)])  # as in ChatGLM-6B, as in ChatGLM2-6B
def test_a_projection_is_computed(inner: int, width: int, tmp_path: Path) -> None:
    tensors = projection(inner, width)
    embedding, w0, b0, w2, b2 = (tensor.double() for tensor in tensors.values())
    expected = torch.stack([w2 @ torch.tanh(w0 @ row + b0) + b2 for row in embedding])
    found = read_prefix(write(tmp_path, tensors, prefix_projection=True), COLUMNS)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_is_prefix(tmp_path: Path) -> None:
    assert is_prefix(write(tmp_path / "a", PLAIN))
    assert not is_prefix(write(tmp_path / "b", PLAIN, pre_seq_len=None))
    assert not is_prefix(tmp_path)


@pytest.mark.parametrize("tokens", [0, -3, 8193, 3.0, True, "3", [3]])
def test_lengths_that_are_refused(tokens: Any, tmp_path: Path) -> None:
    refused(write(tmp_path, PLAIN, pre_seq_len=tokens), r"pre_seq_len: expected an integer from 1 to 8192, found")


def test_a_length_of_8192(tmp_path: Path) -> None:
    rows = torch.zeros(8192, COLUMNS)
    write_prefix(tmp_path / "out", rows, {})
    assert torch.equal(read_prefix(tmp_path / "out", COLUMNS), rows)


NAN = {name: tensor.clone().fill_(math.nan) for name, tensor in PLAIN.items()}
LAST = f"{START}trans.2.bias"


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        ({"x": torch.ones(1)}, {}, r"prefix_encoder\.embedding\.weight is missing"),
        (PLAIN, {"pre_seq_len": 4}, r"embedding\.weight: expected shape \[4, 12\], .*found \[3, 12\]"),
        ({f"{START}embedding.weight": torch.ones(3, 8)}, {}, r"expected shape \[3, 12\], .*found \[3, 8\]"),
        ({f"{START}embedding.weight": torch.ones(3, 12).int()}, {}, "expected floating point of 16 to 64 bits"),
        (NAN, {}, "expected finite numbers, found NaN or infinity"),
        (PLAIN, {"prefix_projection": True}, r"prefix_projection is True, and there is no tensor .*trans\.0\.weight"),
        (projection(8, 8), {}, r"prefix_projection is False, and there is a tensor .*trans\.0\.weight"),
        (PLAIN, {"prefix_projection": "no"}, "prefix_projection is 'no'"),
        (
            projection(8, 8) | {LAST: torch.ones(9)},
            {"prefix_projection": True},
            r"trans\.2\.bias: expected shape \[12\]",
        ),
        (projection(8, 8) | {LAST: torch.full((12,), math.inf)}, {"prefix_projection": True}, r"trans\.2\.bias: .*NaN"),
        (
            projection(8, 8) | {f"{START}trans.2.weight": torch.ones(12)},
            {"prefix_projection": True},
            r"trans\.2\.weight: expected a matrix",
        ),
        (
            {name: tensor for name, tensor in projection(8, 8).items() if "trans.2" not in name},
            {"prefix_projection": True},
            r"trans\.2\.weight is missing",
        ),
    ],
)
def test_what_is_refused(tensors: dict[str, Tensor], settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(write(tmp_path, tensors, **settings), message)


def test_a_target_that_is_there(tmp_path: Path) -> None:
    write_prefix(tmp_path / "out", PLAIN[f"{START}embedding.weight"], {"a": 1})
    with pytest.raises(StorageError, match="exists and is not empty"):
        write_prefix(tmp_path / "out", torch.ones(2, COLUMNS), {})
    write_prefix(tmp_path / "out", torch.ones(2, COLUMNS), {}, overwrite=True)
    assert torch.equal(read_prefix(tmp_path / "out", COLUMNS), torch.ones(2, COLUMNS))


def test_damaged_files_end_in_a_sentence(tmp_path: Path) -> None:
    write(tmp_path, projection(8, 8), prefix_projection=True)
    generator = random.Random(0)
    said = []
    for name in ("config.json", "model.safetensors"):
        raw = (tmp_path / name).read_bytes()
        for _ in range(250):
            damaged = bytearray(raw)
            for _ in range(generator.randint(1, 4)):
                damaged[generator.randrange(min(len(raw), 600))] = generator.randrange(256)
            (tmp_path / name).write_bytes(damaged[: generator.choice((len(raw), generator.randrange(len(raw))))])
            try:
                is_prefix(tmp_path)
                read_prefix(tmp_path, COLUMNS)
            except WarpbusError as error:
                said.append(str(error))
        (tmp_path / name).write_bytes(raw)
    assert len(said) > 250
    assert all(len(message.splitlines()) == 1 for message in said)

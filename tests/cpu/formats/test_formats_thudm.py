"""THUDM's int4 and int8: nibbles by hand, and files that do not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from warpbus.errors import CheckpointError, TensorError
from warpbus.formats import Checkpoint, CheckpointWriter, Format, format_of
from warpbus.qtensor import QTensor


def format_for(bits: int) -> Format:
    found = format_of({"quantization_bit": bits})
    assert found is not None
    return found


def read(directory: Path, bits: int, weight: Tensor, scales: Tensor) -> QTensor:
    with CheckpointWriter(directory) as writer:
        writer.add("p.weight", weight)
        writer.add("p.weight_scale", scales)
        writer.write_json("config.json", {})
        checkpoint = Checkpoint(writer.finish())
    found = format_for(bits)
    assert found.is_quantized(checkpoint, "p")
    assert found.stored(checkpoint, "p") == ["p.weight", "p.weight_scale"]
    scheme = found.read_schemes({"quantization_bit": bits}).of("p")
    assert scheme is not None
    assert str(scheme) == f"w{bits}a16"
    return found.from_tensors(checkpoint, "p", scheme)


def test_four_bits_by_hand(tmp_path: Path) -> None:
    """The even column is the high nibble, and nibbles are signed."""
    stored = torch.tensor([[0x7F, 0x81], [0x10, 0x98]], dtype=torch.uint8).view(torch.int8)
    weight = read(tmp_path / "model", 4, stored, torch.tensor([0.5, 2.0]).half())
    assert weight.dequantize(torch.float32).tolist() == [[3.5, -0.5, -4.0, 0.5], [2.0, 0.0, -14.0, -16.0]]
    assert weight.codes().tolist() == [[15, 7, 0, 9], [9, 8, 1, 0]]


def test_eight_bits_by_hand(tmp_path: Path) -> None:
    stored = torch.tensor([[127, -127, 0], [1, -1, -128]], dtype=torch.int8)
    weight = read(tmp_path / "model", 8, stored, torch.tensor([0.5, -1.0]).half())
    assert weight.dequantize(torch.float32).tolist() == [[63.5, -63.5, 0.0], [-1.0, 1.0, 128.0]]
    assert weight.codes().tolist() == [[255, 1, 128], [129, 127, 0]]


@pytest.mark.parametrize("bits", [4, 8])
def test_every_byte_by_the_formula(bits: int, tmp_path: Path) -> None:
    """257 rows of all bytes in an order of each row's own."""
    stored = (torch.arange(257)[:, None] + torch.arange(256)).to(torch.uint8).view(torch.int8)
    scales = torch.linspace(0.001, 0.1, 257).half()
    weight = read(tmp_path / "model", bits, stored, scales)
    wide = stored.to(torch.int32)
    if bits == 4:
        wide = torch.stack([wide >> 4, (wide << 28) >> 28], -1).flatten(1)
    assert torch.equal(weight.dequantize(torch.float32), wide.float() * scales.float()[:, None])
    assert weight.scales.dtype == torch.float16


def test_columns_that_do_not_fill_words(tmp_path: Path) -> None:
    stored = torch.tensor([[0x12, 0x34, 0x56, 0x78, 0x0F]], dtype=torch.uint8).view(torch.int8)
    weight = read(tmp_path / "model", 4, stored, torch.ones(1).half())
    assert weight.dequantize().tolist() == [[1, 2, 3, 4, 5, 6, 7, -8, 0, -1]]


@pytest.mark.parametrize(
    ("weight", "scales", "message"),
    [
        (torch.zeros(4, 8).half(), torch.ones(4).half(), r"p\.weight: expected torch\.int8, found torch\.float16"),
        (torch.zeros(32, dtype=torch.int8), torch.ones(4).half(), r"p\.weight: expected a matrix, found shape \[32\]"),
        (torch.zeros(4, 8, dtype=torch.int8), torch.ones(3).half(), r"p\.weight_scale has shape \[3\], expected \[4\]"),
        (torch.zeros(4, 8, dtype=torch.int8), torch.ones(4).int(), r"p\.weight_scale: expected a floating-point type"),
    ],
)
def test_damaged_layers_are_named(weight: Tensor, scales: Tensor, message: str, tmp_path: Path) -> None:
    with pytest.raises(TensorError, match=message) as caught:
        read(tmp_path / "model", 4, weight, scales)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_bit": 3}, "quantization_bit is 3, expected 4 or 8"),
        ({"quantization_bit": "4"}, "quantization_bit is '4', expected 4 or 8"),
        ({"quantization_bit": 4, "quantization_embeddings": True}, "quantization_embeddings is True, expected False"),
    ],
)
def test_configurations_that_are_not_understood(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {message}"):
        format_for(4).read_schemes(config)


def test_a_model_that_is_not_quantized() -> None:
    assert format_of({"quantization_bit": 0}) is None
    assert format_of({}) is None

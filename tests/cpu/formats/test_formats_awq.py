"""AWQ files (gemm): the interleaved nibbles by hand, the format's formula, and files that do not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from warpbus.errors import CheckpointError, SchemeError, TensorError, WarpbusError
from warpbus.formats import Checkpoint, CheckpointWriter, format_named, format_of
from warpbus.qtensor import QTensor, Scheme

AWQ = format_named("awq")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write(directory: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    with CheckpointWriter(directory) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.write_json("config.json", {})
        return Checkpoint(writer.finish())


def random_qtensor(scheme: Scheme, out: int = 48, columns: int = 128) -> QTensor:
    """Scales of both signs, all zero points."""
    generator = torch.Generator().manual_seed(1)
    groups = scheme.groups(columns)
    codes = torch.randint(0, 16, (out, columns), generator=generator)
    scales = (torch.randn(out, groups, generator=generator) * 0.1).half()
    zeros = None if scheme.symmetric else torch.randint(0, 16, (out, groups), generator=generator)
    return QTensor.from_codes(scheme, codes, scales, zeros)


def by_the_formula(tensors: dict[str, Tensor], group_size: int) -> list[list[float]]:
    """The weights of a file, one by one: (code - zero) * scale."""
    stored = {name.rpartition(".")[2]: tensor.tolist() for name, tensor in tensors.items()}

    def value(words: list[int], row: int) -> int:
        return (words[row // 8] >> (4 * ORDER.index(row % 8))) % 16

    return [
        [
            (value(words, o) - value(stored["qzeros"][i // group_size], o)) * stored["scales"][i // group_size][o]
            for i, words in enumerate(stored["qweight"])
        ]
        for o in range(len(stored["scales"][0]))
    ]


def test_the_interleave_by_hand() -> None:
    codes = torch.arange(8)[:, None] + torch.tensor([[0, 8]])
    weight = QTensor.from_codes(Scheme(4, None, symmetric=False), codes, torch.ones(8, 1).half(), 7 - codes[:, :1])
    tensors = AWQ.to_tensors("p", weight)
    assert tensors["p.qweight"].tolist() == [[0x75316420], [0xFDB9ECA8 - 2**32]]
    assert tensors["p.qzeros"].tolist() == [[0x02461357]]
    assert tensors["p.scales"].tolist() == [[1.0] * 8]
    assert [tensor.dtype for tensor in tensors.values()] == [torch.int32, torch.int32, torch.float16]


@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_are_those_of_the_formula(symmetric: bool, tmp_path: Path) -> None:
    weight = random_qtensor(Scheme(4, 32, symmetric))
    tensors = AWQ.to_tensors("p", weight)
    expected = torch.tensor(by_the_formula(tensors, 32))
    read = AWQ.from_tensors(write(tmp_path / "model", tensors), "p", weight.scheme)
    assert read.scheme == weight.scheme
    assert torch.equal(read.dequantize(torch.float32), expected)
    assert torch.equal(weight.dequantize(torch.float32), expected)


def test_a_matrix_in_several_pieces(tmp_path: Path) -> None:
    weight = random_qtensor(Scheme(4, 128), out=24, columns=2**18)
    tensors = AWQ.to_tensors("p", weight)
    read = AWQ.from_tensors(write(tmp_path / "model", tensors), "p", weight.scheme)
    assert torch.equal(read.qweight, weight.qweight)


def test_a_symmetric_file_may_have_no_zero_points(tmp_path: Path) -> None:
    weight = random_qtensor(Scheme(4, 32))
    tensors = AWQ.to_tensors("p", weight)
    assert tensors["p.qzeros"].unique().tolist() == [0x88888888 - 2**32]
    del tensors["p.qzeros"]
    read = AWQ.from_tensors(write(tmp_path / "model", tensors), "p", weight.scheme)
    assert torch.equal(read.dequantize(), weight.dequantize())


def damage(change: str, tensors: dict[str, Tensor]) -> None:
    match change:
        case "no codes":
            del tensors["p.qweight"]
        case "a cube":
            tensors["p.qweight"] = tensors["p.qweight"][None]
        case "bytes":
            tensors["p.qweight"] = tensors["p.qweight"].to(torch.int8)
        case "short zeros":
            tensors["p.qzeros"] = tensors["p.qzeros"][:-1]
        case "no zeros":
            del tensors["p.qzeros"]
        case "integer scales":
            tensors["p.scales"] = tensors["p.scales"].int()
        case "odd columns":
            tensors["p.qweight"] = tensors["p.qweight"][:-1]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("no codes", TensorError, r"tensor p\.qweight is missing"),
        ("a cube", TensorError, r"p\.qweight: expected a matrix, found shape \[1, 128, 6\]"),
        ("bytes", TensorError, r"p\.qweight: expected torch\.int32, found torch\.int8"),
        ("short zeros", TensorError, r"p\.qzeros has shape \[3, 6\], expected \[4, 6\]"),
        ("no zeros", TensorError, r"tensor p\.qzeros is missing"),
        ("integer scales", TensorError, r"p\.scales: expected a floating-point type, found torch\.int32"),
        ("odd columns", SchemeError, "p: 127 columns cannot be cut into groups of 32"),
    ],
)
def test_damaged_layers_are_named(change: str, error: type[WarpbusError], message: str, tmp_path: Path) -> None:
    scheme = Scheme(4, 32, symmetric=False)
    tensors = AWQ.to_tensors("p", random_qtensor(scheme))
    damage(change, tensors)
    checkpoint = write(tmp_path / "model", tensors)
    with pytest.raises(error, match=message) as caught:
        AWQ.from_tensors(checkpoint, "p", scheme)
    assert len(str(caught.value).splitlines()) == 1


def test_zero_points_where_the_config_says_that_there_are_none(tmp_path: Path) -> None:
    tensors = AWQ.to_tensors("p", random_qtensor(Scheme(4, 32, symmetric=False)))
    checkpoint = write(tmp_path / "model", tensors)
    with pytest.raises(TensorError, match=r"p\.qzeros: stores \d+, expected 8 everywhere, .* zero_point to true"):
        AWQ.from_tensors(checkpoint, "p", Scheme(4, 32))


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        ("w3a16-g32", (64, 64), "the AWQ format has weights of 4 bits only, not w3a16-g32"),
        ("w8a8-fp8", (64, 64), "the AWQ format has weights of 4 bits only, not w8a8-fp8"),
        ("w4a16-g32", (60, 64), "60 rows: the AWQ format needs a multiple of 8"),
        ("w4a16-g64", (64, 96), "96 columns cannot be cut into groups of 64"),
    ],
)
def test_what_the_format_cannot_hold(scheme: str, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(SchemeError, match=f"^p: .*{message}"):
        AWQ.check(Scheme.parse(scheme), shape, "p")


def test_several_schemes_and_other_scales_are_refused() -> None:
    with pytest.raises(SchemeError, match="one scheme for all layers, not w4a16-g32, w4a16-g128"):
        AWQ.quantization_config({"a": Scheme(4, 32), "b": Scheme(4, 128)}, [])
    weight = random_qtensor(Scheme(4, 32))
    other = QTensor(weight.scheme, weight.qweight, weight.scales.bfloat16(), None, weight.shape)
    with pytest.raises(TensorError, match=r"p: AWQ's scales are float16, found torch\.bfloat16"):
        AWQ.to_tensors("p", other)


@pytest.mark.parametrize("scheme", ["w4a16-g128", "w4a16-g32-asym", "w4a16"])
def test_configurations_come_back(scheme: str) -> None:
    described = AWQ.quantization_config({"a": Scheme.parse(scheme)}, ["lm_head"])
    assert described["zero_point"] is True
    assert described["modules_to_not_convert"] == ["lm_head"]
    config = json.loads(json.dumps({"quantization_config": described}))
    assert format_of(config) is AWQ
    assert str(AWQ.read_schemes(config)) == scheme


def auto_awq(**changes: Any) -> dict[str, Any]:
    """What AutoAWQ puts into config.json."""
    described = {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}
    return {"quantization_config": described | {"modules_to_not_convert": None} | changes}


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        ({}, "w4a16-g128-asym"),
        ({"sym": True}, "w4a16-g128-asym"),
        ({"version": "GEMM", "zero_point": False}, "w4a16-g128"),
        ({"group_size": -1}, "w4a16-asym"),
        ({"bits": None, "group_size": None, "w_bit": 4, "q_group_size": 64}, "w4a16-g64-asym"),
    ],
)
def test_configurations_of_others(changes: dict[str, Any], scheme: str) -> None:
    assert str(AWQ.read_schemes(auto_awq(**changes))) == scheme


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "gemv"}, "version is 'gemv', expected 'gemm' or 'GEMM' or absent"),
        ({"bits": 8}, "bits is 8, expected 4"),
        ({"group_size": 2**70}, "groups of 1180591620717411303424 are not supported"),
        ({"group_size": "128"}, "group_size is '128', expected an integer"),
        ({"zero_point": 1}, "zero_point is 1, expected True or False or absent"),
    ],
)
def test_configurations_that_are_not_understood(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: .*{message}") as caught:
        AWQ.read_schemes(auto_awq(**changes))
    assert len(str(caught.value).splitlines()) == 1

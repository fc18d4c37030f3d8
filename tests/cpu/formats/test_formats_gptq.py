"""GPTQ files: values written out by hand, the format's formula number by number, and files that do not fit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from warpbus.errors import CheckpointError, SchemeError, TensorError, WarpbusError
from warpbus.formats import Checkpoint, CheckpointWriter, format_named, format_of, read_schemes
from warpbus.qtensor import QTensor, Scheme

VERSIONS = {"gptq": 1, "gptq-v2": 2}


def write(directory: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    with CheckpointWriter(directory) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.write_json("config.json", {})
        return Checkpoint(writer.finish())


def words(*values: int) -> list[int]:
    """Words as int32 has them."""
    return [value - 2**32 if value >= 2**31 else value for value in values]


def random_qtensor(scheme: Scheme, out: int = 64, columns: int = 256) -> QTensor:
    """Scales of both signs; zero points from 1 on, which both versions can hold."""
    generator = torch.Generator().manual_seed(scheme.bits)
    groups = scheme.groups(columns)
    codes = torch.randint(0, scheme.max_code + 1, (out, columns), generator=generator)
    scales = (torch.randn(out, groups, generator=generator) * 0.1).half()
    zeros = None if scheme.symmetric else torch.randint(1, scheme.max_code + 1, (out, groups), generator=generator)
    return QTensor.from_codes(scheme, codes, scales, zeros)


def by_the_formula(tensors: dict[str, Tensor], bits: int, version: int) -> list[list[float]]:
    """The weights of a file, one by one: (code - zero) * scale with bits looked up in the streams."""
    stored = {name.rpartition(".")[2]: tensor.tolist() for name, tensor in tensors.items()}

    def value(stream: list[int], index: int) -> int:
        joined = sum((word % 2**32) << (32 * place) for place, word in enumerate(stream))
        return (joined >> (index * bits)) % 2**bits

    out = len(stored["scales"][0])
    columns = [[row[o] for row in stored["qweight"]] for o in range(out)]
    return [
        [
            (value(columns[o], i) - value(stored["qzeros"][g], o) - (2 - version)) * stored["scales"][g][o]
            for i, g in enumerate(stored["g_idx"])
        ]
        for o in range(out)
    ]


@pytest.mark.parametrize(("name", "zeros"), [("gptq", 0x76543210), ("gptq-v2", 0x87654321)])
def test_four_bits_by_hand(name: str, zeros: int) -> None:
    codes = torch.tensor([[row + column for column in range(8)] for row in range(8)])
    weight = QTensor.from_codes(
        Scheme(4, None, symmetric=False), codes, torch.ones(8, 1).half(), torch.arange(1, 9)[:, None]
    )
    tensors = format_named(name).to_tensors("p", weight)
    assert tensors["p.qweight"].tolist() == [
        words(0x76543210, 0x87654321, 0x98765432, 0xA9876543, 0xBA987654, 0xCBA98765, 0xDCBA9876, 0xEDCBA987)
    ]
    assert tensors["p.qzeros"].tolist() == [words(zeros)]
    assert tensors["p.scales"].tolist() == [[1.0] * 8]
    assert tensors["p.g_idx"].tolist() == [0] * 8
    assert [tensors[f"p.{part}"].dtype for part in ("qweight", "qzeros", "scales", "g_idx")] == [
        torch.int32,
        torch.int32,
        torch.float16,
        torch.int32,
    ]


@pytest.mark.parametrize(("name", "word"), [("gptq", 0x77777777), ("gptq-v2", 0x88888888)])
def test_zero_points_of_a_symmetric_file(name: str, word: int) -> None:
    tensors = format_named(name).to_tensors("p", random_qtensor(Scheme(4, 64)))
    assert tensors["p.qzeros"].shape == (4, 8)
    assert tensors["p.qzeros"].unique().tolist() == words(word)
    assert tensors["p.g_idx"].tolist() == [column // 64 for column in range(256)]


def test_three_bits_across_words() -> None:
    codes = torch.zeros(32, 32, dtype=torch.int64)
    codes[0, [0, 10, 21, 31]] = torch.tensor([5, 7, 7, 3])
    weight = QTensor.from_codes(Scheme(3, 32), codes, torch.ones(32, 1).half())
    tensors = format_named("gptq").to_tensors("p", weight)
    # Value 10 has bits 30 to 32, value 21 bits 63 to 65, value 31 bits 93 to 95.
    assert tensors["p.qweight"][:, 0].tolist() == words(5 | 3 << 30, 1 | 1 << 31, 3 | 3 << 29)
    assert tensors["p.qweight"][:, 1:].eq(0).all()
    # 3 in each of 32 places: 011 011 ... from the least significant bit on.
    assert tensors["p.qzeros"].tolist() == [words(0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D)]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", VERSIONS)
def test_weights_are_those_of_the_formula(bits: int, symmetric: bool, name: str, tmp_path: Path) -> None:
    scheme = Scheme(bits, 32, symmetric)
    weight = random_qtensor(scheme, out=32, columns=96)
    tensors = format_named(name).to_tensors("p", weight)
    expected = torch.tensor(by_the_formula(tensors, bits, VERSIONS[name]))
    read = format_named(name).from_tensors(write(tmp_path / "model", tensors), "p", scheme)
    assert torch.equal(read.dequantize(torch.float32), expected)
    assert torch.equal(weight.dequantize(torch.float32), expected)


def test_groups_in_another_order(tmp_path: Path) -> None:
    """Whole groups may be permuted, as static groups leave them: g_idx says whose scales are whose."""
    scheme = Scheme(4, 32, symmetric=False)
    tensors = format_named("gptq").to_tensors("p", random_qtensor(scheme, out=8, columns=96))
    tensors["p.g_idx"] = torch.tensor([2, 0, 1], dtype=torch.int32).repeat_interleave(32)
    expected = torch.tensor(by_the_formula(tensors, 4, 1))
    read = format_named("gptq").from_tensors(write(tmp_path / "model", tensors), "p", scheme)
    assert torch.equal(read.dequantize(torch.float32), expected)


def test_a_file_without_g_idx(tmp_path: Path) -> None:
    weight = random_qtensor(Scheme(4, 32))
    tensors = format_named("gptq").to_tensors("p", weight)
    del tensors["p.g_idx"]
    read = format_named("gptq").from_tensors(write(tmp_path / "model", tensors), "p", weight.scheme)
    assert torch.equal(read.qweight, weight.qweight)


def test_a_symmetric_file_that_is_called_by_the_wrong_version(tmp_path: Path) -> None:
    weight = random_qtensor(Scheme(4, 32))
    checkpoint = write(tmp_path / "model", format_named("gptq-v2").to_tensors("p", weight))
    read = format_named("gptq").from_tensors(checkpoint, "p", weight.scheme)
    assert torch.equal(read.dequantize(), weight.dequantize())


def test_zero_points_that_version_1_cannot_hold(tmp_path: Path) -> None:
    weight = random_qtensor(Scheme(4, 32, symmetric=False))
    assert weight.zeros is not None
    weight.zeros[3, 2] = 0
    with pytest.raises(SchemeError, match=r"^p: has zero points 0, .* use gptq-v2$"):
        format_named("gptq").to_tensors("p", weight)
    tensors = format_named("gptq-v2").to_tensors("p", weight)
    read = format_named("gptq-v2").from_tensors(write(tmp_path / "v2", tensors), "p", weight.scheme)
    assert torch.equal(read.dequantize(), weight.dequantize())
    tensors["p.qzeros"][0, 0] = words(0xF2345678)[0]
    checkpoint = write(tmp_path / "v1", tensors)
    with pytest.raises(CheckpointError, match=r"^p\.qzeros: stores 15 .* 16 to some readers and 0 to others"):
        format_named("gptq").from_tensors(checkpoint, "p", weight.scheme)


def damage(change: str, tensors: dict[str, Tensor]) -> None:
    match change:
        case "no codes":
            del tensors["p.qweight"]
        case "flat codes":
            tensors["p.qweight"] = tensors["p.qweight"].reshape(-1)
        case "wide codes":
            tensors["p.qweight"] = tensors["p.qweight"].long()
        case "empty":
            tensors["p.qweight"] = tensors["p.qweight"][:0]
        case "short zeros":
            tensors["p.qzeros"] = tensors["p.qzeros"][:, :-1]
        case "few scales":
            tensors["p.scales"] = tensors["p.scales"][:1]
        case "integer scales":
            tensors["p.scales"] = tensors["p.scales"].int()
        case "short index":
            tensors["p.g_idx"] = tensors["p.g_idx"][:-1]
        case "index too large":
            tensors["p.g_idx"][7] = 2
        case "negative index":
            tensors["p.g_idx"][7] = -1
        case "reordered":
            tensors["p.g_idx"][[0, 40]] = tensors["p.g_idx"][[40, 0]]
        case "odd zero":
            tensors["p.qzeros"][1, 1] = words(0x77777577)[0]
        case "odd columns":
            tensors["p.qweight"] = tensors["p.qweight"][:-1]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("no codes", TensorError, r"tensor p\.qweight is missing"),
        ("flat codes", TensorError, r"p\.qweight: expected a matrix, found shape \[512\]"),
        ("wide codes", TensorError, r"p\.qweight: expected torch\.int32, found torch\.int64"),
        ("empty", TensorError, r"p\.qweight: expected a matrix, found shape \[0, 64\]"),
        ("short zeros", TensorError, r"p\.qzeros has shape \[2, 7\], expected \[2, 8\]"),
        ("few scales", TensorError, r"p\.scales has shape \[1, 64\], expected \[2, 64\]"),
        ("integer scales", TensorError, r"p\.scales: expected a floating-point type, found torch\.int32"),
        ("short index", TensorError, r"p\.g_idx has shape \[63\], expected \[64\]"),
        ("index too large", TensorError, r"p\.g_idx: names group 2, expected 0 to 1"),
        ("negative index", TensorError, r"p\.g_idx: names group -1, expected 0 to 1"),
        (
            "reordered",
            CheckpointError,
            r"p\.g_idx: columns reordered by activation \(desc_act\) .* float16 or bfloat16",
        ),
        ("odd zero", TensorError, r"p\.qzeros: stores 5, expected 7 everywhere, .* set sym to false"),
        ("odd columns", SchemeError, "p: 56 columns cannot be cut into groups of 32"),
    ],
)
def test_damaged_layers_are_named(change: str, error: type[WarpbusError], message: str, tmp_path: Path) -> None:
    weight = random_qtensor(Scheme(4, 32), columns=64)
    tensors = format_named("gptq").to_tensors("p", weight)
    damage(change, tensors)
    checkpoint = write(tmp_path / "model", tensors)
    with pytest.raises(error, match=message) as caught:
        format_named("gptq").from_tensors(checkpoint, "p", weight.scheme)
    assert len(str(caught.value).splitlines()) == 1


def test_three_bits_in_a_number_of_words_that_holds_no_values(tmp_path: Path) -> None:
    weight = random_qtensor(Scheme(3, 32), out=32, columns=64)
    tensors = format_named("gptq").to_tensors("p", weight)
    tensors["p.qweight"] = tensors["p.qweight"][:5]
    with pytest.raises(TensorError, match=r"p\.qweight: 5 words hold no whole number of values of 3 bits"):
        format_named("gptq").from_tensors(write(tmp_path / "model", tensors), "p", weight.scheme)


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        ("w4a16", (64, 100), "100 columns of 4 bits do not fill whole words: .* multiple of 8"),
        ("w4a16", (60, 64), "60 rows of 4 bits do not fill whole words: .* multiple of 8"),
        ("w3a16", (64, 40), "40 columns of 3 bits do not fill whole words: .* multiple of 32"),
        ("w4a16-g128", (64, 192), "192 columns cannot be cut into groups of 128"),
        ("w8a8-int8", (64, 64), "the GPTQ format has no w8a8-int8"),
    ],
)
def test_what_the_format_cannot_hold(scheme: str, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(SchemeError, match=f"^p: .*{message}"):
        format_named("gptq").check(Scheme.parse(scheme), shape, "p")


def test_scales_have_to_be_float16() -> None:
    weight = random_qtensor(Scheme(4, 32))
    wide = QTensor(weight.scheme, weight.qweight, weight.scales.float(), None, weight.shape)
    with pytest.raises(TensorError, match=r"p: GPTQ's scales are float16, found torch\.float32"):
        format_named("gptq").to_tensors("p", wide)


def auto_gptq(**changes: Any) -> dict[str, Any]:
    """What AutoGPTQ and GPTQModel put into config.json."""
    described = {
        "bits": 4,
        "damp_percent": 0.01,
        "desc_act": False,
        "group_size": 128,
        "quant_method": "gptq",
        "static_groups": False,
        "sym": True,
        "true_sequential": True,
    }
    return {"quantization_config": described | changes}


@pytest.mark.parametrize(
    ("changes", "name", "scheme"),
    [
        ({}, "gptq", "w4a16-g128"),
        ({"checkpoint_format": "gptq", "desc_act": True}, "gptq", "w4a16-g128"),
        ({"checkpoint_format": "gptq_v2", "sym": False, "bits": 3, "group_size": 32}, "gptq-v2", "w3a16-g32-asym"),
        ({"format": "gptq_v2", "group_size": -1, "bits": 8}, "gptq-v2", "w8a16"),
        ({"dynamic": {}}, "gptq", "w4a16-g128"),
    ],
)
def test_configurations_of_others(changes: dict[str, Any], name: str, scheme: str) -> None:
    config = auto_gptq(**changes)
    found = format_of(config)
    assert found is format_named(name)
    assert str(found.read_schemes(config)) == scheme


def test_schemes_of_single_layers() -> None:
    config = auto_gptq(
        dynamic={r"-:.*\.o_proj$": {}, r"+:.*layers\.0\.": {"bits": 8}, r".*down_proj": {"group_size": 32}}
    )
    schemes = format_named("gptq").read_schemes(config)
    assert schemes.of("model.layers.1.self_attn.q_proj") == Scheme(4, 128)
    assert schemes.of("model.layers.0.self_attn.q_proj") == Scheme(8, 128)
    assert schemes.of("model.layers.1.mlp.down_proj") == Scheme(4, 32)
    assert schemes.of("model.layers.0.self_attn.o_proj") is None


@pytest.mark.parametrize("name", VERSIONS)
def test_configurations_come_back(name: str) -> None:
    layers = {"model.layers.0.mlp.down_proj": Scheme(8, 32), "a.1": Scheme(4, None), "a.2": Scheme(4, None)}
    config = {"quantization_config": format_named(name).quantization_config(layers, ["lm_head"])}
    config = json.loads(json.dumps(config))
    assert format_of(config) is format_named(name)
    schemes = format_named(name).read_schemes(config)
    assert {layer: schemes.of(layer) for layer in layers} == layers
    assert schemes.of("lm_head") is None
    assert schemes.of("model.layers.0.mlp.down_proj_2") == Scheme(4, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "bits is 5, expected 2 or 3 or 4 or 8"),
        ({"bits": "4"}, "quantization_config.bits is '4', expected an integer"),
        ({"group_size": 10**30}, "groups of 1000000000000000000000000000000 are not supported"),
        ({"group_size": None}, "group_size is None, expected an integer"),
        ({"sym": "yes"}, "sym is 'yes', expected True or False"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', expected 'gptq' or 'gptq_v2' or absent"),
        ({"dynamic": ["x"]}, r"dynamic is \['x'\], expected an object"),
        ({"dynamic": {"+:x": 4}}, r"dynamic\.\+:x is 4, expected an object"),
        ({"dynamic": {"+:x": {"bits": 7}}}, r"dynamic\.\+:x\.bits is 7, expected 2 or 3 or 4 or 8"),
        ({"dynamic": {"+:(a*)*": {}}}, "expected no repeated group"),
    ],
)
def test_configurations_that_are_not_understood(changes: dict[str, Any], message: str) -> None:
    config = auto_gptq(**changes)
    with pytest.raises(CheckpointError, match=rf"^config\.json: .*{message}") as caught:
        read_schemes(config)
    assert len(str(caught.value).splitlines()) == 1


def test_names_are_no_patterns() -> None:
    described = format_named("gptq").quantization_config(Scheme(4, 128), ["model.layers.0.mlp.down_proj"])
    assert [re.sub(r"\\", "", pattern) for pattern in described["dynamic"]] == ["-:^model.layers.0.mlp.down_proj$"]


@pytest.mark.parametrize("head", ["lm_head", "transformer.output_layer"])
def test_config_says_whether_the_head_is_quantized(head: str) -> None:
    """Engines look for the head's codes only if it does."""
    layers = {"model.layers.0.mlp.down_proj": Scheme(4, 128), head: Scheme(8, 128)}
    described = format_named("gptq").quantization_config(layers, [])
    assert described["lm_head"] is True
    assert read_schemes({"quantization_config": described}).of(head) == Scheme(8, 128)
    del layers[head]
    assert format_named("gptq").quantization_config(layers, [head])["lm_head"] is False

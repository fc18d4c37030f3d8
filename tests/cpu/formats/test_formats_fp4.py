"""NVFP4 and MXFP4: numbers, rounding, and the formats of compressed-tensors and ModelOpt."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from warpbus.errors import CheckpointError, SchemeError, TensorError
from warpbus.formats import Checkpoint, format_named, format_of, read_schemes
from warpbus.formats.dequantizing import dequantized
from warpbus.formats.fp4 import fp4_to_tensors
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.rounding import round_to_nearest
from warpbus.qtensor import QTensor, Scheme
from warpbus.qtensor.fp4 import fp4_codes, fp4_values

NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
SCHEMES = {name: Scheme.parse(f"w4a16-{name}") for name in ("nvfp4", "mxfp4")}
FORMATS = [("compressed-tensors", "nvfp4"), ("compressed-tensors", "mxfp4"), ("modelopt", "nvfp4")]


def random_weight(rows: int = 24, columns: int = 96) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 0.05


def test_codes_are_the_nearest_numbers():
    assert fp4_values(torch.arange(16), torch.float32).tolist() == [*NUMBERS, *(-number for number in NUMBERS)]
    numbers = torch.linspace(-9, 9, 4001)
    every = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)])
    nearest = (numbers[:, None] - every).abs().amin(1)
    found = fp4_values(fp4_codes(numbers), torch.float32)
    torch.testing.assert_close((numbers - found).abs(), nearest)


@pytest.mark.parametrize("name", SCHEMES)
def test_scales_are_those_of_the_format_and_codes_the_nearest(name):
    scheme, weight = SCHEMES[name], random_weight()
    rounded = round_to_nearest(weight, scheme, scale_dtype=torch.bfloat16)
    mantissa, _ = torch.frexp(rounded.scales)
    assert torch.equal(mantissa * 16, (mantissa * 16).round())
    if name == "mxfp4":
        assert bool((mantissa == 0.5).all())
    steps = rounded.scales.repeat_interleave(scheme.group_size, 1)
    assert torch.equal(rounded.codes(), fp4_codes(weight / steps))
    error = (rounded.dequantize() - weight).norm() / weight.norm()
    assert float(error) < (0.1 if name == "nvfp4" else 0.13)


@pytest.mark.parametrize("name", SCHEMES)
def test_importance_moves_the_error_to_where_it_costs_least(name):
    weight = random_weight()
    costs = torch.ones(96)
    costs[::3] = 100.0
    plain = round_to_nearest(weight, SCHEMES[name], scale_dtype=torch.bfloat16)
    weighted = round_to_nearest(weight, SCHEMES[name], scale_dtype=torch.bfloat16, importance=costs)

    def loss(rounded: QTensor) -> float:
        return float(((rounded.dequantize() - weight).square() * costs).sum())

    assert loss(weighted) < loss(plain)


@pytest.mark.parametrize("name", SCHEMES)
def test_zeros_stay_zeros(name):
    rounded = round_to_nearest(torch.zeros(2, 64), SCHEMES[name], scale_dtype=torch.bfloat16)
    assert not rounded.dequantize().any()
    assert bool((rounded.scales == 1).all())


def test_names_and_sizes():
    assert [str(Scheme.parse(f"w4a16-{name}")) for name in SCHEMES] == ["w4a16-nvfp4", "w4a16-mxfp4"]
    assert [scheme.bits_per_weight(64) for scheme in SCHEMES.values()] == [4.5, 4.25]
    assert SCHEMES["nvfp4"].fitting(40) == SCHEMES["nvfp4"]
    assert not SCHEMES["nvfp4"].has_codes
    with pytest.raises(SchemeError, match="40 columns cannot be cut into groups of 16"):
        SCHEMES["nvfp4"].groups(40)
    with pytest.raises(SchemeError, match="use w4a16-nvfp4"):
        Scheme(4, 32, element="nvfp4")
    with pytest.raises(TensorError, match="no kernel computes with"):
        pack(round_to_nearest(random_weight(), SCHEMES["nvfp4"], scale_dtype=torch.half), torch.half)


def write(directory: Path, form: str, weight: QTensor, **changes: Any) -> Checkpoint:
    directory.mkdir()
    format = format_named(form)
    tensors = format.to_tensors("p", weight) | {"p.bias": torch.ones(24), "norm.weight": torch.ones(3)}
    for name, value in changes.items():
        tensors[f"p.{name}"] = value
    save_file(tensors, directory / "model.safetensors")
    config = {"quantization_config": format.quantization_config(weight.scheme, ["lm_head"]), "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    return Checkpoint(directory)


@pytest.mark.parametrize(("form", "name"), FORMATS)
@pytest.mark.parametrize("size", [1.0, 1e4, 1e-6])
def test_what_is_written_is_read(tmp_path, form, name, size):
    weight = round_to_nearest(random_weight() * size, SCHEMES[name], scale_dtype=torch.bfloat16)
    checkpoint = write(tmp_path / "m", form, weight)
    read = format_named(form).from_tensors(checkpoint, "p", SCHEMES[name])
    assert torch.equal(read.qweight, weight.qweight)
    assert torch.equal(read.scales, weight.scales)
    assert format_of(checkpoint.config) is None
    assert read_schemes(checkpoint.config).distinct() == ()
    found = dequantized(checkpoint)
    assert found.names() == ["norm.weight", "p.bias", "p.weight"]
    assert torch.equal(found.tensor("p.weight"), weight.dequantize(torch.float32))
    assert b"".join(found.chunks("p.weight")) == weight.dequantize(torch.float32).numpy().tobytes()
    assert "quantization_config" not in found.config


def test_layouts_bit_by_bit():
    codes = torch.arange(16).repeat(2, 2)
    weight = QTensor.from_codes(SCHEMES["nvfp4"], codes, torch.tensor([[0.25, 1.0], [7.0, 0.5]]))
    tensors = fp4_to_tensors("p", weight)
    assert tensors["p.weight_packed"][0, :4].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert tensors["p.weight_global_scale"].tolist() == [64.0]
    assert tensors["p.weight_scale"].float().tolist() == [[16, 64], [448, 32]]
    tensors = fp4_to_tensors("p", weight, modelopt=True)
    assert float(tensors["p.weight_scale_2"]) == 1 / 64
    exponents = QTensor.from_codes(SCHEMES["mxfp4"], codes, torch.tensor([[2.0], [0.125]]))
    assert fp4_to_tensors("p", exponents)["p.weight_scale"].tolist() == [[128], [124]]


@pytest.mark.parametrize("name", SCHEMES)
def test_the_compressed_tensors_package_reads_the_same_codes(name):
    compressed = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    weight = round_to_nearest(random_weight(), SCHEMES[name], scale_dtype=torch.bfloat16)
    packed = fp4_to_tensors("p", weight)["p.weight_packed"]
    found = unpack_fp4_from_uint8(packed, 24, 96, dtype=torch.float32)
    assert torch.equal(found, fp4_values(weight.codes(), torch.float32))
    group = format_named("compressed-tensors").quantization_config(SCHEMES[name], [])["config_groups"]["group_0"]
    preset = compressed.quantization.preset_name_to_scheme(f"{name.upper()}A16", ["Linear"])
    found = compressed.quantization.QuantizationScheme.model_validate(group)
    unused = {"weights": {"zp_dtype"}}  # of zero points
    assert found.model_dump(exclude=unused) == preset.model_dump(exclude=unused)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"weight_scale": torch.ones(24, 5)}, TensorError, r"p\.weight_scale: expected torch\.float8_e4m3fn"),
        ({"weight_packed": torch.ones(24, 48)}, TensorError, r"p\.weight_packed: expected torch\.uint8"),
        ({"weight_packed": torch.ones(24, 9, dtype=torch.uint8)}, SchemeError, "18 columns cannot be cut"),
        ({"weight_global_scale": torch.zeros(1)}, TensorError, "is 0.0, expected a positive number"),
        ({"weight_global_scale": torch.ones(2)}, TensorError, "expected one number of float32"),
    ],
)
def test_damaged_matrices_are_refused(tmp_path, changes, error, match):
    weight = round_to_nearest(random_weight(), SCHEMES["nvfp4"], scale_dtype=torch.bfloat16)
    checkpoint = write(tmp_path / "m", "compressed-tensors", weight, **changes)
    with pytest.raises(error, match=match):
        dequantized(checkpoint).tensor("p.weight")


def test_other_kinds_are_refused_by_key():
    described = format_named("compressed-tensors").quantization_config(SCHEMES["nvfp4"], [])
    described["config_groups"]["group_0"]["weights"]["group_size"] = 32
    with pytest.raises(CheckpointError, match="group_size is 32, expected 16"):
        format_of({"quantization_config": described})
    with pytest.raises(CheckpointError, match="quant_algo is 'FP8'"):
        format_of({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}})
    for other in ("w4a16-g32", "w4a16-mxfp4"):
        with pytest.raises(SchemeError, match="modelopt is written for w4a16-nvfp4 only"):
            format_named("modelopt").check(Scheme.parse(other), (32, 32), "p")
    for form in ("gptq", "awq"):
        with pytest.raises(SchemeError):
            format_named(form).check(SCHEMES["nvfp4"], (32, 32), "p")
    weight = QTensor.from_codes(SCHEMES["nvfp4"], torch.zeros(1, 16), torch.full((1, 1), -1.0))
    with pytest.raises(TensorError, match="not positive numbers"):
        fp4_to_tensors("p", weight)

"""compressed-tensors' formats, in both directions against the library that defines it."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from warpbus.errors import CheckpointError, SchemeError, TensorError, WarpbusError
from warpbus.formats import (
    Checkpoint,
    CheckpointWriter,
    from_tensors,
    is_quantized,
    quantization_config,
    read_schemes,
    to_tensors,
)
from warpbus.qtensor import QTensor, Scheme, Schemes

SCHEMES = [Scheme(*parts) for parts in itertools.product((2, 3, 4, 5, 6, 8), (None, 32, 64, 128), (True, False))]
PREFIX = "model.layers.0.mlp.down_proj"


def random_qtensor(scheme: Scheme, out: int = 30, columns: int = 384, dtype: torch.dtype = torch.bfloat16) -> QTensor:
    """30 rows: no whole number of 32-bit words of zero points."""
    generator = torch.Generator().manual_seed(scheme.bits)
    groups = scheme.groups(columns)
    codes = torch.randint(0, scheme.max_code + 1, (out, columns), generator=generator)
    scales = (torch.rand(out, groups, generator=generator) * 0.1 + 0.01).to(dtype)
    zeros = None if scheme.symmetric else torch.randint(0, scheme.max_code + 1, (out, groups), generator=generator)
    return QTensor.from_codes(scheme, codes, scales, zeros)


def write(directory: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    with CheckpointWriter(directory) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.write_json("config.json", {})
        return Checkpoint(writer.finish())


def library_scheme(scheme: Scheme) -> Any:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = quantization.QuantizationConfig.model_validate(quantization_config(scheme, ["lm_head"]))
    return config.config_groups["group_0"]


def library_compressor() -> Any:
    return pytest.importorskip("compressed_tensors.compressors.pack_quantized").PackedQuantizationCompressor


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_library_reads_what_is_written(scheme: Scheme) -> None:
    weight = random_qtensor(scheme)
    stored = {name.rpartition(".")[2]: tensor for name, tensor in to_tensors(PREFIX, weight).items()}
    read = library_compressor().decompress(stored, library_scheme(scheme))["weight"]
    assert read.dtype == torch.bfloat16
    assert torch.equal(read, weight.dequantize())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_the_library_writes_is_read(scheme: Scheme, tmp_path: Path) -> None:
    weight = random_qtensor(scheme, dtype=torch.float16)
    state = {"weight": weight.dequantize(), "weight_scale": weight.scales}
    if weight.zeros is not None:
        state["weight_zero_point"] = (weight.zeros.to(torch.int16) - scheme.middle_code).to(torch.int8)
    stored = library_compressor().compress(state, library_scheme(scheme))
    checkpoint = write(tmp_path / "model", {f"{PREFIX}.{name}": tensor for name, tensor in stored.items()})
    read = from_tensors(checkpoint, PREFIX, scheme)
    assert torch.equal(read.codes(), weight.codes())
    assert torch.equal(read.dequantize(), weight.dequantize())
    ours = to_tensors("", weight)
    assert all(torch.equal(ours[f".{name}"], tensor) for name, tensor in stored.items())
    assert len(ours) == len(stored)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_is_written_is_read_bit_for_bit(scheme: Scheme, tmp_path: Path) -> None:
    weight = random_qtensor(scheme)
    checkpoint = write(tmp_path / "model", to_tensors(PREFIX, weight))
    assert is_quantized(checkpoint, PREFIX)
    assert not is_quantized(checkpoint, "model.layers.0.mlp.up_proj")
    read = from_tensors(checkpoint, PREFIX, scheme)
    assert read.scheme == scheme
    assert read.shape == weight.shape
    assert torch.equal(read.qweight, weight.qweight)
    assert torch.equal(read.scales, weight.scales)
    if weight.zeros is None:
        assert read.zeros is None
    else:
        assert read.zeros is not None
        assert torch.equal(read.zeros, weight.zeros)


def test_the_layout_of_a_small_matrix() -> None:
    scheme = Scheme(4, None, symmetric=False)
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0, 9]] * 9)
    tensors = to_tensors("p", QTensor.from_codes(scheme, codes, torch.ones(9, 1), torch.arange(9).reshape(9, 1)))
    assert tensors["p.weight_packed"].tolist() == [[0x07654321, 0x9]] * 9
    assert tensors["p.weight_zero_point"].tolist() == [[0x76543210], [0x8]]
    assert tensors["p.weight_scale"].shape == (9, 1)
    assert tensors["p.weight_shape"].tolist() == [9, 9]
    assert tensors["p.weight_shape"].dtype == torch.int64


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_configurations_come_back(scheme: Scheme) -> None:
    config = {"quantization_config": quantization_config(scheme, ["lm_head"])}
    assert read_schemes(json.loads(json.dumps(config))) == Schemes(scheme, {"lm_head": None})


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_configurations_the_library_writes_are_read(scheme: Scheme) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = quantization.QuantizationConfig.model_validate(quantization_config(scheme, ["lm_head"]))
    assert config.ignore == ["lm_head"]
    assert read_schemes({"quantization_config": config.model_dump(mode="json")}) == Schemes(scheme, {"lm_head": None})


def llm_compressor_config(**weights: Any) -> dict[str, Any]:
    """The shape of what llm-compressor saves for W4A16, with all keys that its releases have written."""
    return {
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "format": "pack-quantized",
                    "input_activations": None,
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": {
                        "actorder": None,
                        "block_structure": None,
                        "dynamic": False,
                        "group_size": 128,
                        "num_bits": 4,
                        "observer": "minmax",
                        "observer_kwargs": {},
                        "scale_dtype": None,
                        "strategy": "group",
                        "symmetric": True,
                        "type": "int",
                        "zp_dtype": None,
                    }
                    | weights,
                }
            },
            "format": "pack-quantized",
            "global_compression_ratio": 1.5,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": "0.12.2",
        }
    }


@pytest.mark.parametrize("actorder", [None, "static", "weight"])
def test_llm_compressor_configurations_are_read(actorder: str | None) -> None:
    assert read_schemes(llm_compressor_config(actorder=actorder)).default == Scheme(4, 128)
    asymmetric = read_schemes(llm_compressor_config(actorder=actorder, symmetric=False))
    assert asymmetric.default == Scheme(4, 128, symmetric=False)


def test_a_plain_model_has_no_scheme() -> None:
    assert read_schemes({"model_type": "glm"}) == Schemes(None)
    assert read_schemes({"quantization_config": None, "quantization_bit": 0}) == Schemes(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actorder": "other"}, r"group_0\.weights\.actorder is 'other', expected absent or 'static' or 'weight'"),
        ({"type": "float"}, r"weights\.type is 'float', expected 'int'"),
        ({"dynamic": True}, r"weights\.dynamic is True, expected False"),
        ({"strategy": "tensor"}, r"weights\.strategy is 'tensor', expected 'group' or 'channel'"),
        ({"symmetric": 1}, r"weights\.symmetric is 1, expected True or False"),
        ({"block_structure": [4, 4]}, r"weights\.block_structure is \[4, 4\], expected absent"),
        ({"novelty": 7}, r"weights\.novelty is 7, expected absent"),
        ({"group_size": None}, r"weights\.group_size is None, expected an integer"),
        ({"num_bits": "4"}, r"weights\.num_bits is '4', expected an integer"),
        ({"num_bits": 7}, "7 bits are not supported: choose from 2, 3, 4, 5, 6, 8"),
        ({"group_size": 256}, "groups of 256 are not supported: choose from 32, 64, 128"),
        ({"observer": "x" * 500, "type": "y" * 500}, r"weights\.type is 'y{79}\.\.\., expected 'int'"),
    ],
)
def test_weights_that_are_not_understood(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: .*{message}") as caught:
        read_schemes(llm_compressor_config(**change))
    assert not isinstance(caught.value, SchemeError)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "hqq"}, r"quant_method is 'hqq', expected 'compressed-tensors', 'gptq', 'awq' or 'fp8'"),
        ({"format": "marlin-24"}, r"group_0\.format is 'marlin-24', expected 'pack-quantized' or 'int-quantized' or"),
        ({"format": ["pack-quantized"]}, r"group_0\.format is \['pack-quantized'\], expected 'pack-quantized' or"),
        ({"ignore": "lm_head"}, r"ignore is 'lm_head', expected a list of names"),
        ({"ignore": ["re:(a*)*"]}, r"pattern '\(a\*\)\*': expected no repeated group"),
        ({"quantization_status": "frozen"}, "quantization_status is 'frozen', expected 'compressed'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, r"kv_cache_scheme\.type is None, expected 'float' or 'int'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is .*, expected absent"),
        ({"transform_config": {"config_groups": {}}}, "transform_config is .*, expected absent"),
        ({"config_groups": {}}, "config_groups is {}, expected at least one group"),
        ({"config_groups": {"group_0": {"weights": None}}}, "group_0 is .*, expected an object with weights"),
    ],
)
def test_configurations_that_are_not_understood(change: dict[str, Any], message: str) -> None:
    config = llm_compressor_config()["quantization_config"] | change
    for group in config["config_groups"].values():
        group.pop("format", None)
    with pytest.raises(CheckpointError, match=rf"^config\.json: quantization_config\.{message}|{message}"):
        read_schemes({"quantization_config": config})


def test_quantized_activations_are_not_understood() -> None:
    config = llm_compressor_config()
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "dynamic": True}
    with pytest.raises(CheckpointError, match=r"group_0\.input_activations is .*, expected absent"):
        read_schemes(config)


def test_a_configuration_that_is_no_object() -> None:
    with pytest.raises(CheckpointError, match="quantization_config is 'w4a16', expected an object"):
        read_schemes({"quantization_config": "w4a16"})


def grouped(**others: Any) -> dict[str, Any]:
    """A configuration with a second group."""
    config = llm_compressor_config()
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = json.loads(json.dumps(groups["group_0"]))
    groups["group_1"] |= others
    return config


def test_several_groups_have_their_layers() -> None:
    eight = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    targets = ["re:.*down_proj$", "model.layers.0.mlp.up_proj"]
    config = grouped(targets=targets, weights=eight)
    config["quantization_config"]["ignore"] += ["re:.*layers.1..*"]
    schemes = read_schemes(config)
    assert schemes.distinct() == (Scheme(4, 128), Scheme(8, None))
    assert schemes.of("model.layers.0.mlp.up_proj") == Scheme(8, None)
    assert schemes.of("model.layers.2.mlp.down_proj") == Scheme(8, None)
    assert schemes.of("model.layers.2.mlp.up_proj") == Scheme(4, 128)
    assert schemes.of("model.layers.1.mlp.down_proj") is None
    assert schemes.of("lm_head") is None


def test_names_go_before_patterns() -> None:
    config = grouped(targets=["re:model.*"], weights={"num_bits": 8} | W8A8_WEIGHTS)
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["model.a"]
    schemes = read_schemes(config)
    assert schemes.of("model.a") == Scheme(4, 128)
    assert schemes.of("model.b") == Scheme(8, None)
    assert schemes.of("lm_head") is None


def test_a_target_of_two_groups() -> None:
    assert read_schemes(grouped()).distinct() == (Scheme(4, 128),)
    with pytest.raises(CheckpointError, match=r"group_1\.targets is 'Linear', expected in one group only"):
        read_schemes(grouped(weights={"num_bits": 8} | W8A8_WEIGHTS))
    with pytest.raises(CheckpointError, match=r"group_1\.targets is \{\}, expected a list of names"):
        read_schemes(grouped(targets={}))


W8A8_WEIGHTS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "channel",
    "group_size": None,
    "dynamic": False,
}


def w8a8_config(kind: str = "int", **activations: Any) -> dict[str, Any]:
    """What llm-compressor saves for W8A8 and FP8_DYNAMIC."""
    config = llm_compressor_config()
    quantization = config["quantization_config"]
    group = quantization["config_groups"]["group_0"]
    group["weights"] |= W8A8_WEIGHTS | {"type": kind}
    group["input_activations"] = (
        group["weights"] | {"dynamic": True, "strategy": "token", "observer": None} | activations
    )
    quantization["format"] = group["format"] = f"{kind}-quantized"
    return config


@pytest.mark.parametrize(("kind", "text"), [("int", "w8a8-int8"), ("float", "w8a8-fp8")])
def test_w8a8_configurations_are_read(kind: str, text: str) -> None:
    assert read_schemes(w8a8_config(kind)) == Schemes(Scheme.parse(text), {"lm_head": None})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dynamic": False, "strategy": "tensor"}, r"input_activations\.dynamic is False, expected True"),
        ({"strategy": "tensor"}, r"input_activations\.strategy is 'tensor', expected 'token'"),
        ({"num_bits": 4}, r"input_activations\.num_bits is 4, expected 8"),
        ({"type": "float"}, r"input_activations\.type is 'float', expected 'int'"),
        ({"symmetric": False}, r"input_activations\.symmetric is False, expected True"),
        ({"novelty": 1}, r"input_activations\.novelty is 1, expected absent"),
    ],
)
def test_activations_that_are_not_understood(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_schemes(w8a8_config(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "group", "group_size": 128}, r"weights\.strategy is 'group', expected 'channel'"),
        ({"strategy": "tensor"}, r"weights\.strategy is 'tensor', expected 'channel'"),
        ({"symmetric": False}, "activations in int8 go with symmetric weights"),
        ({"num_bits": 4}, "activations in int8 go with .* weights of 8 bits"),
    ],
)
def test_w8a8_weights_that_are_not_understood(change: dict[str, Any], message: str) -> None:
    config = w8a8_config()
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= change
    with pytest.raises(CheckpointError, match=message):
        read_schemes(config)


def test_mixtures_are_written_by_name() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    schemes = {
        "model.layers.0.mlp.down_proj": Scheme(8, None),
        "model.layers.0.mlp.up_proj": Scheme(4, 128),
        "model.layers.1.mlp.up_proj": Scheme(4, 128),
        "model.layers.1.mlp.down_proj": Scheme.parse("w8a8-fp8"),
        "model.layers.2.mlp.down_proj": Scheme.parse("w8a8-int8"),
    }
    config = quantization_config(schemes, ["lm_head"])
    assert config["format"] == "mixed-precision"
    groups = config["config_groups"]
    assert groups["group_1"]["targets"] == ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    assert [group["format"] for group in groups.values()] == [
        "pack-quantized",
        "pack-quantized",
        "float-quantized",
        "int-quantized",
    ]
    for described in (config, quantization.QuantizationConfig.model_validate(config).model_dump(mode="json")):
        read = read_schemes({"quantization_config": described})
        assert read.default is None
        assert dict(read.exceptions) == schemes | {"lm_head": None}


def test_a_mixture_of_one_format_says_it_once() -> None:
    config = quantization_config({"a": Scheme(8, None), "b": Scheme(4, 128)}, [])
    assert config["format"] == "pack-quantized"
    assert [group["targets"] for group in config["config_groups"].values()] == [["a"], ["b"]]
    assert not any("format" in group for group in config["config_groups"].values())
    assert quantization_config({"a": Scheme(4, 128), "b": Scheme(4, 128)}, []) == quantization_config(
        Scheme(4, 128), []
    )


def random_values(text: str) -> QTensor:
    generator = torch.Generator().manual_seed(0)
    scheme = Scheme.parse(text)
    values = torch.randint(-127, 128, (30, 40), generator=generator).to(scheme.dtype)
    return QTensor.from_values(scheme, values, (torch.rand(30, generator=generator) + 0.01).bfloat16())


@pytest.mark.parametrize("text", ["w8a8-int8", "w8a8-fp8"])
def test_values_are_written_and_read_bit_for_bit(text: str, tmp_path: Path) -> None:
    weight = random_values(text)
    tensors = to_tensors(PREFIX, weight)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        f"{PREFIX}.weight": (30, 40),
        f"{PREFIX}.weight_scale": (30, 1),
    }
    checkpoint = write(tmp_path / "model", tensors)
    assert is_quantized(checkpoint, PREFIX)
    read = from_tensors(checkpoint, PREFIX, weight.scheme)
    assert read.qweight.dtype == weight.scheme.dtype
    assert torch.equal(read.dequantize(), weight.dequantize())
    assert torch.equal(read.scales, weight.scales)


@pytest.mark.parametrize("text", ["w8a8-int8", "w8a8-fp8"])
def test_the_library_reads_and_writes_the_same_values(text: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weight = random_values(text)
    config = quantization.QuantizationConfig.model_validate(quantization_config(weight.scheme, ["lm_head"]))
    registry = pytest.importorskip("compressed_tensors.compressors").BaseCompressor
    compressor, group = registry.get_value_from_registry(config.format), config.config_groups["group_0"]
    stored = {name.rpartition(".")[2]: tensor for name, tensor in to_tensors(PREFIX, weight).items()}
    read = compressor.decompress(stored, group)["weight"]
    assert torch.equal(read, weight.dequantize())
    wide = weight.scales.float()  # dividing in bfloat16 would not give the values back
    written = compressor.compress({"weight": weight.dequantize(torch.float32), "weight_scale": wide}, group)
    assert written.keys() == stored.keys()
    assert written["weight"].dtype == weight.scheme.dtype
    assert torch.equal(written["weight"].float(), stored["weight"].float())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input_scale": torch.ones(1)}, CheckpointError, r"p\.input_scale: static scales .* dynamic, symmetric w8a8"),
        ({"weight_zero_point": torch.zeros(30, 1)}, CheckpointError, r"p\.weight_zero_point: zero points are not"),
        ({"weight": torch.zeros(30, 40)}, TensorError, r"p\.weight: expected torch\.int8, found torch\.float32"),
        ({"weight": torch.zeros(30).char()}, TensorError, r"p\.weight: expected a matrix, found shape \[30\]"),
        ({"weight_scale": torch.ones(1)}, TensorError, r"p\.weight_scale has shape \[1\], expected \[30, 1\]"),
        ({"weight_scale": torch.ones(30, 1).int()}, TensorError, r"p\.weight_scale: expected a floating-point type"),
    ],
)
def test_damaged_values_are_named(
    change: dict[str, Tensor], error: type[WarpbusError], message: str, tmp_path: Path
) -> None:
    tensors = to_tensors("p", random_values("w8a8-int8")) | {f"p.{name}": value for name, value in change.items()}
    checkpoint = write(tmp_path / "model", tensors)
    with pytest.raises(error, match=message):
        from_tensors(checkpoint, "p", Scheme.parse("w8a8-int8"))


def damaged(change: str) -> tuple[dict[str, Tensor], Scheme]:
    scheme = Scheme(3 if change == "old packing" else 4, 32, symmetric=False)
    tensors = to_tensors("p", random_qtensor(scheme, columns=64))
    packed, shape = tensors["p.weight_packed"], tensors["p.weight_shape"]
    match change:
        case "no scales":
            del tensors["p.weight_scale"]
        case "no zeros":
            del tensors["p.weight_zero_point"]
        case "reordered":
            tensors["p.weight_g_idx"] = torch.zeros(64, dtype=torch.int32)
        case "narrow":
            tensors["p.weight_packed"] = packed[:, 1:]
        case "wide words":
            tensors["p.weight_packed"] = packed.long()
        case "integer scales":
            tensors["p.weight_scale"] = tensors["p.weight_scale"].int()
        case "zeros not packed":
            tensors["p.weight_zero_point"] = torch.zeros(30, 2, dtype=torch.int32)
        case "no rows":
            tensors["p.weight_shape"] = shape * torch.tensor([0, 1])
        case "odd columns":
            tensors["p.weight_shape"] = shape - torch.tensor([0, 1])
        case "old packing":
            tensors["p.weight_packed"] = torch.zeros(30, 7, dtype=torch.int32)
    return tensors, scheme


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("no scales", TensorError, r"tensor p\.weight_scale is missing"),
        ("no zeros", TensorError, r"tensor p\.weight_zero_point is missing"),
        ("reordered", CheckpointError, r"p\.weight_g_idx: columns reordered .* float16 or bfloat16"),
        ("narrow", TensorError, r"tensor p\.weight_packed has shape \[30, 7\], expected \[30, 8\]"),
        ("wide words", TensorError, r"p\.weight_packed: expected torch\.int32, found torch\.int64"),
        ("integer scales", TensorError, r"p\.weight_scale: expected a floating-point type, found torch\.int32"),
        ("zeros not packed", TensorError, r"p\.weight_zero_point has shape \[30, 2\], expected \[4, 2\]"),
        ("no rows", TensorError, r"p\.weight_shape: expected two positive sizes, found 0 and 64"),
        ("odd columns", SchemeError, "p: 63 columns cannot be cut into groups of 32"),
        ("old packing", CheckpointError, r"p\.weight_packed: 3-bit values packed 10 to a word, as .* before 0\.18"),
    ],
)
def test_damaged_layers_are_named(change: str, error: type[WarpbusError], message: str, tmp_path: Path) -> None:
    tensors, scheme = damaged(change)
    checkpoint = write(tmp_path / "model", tensors)
    with pytest.raises(error, match=message):
        from_tensors(checkpoint, "p", scheme)

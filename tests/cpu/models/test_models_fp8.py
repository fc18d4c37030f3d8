"""FP8 models are loaded and converted as if they were unquantized."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_files import BLOCK, PER_TOKEN, STATIC, block_of, compressed, from_fp8, stored, write_fp8
from quantized_files import HF, plain_tensors
from torch import Tensor

from warpbus.errors import UsageError
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.convert import convert
from warpbus.models.layers import QuantizedLinear

VALUES = HF | {"torch_dtype": "bfloat16"}
KINDS = {
    "fp8": BLOCK,
    "block": compressed("block", PER_TOKEN, block_structure=[48, 32]),
    "tensor": compressed("tensor", STATIC),
    "weights only": compressed("channel", None),
}


def write(directory: Path, quantization: dict[str, Any]) -> dict[str, Tensor]:
    """An FP8 model; gives its projections in float64."""
    tensors = stored(plain_tensors(VALUES, torch.bfloat16), quantization)
    write_fp8(directory, VALUES | {"quantization_config": quantization}, tensors)
    found = {}
    for name, values in tensors.items():
        if values.dtype != torch.float8_e4m3fn:
            continue
        prefix = name.removesuffix(".weight")
        scales = next(
            tensors[prefix + end] for end in (".weight_scale_inv", ".weight_scale") if prefix + end in tensors
        )
        height, width = block_of(values.shape, quantization)
        found[name] = from_fp8(values, scales.view(-(-len(values) // height), -1), height, width)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_are_dequantized_to_the_dtype_of_the_activations(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    expected = write(tmp_path, KINDS[kind])
    model = load_model(Checkpoint(tmp_path), device="cpu", dtype=dtype)
    down = expected["model.layers.1.mlp.down_proj.weight"].float().to(dtype)
    parts = [expected[f"model.layers.0.self_attn.{part}_proj.weight"].float().to(dtype) for part in "qkv"]
    assert torch.equal(model.layers[1].mlp.down.weight, down)
    assert torch.equal(model.layers[0].attention.qkv.weight, torch.cat(parts))


def test_channels_with_activations_per_token_are_loaded_as_w8a8(tmp_path: Path) -> None:
    expected = write(tmp_path, compressed("channel", PER_TOKEN))
    model = load_model(Checkpoint(tmp_path), device="cpu", dtype=torch.float32)
    down = model.layers[1].mlp.down
    assert isinstance(down, QuantizedLinear)
    assert str(down.scheme) == "w8a8-fp8"
    found = down.weight.dequantize(torch.float32)
    assert torch.equal(found, expected["model.layers.1.mlp.down_proj.weight"].float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to", ["bfloat16", "float16"])
def test_conversion_to_16_bits(tmp_path: Path, kind: str, to: str) -> None:
    expected = write(tmp_path / "fp8", KINDS[kind])
    result = convert(tmp_path / "fp8", tmp_path / "plain", to=to)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == to
    read = Checkpoint(tmp_path / "plain")
    for name, weight in expected.items():
        assert torch.equal(read.tensor(name), weight.float().to(getattr(torch, to))), name
    assert {read.dtype(name) for name in read.names()} == {getattr(torch, to)}
    assert (result.source, result.matrices, result.schemes) == ("fp8", len(expected), "fp8")
    assert result.bytes_before == Checkpoint(tmp_path / "fp8").total_bytes
    assert result.bytes_after == read.total_bytes


def test_conversion_pads_the_ffn(tmp_path: Path) -> None:
    expected = write(tmp_path / "fp8", BLOCK)
    convert(tmp_path / "fp8", tmp_path / "plain", to="bfloat16", pad_ffn=192)
    name = "model.layers.0.mlp.down_proj.weight"
    found = Checkpoint(tmp_path / "plain").tensor(name)
    assert torch.equal(found[:, :160], expected[name].float().bfloat16())
    assert not found[:, 160:].any()


def test_conversion_to_a_quantized_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "fp8", BLOCK)
    with pytest.raises(UsageError, match=r"--to gptq: the matrices .*, in FP8, .* float16 or bfloat16, or use"):
        convert(tmp_path / "fp8", tmp_path / "out", to="gptq")
    assert not (tmp_path / "out").exists()

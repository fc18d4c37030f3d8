"""Quantizing an FP8 model gives what quantizing the dequantized model gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_files import BLOCK, PER_TOKEN, STATIC, compressed, copy_companions, stored, write_fp8
from quantization_models import MOE, stop_after_layer, write_model
from torch import Tensor

from warpbus.errors import TensorError, UsageError
from warpbus.formats import Checkpoint
from warpbus.formats.fp8 import dequantized
from warpbus.quantization import Calibration, quantize
from warpbus.quantization.driver import Progress

KINDS = {
    "fp8": BLOCK,
    "channel": compressed("channel", PER_TOKEN),
    "tensor": compressed("tensor", STATIC),
}


def tensors_of(directory: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint(directory)
    return {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}


def pair(tmp_path: Path, quantization: dict[str, Any], dtype: torch.dtype, **model: Any) -> tuple[Path, Path]:
    """An FP8 model, and one with the dequantized matrices."""
    plain = write_model(tmp_path / "plain", dtype=dtype, **model)
    config = Checkpoint(plain).config
    in_fp8, wide = tmp_path / "fp8", tmp_path / "wide"
    write_fp8(in_fp8, config | {"quantization_config": quantization}, stored(tensors_of(plain), quantization))
    read = dequantized(Checkpoint(in_fp8))
    assert read.dtype("model.layers.0.mlp.down_proj.weight") == dtype
    write_fp8(wide, config, {name: read.tensor(name) for name in read.names()})
    for directory in (in_fp8, wide):
        copy_companions(plain, directory)
    return in_fp8, wide


def calibration() -> Calibration:
    drawn = torch.randint(10, 380, (6, 32), generator=torch.Generator().manual_seed(4))
    return Calibration(tuple(map(tuple, drawn.tolist())))


def run(model: Path, output: Path, algorithm: str, progress: Progress | None = None) -> None:
    quantize(
        model,
        output,
        scheme="w4a16-g32",
        algorithm=algorithm,
        calibration=None if algorithm == "rtn" else calibration(),
        device="cpu",
        progress=progress,
    )


@pytest.mark.parametrize(
    ("kind", "algorithm", "dtype"),
    [
        ("fp8", "gptq", torch.bfloat16),
        ("fp8", "rtn", torch.bfloat16),
        ("fp8", "rtn", torch.float32),
        ("channel", "gptq", torch.bfloat16),
        ("tensor", "awq", torch.float32),
    ],
)
def test_the_bits_are_those_of_the_dequantized_model(
    tmp_path: Path, kind: str, algorithm: str, dtype: torch.dtype
) -> None:
    in_fp8, wide = pair(tmp_path, KINDS[kind], dtype)
    for model in (in_fp8, wide):
        run(model, tmp_path / f"{model.name}-out", algorithm)
    found, expected = tensors_of(tmp_path / "fp8-out"), tensors_of(tmp_path / "wide-out")
    assert found.keys() == expected.keys()
    assert "model.layers.1.mlp.down_proj.weight_packed" in found
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    configs = [json.loads((tmp_path / f"{model.name}-out" / "config.json").read_text()) for model in (in_fp8, wide)]
    assert configs[0] == configs[1]


def test_experts_in_fp8(tmp_path: Path) -> None:
    in_fp8, wide = pair(tmp_path, BLOCK, torch.bfloat16, **MOE)
    for model in (in_fp8, wide):
        run(model, tmp_path / f"{model.name}-out", "rtn")
    found, expected = tensors_of(tmp_path / "fp8-out"), tensors_of(tmp_path / "wide-out")
    assert "model.layers.1.mlp.experts.3.down_proj.weight_packed" in found
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_an_interrupted_run_notices_scales_that_have_changed(tmp_path: Path) -> None:
    in_fp8, _ = pair(tmp_path, BLOCK, torch.bfloat16)
    with pytest.raises(KeyboardInterrupt):
        run(in_fp8, tmp_path / "out", "gptq", Progress(matrix=stop_after_layer(tmp_path / "out", 0)))
    tensors = tensors_of(in_fp8)
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    tensors[name] = tensors[name] * 2
    write_fp8(in_fp8, Checkpoint(in_fp8).config, tensors)
    with pytest.raises(UsageError, match=r"model\.layers\.0\.mlp\.down_proj\.weight has changed"):
        run(in_fp8, tmp_path / "out", "gptq")


def test_missing_scales_are_reported_before_the_work_begins(tmp_path: Path) -> None:
    in_fp8, _ = pair(tmp_path, BLOCK, torch.bfloat16)
    tensors = tensors_of(in_fp8)
    del tensors["model.layers.1.self_attn.k_proj.weight_scale_inv"]
    write_fp8(in_fp8, Checkpoint(in_fp8).config, tensors)
    with pytest.raises(TensorError, match=r"layers\.1\.self_attn\.k_proj\.weight_scale_inv is missing"):
        run(in_fp8, tmp_path / "out", "rtn")
    assert not (tmp_path / "out").exists()

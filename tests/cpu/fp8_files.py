"""FP8 checkpoints made of the tensors of a plain model."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

BLOCK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [48, 32],
    "modules_to_not_convert": ["lm_head"],
}
"""Blocks that divide neither the rows nor the columns of most matrices."""


def compressed(strategy: str, activations: Mapping[str, Any] | None, **weights: Any) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors FP8."""
    described = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    group = {"targets": ["Linear"], "weights": described | weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


PER_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def to_fp8(weight: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """A matrix in FP8 with float32 scales `[ceil(rows / height), ceil(columns / width)]`, one per block."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // height), -(-columns // width))
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            block = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scales[i, j] = weight[block].abs().max().float() / 448
            values[block] = (weight[block].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def from_fp8(values: Tensor, scales: Tensor, height: int, width: int) -> Tensor:
    """The float64 product of an FP8 matrix and its scales."""
    rows, columns = (torch.arange(length) // size for length, size in zip(values.shape, (height, width), strict=True))
    return values.double() * scales.double()[rows[:, None], columns]


def stored(tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a model, its projections in FP8 as `quantization` says."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        prefix = name.removesuffix(".weight")
        group = quantization.get("config_groups", {}).get("group_0", {})
        found[name], scales = to_fp8(tensor, *block_of(tensor.shape, quantization))
        suffix = ".weight_scale" if group else ".weight_scale_inv"
        found[prefix + suffix] = scales.flatten() if scales.numel() == 1 else scales
        if group.get("input_activations") == STATIC:
            found[f"{prefix}.input_scale"] = torch.ones(1)
    return found


def block_of(shape: Sequence[int], quantization: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale in a matrix of this shape."""
    if quantization["quant_method"] == "fp8":
        height, width = quantization["weight_block_size"]
        return height, width
    strategy = quantization["config_groups"]["group_0"]["weights"]["strategy"]
    rows, columns = shape
    return {"tensor": (rows, columns), "channel": (1, columns), "block": (48, 32)}[strategy]


def write_fp8(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A model directory of these tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(dict(config)))
    return directory


def copy_companions(source: Path, target: Path) -> None:
    """Copy the files of a model that are neither weights nor config.json."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, target / file.name)

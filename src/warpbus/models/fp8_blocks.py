"""`convert --to fp8-block` writes a model in FP8 with one scale per block of 128 x 128 weights, as GLM-5-FP8 is.

Each value is the weight over its block's scale, rounded to the nearest e4m3 number; the scale puts the largest weight
of the block on 448. No data is needed. The reader is `formats.fp8`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.errors import NumericError, StorageError, UsageError
from warpbus.formats import Checkpoint, CheckpointWriter
from warpbus.formats.companions import find_companions
from warpbus.formats.dequantizing import dequantized
from warpbus.formats.files import check_kept
from warpbus.formats.format import format_of
from warpbus.formats.gguf.view import directory_of
from warpbus.formats.safetensors_io import raw_bytes
from warpbus.kernels.reference.grid import LARGEST, nearest_values
from warpbus.models.loading import read_config
from warpbus.models.parameter_source import tensor_map

TARGET = "fp8-block"
BLOCK = 128
_E4M3 = torch.float8_e4m3fn
_SCALES = "_scale_inv"  # behind the name of the weight; it is multiplied, despite its name


def to_blocks(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Round a matrix to FP8 by blocks.

    Args:
        weight: floating `[out, in]`.
        name: for messages.

    Returns:
        the values, float8_e4m3fn `[out, in]`, and the scales, float32 `[ceil(out / 128), ceil(in / 128)]`.

    Raises:
        NumericError: a weight is NaN or infinite.
    """
    values, bands = torch.empty(weight.shape, dtype=_E4M3), []
    for start in range(0, len(weight), BLOCK):
        band = weight[start : start + BLOCK].float()
        if not bool(band.isfinite().all()):
            raise NumericError(f"{name}: NaN or infinity among its weights: use an undamaged checkpoint")
        blocks = F.pad(band, (0, -band.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        largest = blocks.abs().amax((0, 2))
        scales = torch.where(largest == 0, torch.ones_like(largest), largest / LARGEST[_E4M3])
        bands.append(scales)
        of_column = scales.repeat_interleave(BLOCK)[: band.shape[1]]
        values[start : start + BLOCK] = nearest_values(band / of_column, _E4M3)
    return values, torch.stack(bands)


def write_fp8_blocks(model: str | Path, output: str | Path, *, overwrite: bool) -> tuple[int, int, int]:
    """Write a model in FP8; the matrices of its layers are rounded, everything else is copied.

    Args:
        model: a model directory, unquantized or in a floating-point format that is dequantized when it is read; or a
            GGUF file of such types.
        output: a new directory.
        overwrite: replace a model that is at `output`.

    Returns:
        the number of matrices, and the bytes of all tensors before and after.

    Raises:
        UsageError: the model has integer codes, or writing the output would delete it.
        CheckpointError, TensorError: the model cannot be read.
        NumericError: a weight is NaN or infinite.
        StorageError: the output exists, cannot be written, or differs from what was written when it is read back.
    """
    directory, output = directory_of(Path(model)), Path(output)
    check_kept(output, Path(model))
    stored = Checkpoint(directory)
    if format_of(stored.config) is not None:
        raise UsageError(f"{model}: --to {TARGET}: is quantized to integers: convert it to bfloat16 first")
    checkpoint = dequantized(stored)
    config = read_config(checkpoint, mtp="stored")
    tensors = tensor_map(config)
    names = {name for index, matrix in config.matrices for name in tensors[f"layers.{index}.{matrix.name}.weight"]}
    with CheckpointWriter(output, overwrite=overwrite) as writer:
        writer.write_json("config.json", _config(checkpoint, names))
        for name, file in find_companions(directory).items():
            writer.copy_file(file, name)
        after = 0
        for name in checkpoint.names():
            tensor = checkpoint.tensor(name)
            written = {name: tensor}
            if name in names:
                values, scales = to_blocks(tensor, name)
                written = {name: values, f"{name}{_SCALES}": scales}
            for each, part in written.items():
                writer.add(each, part)
                after += part.nbytes
        writer.finish(lambda written: _compare(Checkpoint(written), checkpoint, names, output))
    return len(names), stored.total_bytes, after


def _config(checkpoint: Checkpoint, names: set[str]) -> dict[str, Any]:
    """The config.json of the output."""
    kept = [name for name in checkpoint.names() if name.endswith(".weight") and len(checkpoint.shape(name)) == 2]
    quantization: Mapping[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [name.removesuffix(".weight") for name in kept if name not in names],
    }
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    return config | {"quantization_config": quantization}


def _compare(written: Checkpoint, source: Checkpoint, names: set[str], output: Path) -> None:
    """Read everything back; raises StorageError if a tensor differs."""
    for name in source.names():
        tensor = source.tensor(name)
        expected = [(name, tensor)]
        if name in names:
            values, scales = to_blocks(tensor, name)
            expected = [(name, values), (f"{name}{_SCALES}", scales)]
        for each, part in expected:
            found = written.tensor(each)
            if found.dtype != part.dtype or raw_bytes(found) != raw_bytes(part.contiguous()):
                raise StorageError(
                    f"{output}: {each}: the data read back differs from what was written; the output was discarded: "
                    "check the disk, and try again"
                )

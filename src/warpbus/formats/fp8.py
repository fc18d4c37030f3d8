"""FP8 checkpoints whose matrices are dequantized while they are read, so that they load like unquantized checkpoints.

`quant_method: fp8`, the format of GLM-5-FP8 and DeepSeek-V3, has one scale per block of, for instance, 128 x 128
weights:

    prefix.weight            float8_e4m3fn [out, in]
    prefix.weight_scale_inv  float [ceil(out / 128), ceil(in / 128)]

`quant_method: compressed-tensors` with weights of type "float" has the strategies "block", "channel" and "tensor":

    prefix.weight            float8_e4m3fn [out, in]
    prefix.weight_scale      float [ceil(out / 128), ceil(in / 128)], [out, 1], or [1]

In both, `weight = value * scale`. Scales of activations are ignored, since the activations keep their dtype.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.dtype_names import short_name
from warpbus.errors import TensorError
from warpbus.formats import compressed_tensors
from warpbus.formats.checkpoint import Checkpoint
from warpbus.formats.kv_cache import read_kv_cache_scheme
from warpbus.formats.reading import require, unreadable
from warpbus.formats.stored import ComputedTensor, StoredTensor, row_bands

_WHERE = "quantization_config"
_WEIGHT, _INPUT_SCALE = ".weight", ".input_scale"
_E4M3 = torch.float8_e4m3fn
_FP8 = (_E4M3, torch.float8_e5m2)
_DTYPES = {short_name(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class Fp8:
    """How a checkpoint stores its FP8 matrices.

    Attributes:
        suffix: of the names of the scales, in place of `.weight`.
        block: rows and columns that share a scale; None for all rows or all columns.
        is_scheme: the matrices and the quantization of their activations are those of the scheme w8a8-fp8.
    """

    suffix: str
    block: tuple[int | None, int | None]
    is_scheme: bool = False

    def scales_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the scales of a matrix `[rows, columns]`."""
        height, width = self.block
        return -(-rows // (height or rows)), -(-columns // (width or columns))


def fp8_storage(config: dict[str, Any]) -> Fp8 | None:
    """How an FP8 checkpoint stores its matrices, from its `config.json`; None if it is not an FP8 checkpoint.

    Raises:
        CheckpointError: this kind of FP8 is not supported.
    """
    quantization = config.get(_WHERE)
    if not isinstance(quantization, dict):
        return None
    if quantization.get("quant_method") == "fp8":
        require(quantization, _WHERE, "fmt", ("e4m3", None))
        require(quantization, _WHERE, "activation_scheme", ("dynamic", None))
        return Fp8(".weight_scale_inv", _block(quantization, _WHERE, "weight_block_size"))
    groups = quantization.get("config_groups")
    if not compressed_tensors.detect(config) or not isinstance(groups, dict) or not groups:
        return None
    if not all(map(_is_fp8, groups.values())):
        return None
    compressed_tensors.check_section(quantization)
    stored = {name: _read_group(f"{_WHERE}.config_groups.{name}", group) for name, group in groups.items()}
    first = next(iter(stored.values()))
    for name, other in stored.items():
        if (other.suffix, other.block) != (first.suffix, first.block):
            where = f"{_WHERE}.config_groups.{name}.weights.strategy"
            raise unreadable(where, groups[name]["weights"].get("strategy"), "the same as in the other groups")
    found = Fp8(first.suffix, first.block, all(each.is_scheme for each in stored.values()))
    if read_kv_cache_scheme(config) is not None and not found.is_scheme:
        where = f"{_WHERE}.kv_cache_scheme"
        raise unreadable(where, quantization["kv_cache_scheme"], "absent from a model that is dequantized")
    return found


def dequantized(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> Checkpoint:
    """An FP8 checkpoint as an unquantized one: each FP8 matrix is dequantized when it is read.

    Its config has no `quantization_config`, and its tensors include neither scales nor static scales of activations.
    Reading a matrix takes memory for the result and for a few rows in float32.

    Args:
        checkpoint: any; returned unchanged if it is not an FP8 checkpoint.
        dtype: of the dequantized matrices; by default the one that `config.json` declares, else bfloat16.

    Raises:
        CheckpointError: this kind of FP8 is not supported.
        TensorError: the scales of a matrix are missing, or a tensor has the wrong shape or dtype.
    """
    storage = fp8_storage(checkpoint.config)
    if storage is None:
        return checkpoint
    config = {key: value for key, value in checkpoint.config.items() if key != _WHERE}
    dtype = declared_dtype(config) if dtype is None else dtype
    tensors: dict[str, StoredTensor] = {}
    for name in checkpoint.names():
        if name.endswith(storage.suffix):
            _check_values(checkpoint, name.removesuffix(storage.suffix) + _WEIGHT, name)
        elif checkpoint.dtype(name) in _FP8:
            tensors[name] = _matrix(checkpoint, name, storage, dtype)
        elif not name.endswith(_INPUT_SCALE):
            tensors[name] = checkpoint.stored(name)
    return Checkpoint.of_tensors(checkpoint.directory, tensors, config)


def declared_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that a `config.json` declares; bfloat16 if it declares none or another than float32 and 16 bits."""
    declared = config.get("dtype", config.get("torch_dtype"))
    return _DTYPES.get(declared, torch.bfloat16) if isinstance(declared, str) else torch.bfloat16


def fp8_matrices(checkpoint: Checkpoint) -> list[str]:
    """The names of the FP8 matrices of a checkpoint."""
    return [name for name in checkpoint.names() if checkpoint.dtype(name) == _E4M3]


@dataclass(frozen=True)
class _Dequantized(ComputedTensor):
    """An FP8 matrix with its scales, read as a tensor of another dtype."""

    values: StoredTensor
    scales: StoredTensor
    storage: Fp8

    def bands(self) -> Iterator[Tensor]:
        """A product in float32 is rounded once, to `dtype`."""
        (rows, columns), (height, width) = self.shape, self.storage.block
        values = self.values.read()
        scales = self.scales.read().float().view(self.storage.scales_shape(rows, columns))
        for band in row_bands(self.shape):
            own = scales[torch.arange(band.start, band.stop) // (height or rows)]
            yield values[band].float().mul_(own.repeat_interleave(width or columns, 1)[:, :columns])


def _matrix(checkpoint: Checkpoint, name: str, storage: Fp8, dtype: torch.dtype) -> _Dequantized:
    """An FP8 matrix, whose scales are checked but not read."""
    scales = name.removesuffix(_WEIGHT) + storage.suffix
    _check_values(checkpoint, name, scales)
    shape, found = checkpoint.shape(name), checkpoint.shape(scales)
    if len(shape) != 2 or 0 in shape:
        raise TensorError(f"{checkpoint.directory}: {name}: expected a matrix, found shape {list(shape)}")
    expected = storage.scales_shape(*shape)
    if not checkpoint.dtype(scales).is_floating_point or checkpoint.dtype(scales) in _FP8:
        raise TensorError(
            f"{checkpoint.directory}: {scales}: expected floating point of 16 to 64 bits, found "
            f"{checkpoint.dtype(scales)}: use an undamaged checkpoint"
        )
    # One scale of a matrix is stored as a number, a vector or a matrix.
    if found != expected and not (math.prod(expected) == math.prod(found) == 1):
        raise TensorError(
            f"{checkpoint.directory}: {scales}: expected shape {list(expected)} for a matrix of shape {list(shape)}, "
            f"found {list(found)}: check that config.json belongs to these weights"
        )
    return _Dequantized(shape, dtype, checkpoint.stored(name), checkpoint.stored(scales), storage)


def _check_values(checkpoint: Checkpoint, name: str, scales: str) -> None:
    """Check that an FP8 matrix and its scales are both in the checkpoint."""
    if scales not in checkpoint:
        raise TensorError(
            f"{checkpoint.directory}: {scales} is missing, the scales of the FP8 matrix {name}: check that the "
            "checkpoint is complete and that config.json belongs to it"
        )
    if name not in checkpoint or checkpoint.dtype(name) != _E4M3:
        found = checkpoint.dtype(name) if name in checkpoint else "no such tensor"
        raise TensorError(
            f"{checkpoint.directory}: {name}: expected {_E4M3}, since there is {scales}, found {found}: "
            "use an undamaged checkpoint"
        )


def _is_fp8(group: object) -> bool:
    weights = group.get("weights") if isinstance(group, dict) else None
    return isinstance(weights, dict) and weights.get("type") == "float" and weights.get("num_bits") == 8


def _read_group(where: str, group: dict[str, Any]) -> Fp8:
    weights, activations = group["weights"], group.get("input_activations")
    inside = f"{where}.weights"
    require(weights, inside, "dynamic", (False, None))
    require(weights, inside, "symmetric", (True, None))
    strategy = require(weights, inside, "strategy", ("block", "channel", "tensor"))
    if strategy == "block":
        return Fp8(".weight_scale", _block(weights, inside, "block_structure"))
    per_token = isinstance(activations, dict) and activations.get("strategy") == "token" and activations.get("dynamic")
    channel = strategy == "channel"
    return Fp8(".weight_scale", (1 if channel else None, None), is_scheme=channel and per_token is True)


def _block(section: dict[str, Any], where: str, key: str) -> tuple[int, int]:
    found = section.get(key)
    if not isinstance(found, list) or len(found) != 2 or not all(type(size) is int and size > 0 for size in found):
        raise unreadable(f"{where}.{key}", found, "two positive integers")
    return found[0], found[1]

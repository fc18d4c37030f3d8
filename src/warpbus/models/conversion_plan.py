"""Plans the conversion of a model (`convert`) from the headers of its files."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from warpbus.cuda.dtype_names import short_name
from warpbus.errors import CheckpointError, SchemeError, UsageError
from warpbus.formats import Checkpoint, Format, WritableFormat, format_named, format_of
from warpbus.formats.dequantizing import ReorderedMatrix, dequantized, dequantized_matrices, dequantized_reordered
from warpbus.formats.format import WRITABLE
from warpbus.formats.fp4 import fp4_storage
from warpbus.formats.fp8 import fp8_storage
from warpbus.formats.gguf.view import directory_of
from warpbus.formats.kv_cache import read_kv_cache_scheme
from warpbus.formats.trellis import detect as is_trellis
from warpbus.models.config import ModelConfig
from warpbus.models.families import BY_NAME
from warpbus.models.fp8_blocks import TARGET as FP8_BLOCK
from warpbus.models.gguf.export import TARGETS
from warpbus.models.layer_spec import MLPSpec
from warpbus.models.loading import quantized_parameters, read_config
from warpbus.models.padding import padded_size
from warpbus.models.parameter_source import tensor_map
from warpbus.qtensor import Scheme

PLAIN = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""The conversion targets that are not quantized formats: all matrices are dequantized to the dtype."""

_SMALLEST_SHARD, _LARGEST_SHARD = 2**24, 4 * 2**30


@dataclass(frozen=True)
class ConvertedMatrix:
    """A matrix of the file that is converted to another format, padded to another shape, or both.

    Attributes:
        prefix: its tensor's name without `.weight`.
        scheme: None if it is not quantized.
        shape: in the source.
        target: the shape in the output.
        parts: how many matrices are stacked along the rows; each is padded separately.
    """

    prefix: str
    scheme: Scheme | None
    shape: tuple[int, int]
    target: tuple[int, int]
    parts: int


@dataclass(frozen=True)
class ConversionPlan:
    """A conversion whose arguments and headers were checked.

    Attributes:
        checkpoint: the model.
        config: of its decoder.
        source: the quantized format of the model; None for one that is dequantized while it is read (FP8, GGUF).
        dequantized: the number of such matrices.
        target: the quantized format of the output; None if the matrices are dequantized.
        dtype: of all weights of the output, if `target` is None.
        ffn: the FFN size of the source and of the output.
        matrices: the matrices that are quantized, padded, or both.
        bytes_before: of all tensors of the model's files.
        stored_config: the `config.json` of the model.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    source: Format | None
    dequantized: int
    target: WritableFormat | None
    dtype: torch.dtype | None
    ffn: tuple[int, int]
    matrices: tuple[ConvertedMatrix, ...]
    bytes_before: int
    stored_config: Mapping[str, Any]

    @property
    def source_name(self) -> str:
        """The format of the model."""
        if self.checkpoint.from_gguf:
            return "gguf"
        return _float_name(self.stored_config) if self.source is None else self.source.name

    @property
    def schemes(self) -> dict[str, Scheme]:
        """The schemes of the quantized matrices, by prefix."""
        return {matrix.prefix: matrix.scheme for matrix in self.matrices if matrix.scheme is not None}

    @property
    def copied(self) -> list[str]:
        """The tensors to copy: all but those of `matrices`, and zero biases that the decoder does not have."""
        known = {name for names in tensor_map(self.config).values() for name in names}
        biases = {f"{prefix}.bias" for prefix in self.schemes} - known
        taken = biases | {
            name for matrix in self.matrices for name in (f"{matrix.prefix}.weight", *self._stored(matrix.prefix))
        }
        return [name for name in self.checkpoint.names() if name not in taken]

    def _stored(self, prefix: str) -> list[str]:
        return [] if self.source is None else self.source.stored(self.checkpoint, prefix)

    @property
    def expected_bytes(self) -> int:
        """Bytes that will be written, to a few kilobytes."""
        matrices = 0.0
        for matrix in self.matrices:
            scheme = matrix.scheme if self.dtype is None else None
            bits = 16.0 if scheme is None else scheme.bits_per_weight(matrix.target[1])
            matrices += matrix.target[0] * matrix.target[1] * bits / 8
        return int(matrices) + sum(self.checkpoint.nbytes(name) for name in self.copied)

    @property
    def shard_bytes(self) -> int:
        """The size of a shard: about that of the largest tensor, since a shard is buffered in memory."""
        largest = max(self.checkpoint.nbytes(name) for name in self.checkpoint.names())
        return min(max(largest, _SMALLEST_SHARD), _LARGEST_SHARD)

    def written_config(self) -> dict[str, Any]:
        """The config.json of the output."""
        config = dict(self.checkpoint.config)
        for key in ("quantization_config", "quantization_bit", "quantization_embeddings"):
            config.pop(key, None)
        before, after = self.ffn
        if before != after:
            config[BY_NAME[self.config.family].ffn_key] = after
        if self.target is None:
            for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]:
                config[key] = short_name(self.dtype)
            return config
        return config | {"quantization_config": self.target.quantization_config(self.schemes, self._unquantized())}

    def _unquantized(self) -> list[str]:
        """The matrices that are not quantized, by their names in the checkpoint."""
        tensors = tensor_map(replace(self.config, tie_embeddings=False))
        matrices = ["head", *(f"layers.{index}.{matrix.name}" for index, matrix in self.config.matrices)]
        names = [name.removesuffix(".weight") for matrix in matrices for name in tensors[f"{matrix}.weight"]]
        return [name for name in names if name not in self.schemes]


def refuse_kv_scales(model: Path, to: str) -> None:
    """Raises UsageError if a model has scales of its KV cache, which only the format it has can hold."""
    if model.is_dir() and read_kv_cache_scheme(Checkpoint(model, weights=False).config) is not None:
        raise UsageError(
            f"{model}: has scales of a KV cache, which --to {to} has no place for: quantize the original to that format"
        )


def prepare(model: Path, output: Path, to: str, pad_ffn: int | str) -> ConversionPlan:
    """Check the arguments and the headers of the model; arguments and errors as `convert`."""
    if to not in PLAIN and to not in WRITABLE:
        raise UsageError(f"--to {to}: expected one of {', '.join((*WRITABLE, *PLAIN, FP8_BLOCK, *TARGETS))}")
    checkpoint = Checkpoint(directory_of(model))
    if output.resolve() == model.resolve():
        raise UsageError(f"{output}: the output is the model itself: name another directory")
    source, bytes_before, in_fp8 = format_of(checkpoint.config), checkpoint.total_bytes, 0
    stored_config = checkpoint.config
    if source is None:
        in_fp8 = len(dequantized_matrices(checkpoint))
        checkpoint = _opened_dequantized(checkpoint, to)
    else:
        checkpoint = dequantized_reordered(checkpoint, source, PLAIN.get(to, torch.float16))
        if to not in PLAIN and checkpoint.has(ReorderedMatrix):
            raise CheckpointError(
                f"{model}: has columns reordered by activation, which --to {to} has no form for: convert the model to "
                "float16 or bfloat16"
            )
    config = read_config(checkpoint, mtp="stored")
    schemes = quantized_parameters(checkpoint, config)
    if source is not None and not schemes and not checkpoint.has(ReorderedMatrix):
        raise CheckpointError(
            f"{model}: config.json declares quantization {source.name}, but no matrix is quantized: check that "
            "config.json belongs to these weights"
        )
    if "embedding.weight" in schemes and to not in PLAIN and not format_named(to).has_embedding:
        raise UsageError(
            f"{model}: its embedding is quantized, which --to {to} has no place for: quantize the original to that "
            "format"
        )
    dense = [layer.mlp for layer in config.layers if isinstance(layer.mlp, MLPSpec)]
    sizes = {mlp.ffn_size for mlp in dense}
    before = max(sizes, default=0)
    if config.has_experts and pad_ffn != "none":
        raise UsageError(f"--pad-ffn {pad_ffn}: {model} is a mixture of experts, which are not padded: drop it")
    ffn = before if config.has_experts else padded_size(before, pad_ffn, _widest_group(config, schemes))
    if ffn != before and len(sizes) > 1:
        raise UsageError(f"--pad-ffn {pad_ffn}: the layers of {model} have MLPs of different sizes: drop it")
    if ffn != before and any(mlp.bias for mlp in dense):
        raise UsageError(f"--pad-ffn {pad_ffn}: the MLP of {model} has biases, which cannot be padded: drop it")
    if source is not None and source.name == to and ffn == before and not checkpoint.from_gguf:
        raise UsageError(f"{model}: is already in format {to}: there is nothing to convert")
    return ConversionPlan(
        checkpoint=checkpoint,
        config=config,
        source=source,
        dequantized=in_fp8,
        target=None if to in PLAIN else format_named(to),
        dtype=PLAIN.get(to),
        ffn=(before, ffn),
        matrices=tuple(_matrices(config, schemes, None if ffn == before else ffn)),
        bytes_before=bytes_before,
        stored_config=stored_config,
    )


def _opened_dequantized(checkpoint: Checkpoint, to: str) -> Checkpoint:
    """A checkpoint of FP8, FP4, trellises or GGUF, its matrices dequantized to `to`.

    Raises:
        UsageError: it is none of these, or `to` is no floating-point dtype.
    """
    if checkpoint.from_gguf and to in PLAIN:
        return checkpoint
    config = checkpoint.config
    if fp8_storage(config) is None and fp4_storage(config) is None and not is_trellis(config):
        raise UsageError(
            f"{checkpoint.directory} is not quantized, so there is nothing to convert: use warpbus quantize"
        )
    if to not in PLAIN:
        raise UsageError(
            f"--to {to}: the matrices of {checkpoint.directory}, in {_float_name(checkpoint.config).upper()}, have no "
            "such form: convert to float16 or bfloat16, "
            "or use warpbus quantize"
        )
    return dequantized(checkpoint, PLAIN[to])


def _float_name(config: Mapping[str, Any]) -> str:
    """The name of the format of a model that is not loaded quantized."""
    if is_trellis(config):
        return "trellis"
    storage = fp4_storage(config)
    return "fp8" if storage is None else storage.element


def _widest_group(config: ModelConfig, schemes: Mapping[str, Scheme]) -> int | None:
    """The largest group size among matrices whose columns are the FFN's; None if none of them has groups."""
    narrowing = (
        schemes.get(f"layers.{index}.{matrix.name}.weight")
        for index, matrix in config.matrices
        if matrix.columns.name == "ffn"
    )
    return max((each.group_size for each in narrowing if each is not None and each.group_size), default=None)


def _matrices(config: ModelConfig, schemes: Mapping[str, Scheme], ffn: int | None) -> list[ConvertedMatrix]:
    """The matrices that are quantized, or that change their shape with an FFN of size `ffn`."""
    tensors, found = tensor_map(config), []
    ends = ("embedding.weight", "head.weight")
    for parameter in schemes:
        if parameter not in ends and config.matrix(parameter) is None:
            raise SchemeError(f"{tensors[parameter][0]}: only matrices may be quantized")
    wide = config if ffn is None else config.resized(ffn_size=ffn)
    shape = (config.vocab_size, config.hidden_size)
    for parameter in filter(schemes.__contains__, ends):
        prefix = tensors[parameter][0].removesuffix(".weight")
        found.append(ConvertedMatrix(prefix, schemes[parameter], shape, shape, parts=1))
    for (index, before), (_, after) in zip(config.matrices, wide.matrices, strict=True):
        parameter = f"layers.{index}.{before.name}.weight"
        if parameter not in schemes and before.shape == after.shape:
            continue
        names = tensors[parameter]
        shares = zip(names, before.part_rows(len(names)), after.part_rows(len(names)), strict=True)
        for name, rows, new_rows in shares:
            found.append(
                ConvertedMatrix(
                    prefix=name.removesuffix(".weight"),
                    scheme=schemes.get(parameter),
                    shape=(rows, before.columns.length),
                    target=(new_rows, after.columns.length),
                    parts=len(before.rows) // len(names) if before.shape != after.shape else 1,
                )
            )
    return found

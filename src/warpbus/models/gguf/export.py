"""`export_gguf` writes a model as a GGUF file, which llama.cpp loads, with one matrix in memory at a time.

With the target `gguf`, codes stay as they are wherever a block type has them:

| scheme | block type | |
|---|---|---|
| w2a16, w3a16, w4a16 | Q4_0 | exact: 2 and 3 bits take the middle codes of 4 |
| w5a16 | Q5_0 | exact |
| w6a16, w8a16, w8a8-int8 | Q8_0 | exact; activations are not rounded to 8 bits |
| w2a16 to w4a16, -asym | Q4_1 | the minimum, -zero * scale, is rounded to float16 |
| w5a16, -asym | Q5_1 | the same |
| others | Q8_0 | dequantized and rounded again |

Groups become groups of 32, to which scales are repeated, and scales become float16. Unquantized matrices keep their
dtype, vectors become F32. A target `gguf-q4_k` dequantizes all matrices and rounds them to that type.

llama.cpp expects a square output projection of attention in the architectures chatglm and qwen2. Where the heads are
wider than the residual stream, this is widened with zeros to their width: the norms' weights and eps are scaled so that
the model computes the same function.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.errors import StorageError, TensorError, UsageError
from warpbus.formats import Checkpoint
from warpbus.formats.dequantizing import dequantized, dequantized_reordered
from warpbus.formats.files import check_files, check_kept, check_space, replace_file
from warpbus.formats.format import Format, format_of
from warpbus.formats.gguf.architectures import ROPE_FACTORS, llama3_factors, permuted
from warpbus.formats.gguf.blocks import GROUP, PLAIN, TYPES, BlockType
from warpbus.formats.gguf.encoding import FALLBACK, assemble, encode
from warpbus.formats.gguf.file import SUFFIX, PlannedTensor, Value, read_header, write_file
from warpbus.formats.gguf.view import directory_of
from warpbus.models.config import ModelConfig
from warpbus.models.gguf.vocabulary import vocabulary_metadata
from warpbus.models.layer_spec import AttentionSpec, MatrixSpec
from warpbus.models.loading import quantized_parameters, read_config
from warpbus.models.parameter_source import tensor_map
from warpbus.qtensor import QTensor, Scheme

TARGETS = ("gguf", *(f"gguf-{name.lower()}" for name in TYPES))
"""The values of `convert --to`."""

ARCHITECTURES = {
    "glm": "chatglm",
    "chatglm2": "chatglm",
    "glm4": "glm4",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
"""The architecture of a GGUF file by the family of the model."""

_TOP = {
    "embedding.weight": "token_embd.weight",
    "final_norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
}
_LAYER: dict[str, tuple[str, ...]] = {
    "attention_norm": ("attn_norm",),
    "attention.q_norm": ("attn_q_norm",),
    "attention.k_norm": ("attn_k_norm",),
    "attention.o": ("attn_output",),
    "attention_output_norm": ("post_attention_norm",),
    "mlp_norm": ("ffn_norm",),
    "mlp.down": ("ffn_down",),
    "mlp_output_norm": ("post_ffw_norm",),
}
_BY_PARTS = {
    ("attention.qkv", 1): ("attn_qkv",),
    ("attention.qkv", 3): ("attn_q", "attn_k", "attn_v"),
    ("mlp.gate_up", 1): ("ffn_up",),
    ("mlp.gate_up", 2): ("ffn_gate", "ffn_up"),
}
_ENDS = ("token_embd.weight", "output.weight")
_SQUARE = ("chatglm", "qwen2")

_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9}
_FILE_TYPES |= {"Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "BF16": 32}
_QUANTIZATION_VERSION = 2
_WEIGHTS_AT_ONCE = 2**22
_LARGEST_FLOAT16 = 65504.0  # the scales of blocks are float16
_SMALL = 1e-3  # the scales of blocks of larger weights are normal numbers of float16, or nearly
_MOST_LOST = 0.25  # of a tensor's sum of squares, by rounding: 4 bits lose less than 0.01 of normal weights
_MIDDLE = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}

Progress = Callable[[str, int, int], None]
"""See `convert`."""


@dataclass(frozen=True)
class GGUFExport:
    """The result of writing a GGUF file.

    Attributes:
        target: the requested type.
        kinds: number of matrices by block type.
        exact: quantized matrices whose codes and scales did not change.
        minima_rounded: quantized matrices whose codes did not change, but whose minima were rounded to float16.
        rounded_again: matrices that were rounded to another grid than the model's.
        scales_rounded: scales that float16 does not represent.
    """

    model: str
    output: str
    target: str
    kinds: dict[str, int]
    exact: int
    minima_rounded: int
    rounded_again: int
    scales_rounded: int
    bytes_before: int
    bytes_after: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        """A summary for the terminal, one line per fact."""
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(self.kinds.items()))
        lines = [f"{self.output}: {kinds}, {self.bytes_before / 1e6:,.1f} MB to {self.bytes_after / 1e6:,.1f} MB"]
        for count, what in (
            (self.exact, "matrices with the codes and scales of the model"),
            (self.minima_rounded, "matrices with the codes of the model, and minima rounded to float16"),
            (self.rounded_again, "matrices rounded to the file's types, see `warpbus eval` for the effect"),
            (self.scales_rounded, "scales rounded to float16"),
        ):
            if count:
                lines.append(f"{what}: {count:,}")
        return "\n".join([*lines, "read back bit for bit"])


@dataclass(frozen=True)
class _ExportedTensor:
    """A matrix or vector of the model that becomes a tensor of the file.

    Attributes:
        prefix: of its tensors in the checkpoint, without `.weight` or `.bias`.
        name: of the tensor, if it is not quantized.
        scheme: None if it is not quantized.
        shape: in the checkpoint.
        target: the shape in the file: `shape`, or more rows and columns, of zeros.
        kind: of the tensor in the file.
        factor: of the numbers of a norm.
        head_rows: rows of a head if they are to be permuted, otherwise 0.
    """

    prefix: str
    name: str
    scheme: Scheme | None
    shape: tuple[int, ...]
    target: tuple[int, ...]
    kind: BlockType
    head_rows: int
    factor: float

    @property
    def keeps_codes(self) -> bool:
        """Whether the codes of a quantized matrix stay as they are."""
        return self.scheme is not None and block_type(self.scheme, self.shape[1]) == (self.kind.name, True)

    def arranged(self, tensor: Tensor, columns: int | None = None) -> Tensor:
        """A tensor of the checkpoint in the file's row order and shape; a matrix gets `columns` columns if given."""
        if self.head_rows:
            tensor = permuted(tensor, self.head_rows, to_file=True)
        wanted = (self.target[0], columns) if columns is not None else self.target
        if wanted == tuple(tensor.shape):
            return tensor
        missing = [after - before for after, before in zip(wanted, tensor.shape, strict=True)]
        return F.pad(tensor, [size for each in reversed(missing) for size in (0, each)])


def export_gguf(
    model: str | Path, output: str | Path, *, to: str, overwrite: bool = False, progress: Progress | None = None
) -> GGUFExport:
    """Write a model as a GGUF file.

    Args:
        model: a model directory, quantized in a format of `warpbus.formats` or not.
        output: the file, with the suffix `.gguf`.
        to: one of `TARGETS`.
        overwrite: replace a file that is at `output`.
        progress: see `convert`.

    Raises:
        UsageError: an argument is wrong, or GGUF has no form for the model.
        CheckpointError: the model cannot be read or is not complete.
        TensorError: a tensor is missing, has the wrong shape or type, or values that overflow float16.
        StorageError: the output exists, cannot be written, or differs from what was written when it is read back.
    """
    started, output = time.perf_counter(), Path(output)
    if output.suffix != SUFFIX or output.is_dir():
        raise UsageError(f"{output}: --to {to} writes one file: give a name that ends in {SUFFIX}")
    if output.exists() and not overwrite:
        raise StorageError(f"{output}: exists: name another file, or pass --overwrite")
    check_kept(output, Path(model))
    check_files(output)
    job = _Export.prepare(Path(model), to)
    digests = job.write(output, progress or (lambda what, done, total: None))
    header = read_header(output)
    assert digests.keys() == header.tensors.keys()
    schemes = [source for source in job.sources.values() if source.scheme is not None]
    kept = [source for source in schemes if source.keeps_codes]
    matrices = [source for source in job.sources.values() if len(source.shape) > 1]
    kinds = [source.kind.name for source in matrices]
    return GGUFExport(
        model=str(model),
        output=str(output),
        target=to,
        kinds={name: kinds.count(name) for name in dict.fromkeys(kinds)},
        exact=sum(source.scheme is not None and source.scheme.symmetric for source in kept),
        minima_rounded=sum(source.scheme is not None and not source.scheme.symmetric for source in kept),
        rounded_again=sum(
            source.kind.dtype is None and (source.scheme is None or not source.keeps_codes) for source in matrices
        ),
        scales_rounded=job.scales_rounded[0],
        bytes_before=job.bytes_before,
        bytes_after=output.stat().st_size,
        seconds=time.perf_counter() - started,
    )


def block_type(scheme: Scheme, columns: int) -> tuple[str, bool]:
    """The block type of a quantized matrix, and whether its codes stay as they are; see the module's docstring."""
    if columns % GROUP:
        return "F16", False
    if not scheme.has_codes or (not scheme.symmetric and scheme.bits > 5):
        return "Q8_0", False
    if scheme.bits > 5:
        return "Q8_0", True
    family = "Q4" if scheme.bits <= 4 else "Q5"
    return f"{family}_{0 if scheme.symmetric else 1}", True


@dataclass(frozen=True)
class _Export:
    """A model whose headers were checked.

    Attributes:
        format: of the quantized matrices; None if there are none.
        sources: by the name of the tensor in the file.
        extra: tensors of the file that are not the model's.
        scales_rounded: one number, which `write` raises.
    """

    checkpoint: Checkpoint
    format: Format | None
    metadata: Mapping[str, Value]
    sources: Mapping[str, _ExportedTensor]
    extra: Mapping[str, Tensor]
    bytes_before: int
    scales_rounded: list[int]

    @classmethod
    def prepare(cls, model: Path, to: str) -> "_Export":
        model = directory_of(model)
        checkpoint = Checkpoint(model)
        before = checkpoint.total_bytes
        format = format_of(checkpoint.config)
        if format is None:
            checkpoint = dequantized(checkpoint)
        else:
            checkpoint = dequantized_reordered(checkpoint, format, torch.float16)
        config = read_config(checkpoint)
        architecture = ARCHITECTURES.get(config.family)
        if architecture is None or not isinstance(config.attention, AttentionSpec):
            raise UsageError(
                f"{model}: --to {to}: models of the family {config.family} are not written as GGUF, only those of "
                f"{', '.join(ARCHITECTURES)}: convert to another format"
            )
        asked = to.removeprefix("gguf").removeprefix("-").upper()
        width = _hidden_size(config, architecture, model)
        sources = _sources(checkpoint, config, quantized_parameters(checkpoint, config), TYPES.get(asked), width)
        metadata = _metadata(config, architecture, model.resolve().name, sources, width)
        metadata |= vocabulary_metadata(model, architecture, config.vocab_size, config.stop_ids)
        return cls(checkpoint, format, metadata, sources, _rope_factors(config), before, [0])

    def write(self, output: Path, progress: Progress) -> dict[str, bytes]:
        """Write the file and read it back before it gets its name; returns the digests of the tensors."""
        digests: dict[str, bytes] = {}
        planned = {
            name: PlannedTensor(tuple(tensor.shape), TYPES["F32"], partial(_itself, tensor))
            for name, tensor in self.extra.items()
        }
        for name, source in self.sources.items():
            planned[name] = PlannedTensor(source.target, source.kind, partial(self.data, source))

        def written(name: str, data: bytes | memoryview) -> None:
            digests[name] = hashlib.sha256(data).digest()
            progress("converting", len(digests), len(planned))

        def write(partial: Path) -> None:
            check_space(output, sum(tensor.nbytes for tensor in planned.values()))
            write_file(partial, self.metadata, planned, written)
            _compare(partial, output, digests)

        replace_file(output, write)
        return digests

    def data(self, source: _ExportedTensor) -> Tensor:
        """The stored form of a tensor in the file, as any tensor of these bytes."""
        if source.scheme is None:
            return _in_type(source, self.checkpoint.tensor(source.name, expected=source.shape))
        assert self.format is not None
        weight = self.format.from_tensors(self.checkpoint, source.prefix, source.scheme)
        if weight.shape != source.shape:
            raise TensorError(f"{source.prefix}: expected shape {list(source.shape)}, found {list(weight.shape)}")
        if not source.keeps_codes:
            return _in_type(source, weight.dequantize(torch.float32))
        return self.recoded(source, weight)

    def recoded(self, source: _ExportedTensor, weight: QTensor) -> Tensor:
        """The blocks of a quantized matrix whose codes stay as they are."""
        scales = weight.scales.to(torch.float16)
        if bool((~scales.isfinite() | ((scales == 0) & (weight.scales != 0))).any()):
            raise TensorError(f"{source.prefix}: has a scale that float16 cannot represent: convert to gguf-f32")
        self.scales_rounded[0] += int((scales.double() != weight.scales.double()).sum())
        repeated, columns = source.shape[1] // GROUP // scales.shape[1], source.target[1] // GROUP
        codes = source.arranged(weight.codes()).reshape(-1, GROUP)
        steps = source.arranged(scales.float().repeat_interleave(repeated, 1), columns).flatten()
        if weight.zeros is not None:
            zeros = source.arranged(weight.zeros.repeat_interleave(repeated, 1), columns)
            return assemble(source.kind.name, codes, steps, -zeros.flatten().float() * steps)
        shift = _MIDDLE[source.kind.name] - weight.scheme.middle_code
        return assemble(source.kind.name, codes + shift, steps)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _compare(partial: Path, output: Path, digests: Mapping[str, bytes]) -> None:
    """Read everything back; raises StorageError if a tensor differs from what was written."""
    for name, tensor in read_header(partial).tensors.items():
        digest, step = hashlib.sha256(), max(1, _WEIGHTS_AT_ONCE // tensor.row_bytes)
        for start in range(0, tensor.rows, step):
            digest.update(tensor.read_rows(start, min(start + step, tensor.rows)).numpy().data)
        if digest.digest() != digests[name]:
            raise StorageError(
                f"{output}: {name}: the data read back differs from what was written; the output was discarded: check "
                "the disk, and try again"
            )


def _in_type(source: _ExportedTensor, plain: Tensor) -> Tensor:
    """An unquantized tensor in the type of the file."""
    plain = source.arranged(plain)
    if source.kind.dtype is None:
        return _in_blocks(source, plain)
    scaled = plain if source.factor == 1.0 else plain.double() * source.factor
    found = _held(source, scaled.to(source.kind.dtype)).contiguous()
    if _may_underflow(plain):
        _check_energy(source, scaled, found)
    return found


def _in_blocks(source: _ExportedTensor, plain: Tensor) -> Tensor:
    """A matrix, rounded to blocks."""
    rows, columns = source.target
    blocks = torch.empty(rows, columns // source.kind.size * source.kind.nbytes, dtype=torch.uint8)
    step = max(1, _WEIGHTS_AT_ONCE // columns)
    for start in range(0, rows, step):
        band = _held(source, plain[start : start + step].float(), _LARGEST_FLOAT16)
        blocks[start : start + step] = encode(source.kind.name, band.view(-1, source.kind.size)).view(len(band), -1)
    if _may_underflow(plain):
        assert source.kind.decode is not None
        _check_energy(source, plain, source.kind.decode(blocks.view(-1, source.kind.nbytes)).view_as(plain))
    return blocks


def _may_underflow(plain: Tensor) -> bool:
    """Whether numbers, or scales of blocks, may be so small that float16 holds few digits of them, or zero."""
    return bool(plain.numel() and 0 < float(plain.abs().max()) < _SMALL)


def _check_energy(source: _ExportedTensor, before: Tensor, after: Tensor) -> None:
    """Refuse a tensor of which rounding leaves little."""
    if (after.double() - before.double()).square().sum() > _MOST_LOST * before.double().square().sum():
        raise TensorError(
            f"{source.prefix}: its values, {float(before.abs().max()):.1e} at most, are too small for "
            f"{source.kind.name}: convert to gguf-f32"
        )


def _held(source: _ExportedTensor, values: Tensor, largest: float = float("inf")) -> Tensor:
    """The values, if all are numbers and none is larger than the type of the file can hold."""
    if not bool(values.isfinite().all()) or bool((values.abs() > largest).any()):
        raise TensorError(
            f"{source.prefix}: has NaN, or values that overflow {source.kind.name}: use an undamaged checkpoint, or "
            "convert to gguf-f32"
        )
    return values


def _hidden_size(config: ModelConfig, architecture: str, model: Path) -> int:
    """The size of the residual stream in the file; see the module's docstring."""
    width = config.grouped_attention.width
    if architecture not in _SQUARE or width == config.hidden_size:
        return config.hidden_size
    if width < config.hidden_size:
        raise UsageError(
            f"{model}: its heads have {width} features in all, fewer than the residual stream of {config.hidden_size}: "
            f"llama.cpp does not load such a model of the architecture {architecture}: convert to another format"
        )
    return width


def _sources(
    checkpoint: Checkpoint,
    config: ModelConfig,
    schemes: Mapping[str, Scheme],
    asked: BlockType | None,
    hidden_size: int,
) -> dict[str, _ExportedTensor]:
    """The tensors of the file by name.

    Args:
        asked: the type of all matrices; None to keep what the model has.
        hidden_size: of the file.
    """
    found: dict[str, _ExportedTensor] = {}
    for parameter, names in tensor_map(config).items():
        shape = config.parameters[parameter]
        matrix = config.matrix(parameter)
        rows = [shape[0]] if matrix is None else matrix.part_rows(len(names))
        for name, target, count in zip(names, _file_names(parameter, len(names)), rows, strict=True):
            scheme = schemes.get(parameter)
            own = (count, *shape[1:])
            wide = own
            if hidden_size != config.hidden_size:
                wide = _widened(own, matrix, parameter, hidden_size)
            if len(own) == 1:
                kind = TYPES["F32"]
            elif asked is not None:
                kind = _fitting(_end_type(asked) if target in _ENDS else asked, wide[1])
            elif scheme is not None:
                kind = TYPES[block_type(scheme, own[1])[0]]
            else:
                kind = PLAIN.get(checkpoint.dtype(name), TYPES["F32"])
            permutes = config.family == "llama" and target.split(".")[-2] in ("attn_q", "attn_k")
            head = config.grouped_attention.head_dim if permutes else 0
            factor = math.sqrt(config.hidden_size / hidden_size) if "norm" in parameter and wide != own else 1.0
            found[target] = _ExportedTensor(name.removesuffix(".weight"), name, scheme, own, wide, kind, head, factor)
    return found


def _widened(shape: tuple[int, ...], matrix: MatrixSpec | None, parameter: str, hidden_size: int) -> tuple[int, ...]:
    """The shape of a parameter with a wider residual stream."""
    if matrix is None:  # a norm, the embedding or the head
        return shape if "attention." in parameter else (*shape[:-1], hidden_size)
    rows = hidden_size if matrix.rows[0].name == "hidden" else shape[0]
    return (rows, hidden_size if matrix.columns.name == "hidden" else shape[1])[: len(shape)]


def _file_names(parameter: str, parts: int) -> tuple[str, ...]:
    if parameter in _TOP:
        return (_TOP[parameter],)
    _, index, name = parameter.split(".", 2)
    stem, _, leaf = name.rpartition(".")
    names = _LAYER.get(stem) or _BY_PARTS.get((stem, parts))
    if names is None:
        raise UsageError(f"{parameter}: GGUF has no tensor for it in this architecture: convert to another format")
    return tuple(f"blk.{index}.{each}.{leaf}" for each in names)


def _end_type(asked: BlockType) -> BlockType:
    """The type of embedding and head: they get 6 bits where the layers have fewer."""
    return TYPES["Q6_K"] if asked.name.startswith(("Q4", "Q5")) else asked


def _fitting(kind: BlockType, columns: int) -> BlockType:
    """The type, or the one that takes its place where rows are no multiple of its blocks."""
    if columns % kind.size and kind.name in FALLBACK:
        kind = TYPES[FALLBACK[kind.name]]
    return TYPES["F16"] if columns % kind.size else kind


def _metadata(
    config: ModelConfig, architecture: str, name: str, sources: Mapping[str, _ExportedTensor], hidden_size: int
) -> dict[str, Value]:
    attention, rope = config.grouped_attention, config.rope
    kinds = [source.kind.name for target, source in sources.items() if len(source.shape) > 1 and target not in _ENDS]
    values: dict[str, Value] = {
        "block_count": config.num_layers,
        "context_length": config.max_context,
        "embedding_length": hidden_size,
        "feed_forward_length": config.dense_mlp.ffn_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": attention.num_kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm.eps * config.hidden_size / hidden_size,
        "rope.dimension_count": rope.rotary_dim,
        "rope.freq_base": rope.theta,
    }
    if rope.position_scale != 1.0:
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.position_scale}
        values["context_length"] = math.ceil(config.max_context / rope.position_scale)
    return {
        "general.architecture": architecture,
        "general.name": name,
        "general.file_type": _FILE_TYPES[max(set(kinds), key=kinds.count)],
        "general.quantization_version": _QUANTIZATION_VERSION,
        **{f"{architecture}.{key}": value for key, value in values.items()},
    }


def _rope_factors(config: ModelConfig) -> dict[str, Tensor]:
    scaling = config.rope.scaling
    if scaling is None:
        return {}
    limits = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context
    return {ROPE_FACTORS: llama3_factors(config.rope.theta, config.rope.rotary_dim, scaling.factor, *limits)}

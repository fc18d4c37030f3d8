"""The plan of a quantization, and every reason to refuse it, found before the first weight is read."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from warpbus.errors import CheckpointError, SchemeError, TensorError, UsageError
from warpbus.formats import Checkpoint, WritableFormat, format_named
from warpbus.formats.companions import find_companions
from warpbus.formats.dequantizing import dequantized
from warpbus.formats.files import check_kept
from warpbus.formats.kv_cache import KVCacheScheme
from warpbus.models import ModelConfig, MoESpec, TensorMap, read_config, tensor_map
from warpbus.models.families import BY_NAME
from warpbus.models.layer_spec import AttentionSpec
from warpbus.qtensor import Scheme, Schemes

REPORT_NAME = "warpbus-report.json"

_END_FORMAT = "compressed-tensors"  # the only format with quantized heads and embeddings, and scales of a KV cache

_EMBEDDING_BITS = 8  # with fewer, the embedding alone changes more than layers of 8 bits: see docs/quantization.md

_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Matrix:
    """A linear layer of the decoder.

    Attributes:
        layer: the number of its decoder layer.
        linear: its name there, `MatrixSpec.name`.
        sources: the checkpoint's tensors that are stacked along rows to make it.
        rows: the rows of each of them.
        columns: its input features.
        dtype: of its tensors in the checkpoint.
        scheme: its scheme. Where the group size does not divide the columns, it is a smaller one.
        experts: the routed experts of its layer if it belongs to one, which all have such a matrix; otherwise 1.
    """

    layer: int
    linear: str
    sources: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    dtype: torch.dtype
    scheme: Scheme
    experts: int = 1

    @property
    def name(self) -> str:
        return f"layers.{self.layer}.{self.linear}"


@dataclass(frozen=True)
class EndMatrix:
    """The head or the embedding, where it is quantized.

    Attributes:
        name: of its tensor in the new checkpoint, unquantized: `lm_head.weight`.
        source: the checkpoint's tensor that it is made of: the embedding where the model has no head of its own.
        shape: rows and columns.
        scheme: its scheme. Where the group size does not divide the columns, it is a smaller one.
    """

    name: str
    source: str
    shape: tuple[int, int]
    scheme: Scheme

    @property
    def is_untied(self) -> bool:
        """Whether this is a head, and the original uses its embedding as the head."""
        return self.name != self.source


@dataclass(frozen=True)
class Plan:
    """A model that can be quantized.

    Attributes:
        checkpoint: the source; if it is stored in FP8, dequantized.
        config: of its decoder.
        tensors: of each parameter of the decoder, the names of the tensors that make it.
        schemes: the schemes of its matrices.
        format: the format in which they are written.
        matrices: what is quantized of the layers, in the order of the computation.
        head: the head if it is quantized as a matrix of its own, else None.
        embedding: the embedding if it is quantized, else None. A head that is tied to it is the same matrix.
        kv_cache: what scales of the KV cache are calibrated for; None for none.
        ends: the names of the tensors outside of the layers, which stay as they are.
        kept: of each layer, the names of its tensors that are not quantized.
        companions: the files that come along, by their path in the model.
        unquantized: the linear layers that stay as they are, by the names that the checkpoint has for them.
        scale_dtype: of the quantized matrices' scales: that of the weights, or what the format asks for.
        bytes_quantized: of the quantized matrices of the layers.
        bytes_after: of all files that are going to be written, to a few kilobytes.
        largest_unit: bytes of the largest of what is held at a time: a layer, the embedding, or the head.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    tensors: TensorMap
    schemes: Schemes
    format: WritableFormat
    matrices: tuple[Matrix, ...]
    head: EndMatrix | None
    embedding: EndMatrix | None
    kv_cache: KVCacheScheme | None
    ends: tuple[str, ...]
    kept: tuple[tuple[str, ...], ...]
    companions: Mapping[str, Path]
    unquantized: tuple[str, ...]
    scale_dtype: torch.dtype
    bytes_quantized: int
    bytes_after: int
    largest_unit: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights in the checkpoint."""
        return self.matrices[0].dtype

    @property
    def quantized_ends(self) -> Mapping[str, EndMatrix]:
        """What is quantized outside of the layers: "embedding" and "head"."""
        found = {"embedding": self.embedding, "head": self.head}
        return {name: end for name, end in found.items() if end is not None}

    @property
    def shapes(self) -> tuple[Matrix, ...]:
        """One matrix of each shape, scheme and number of experts."""
        keyed = {(matrix.rows, matrix.columns, matrix.scheme, matrix.experts): matrix for matrix in self.matrices}
        return tuple(keyed.values())

    def layer(self, index: int) -> dict[str, Matrix]:
        """The matrices of a decoder layer, by their names in it."""
        return {matrix.linear: matrix for matrix in self.matrices if matrix.layer == index}


def prepare(
    model: Path,
    output: Path | None,
    schemes: Scheme | Schemes,
    format: str = "compressed-tensors",
    *,
    head: Scheme | None = None,
    embedding: Scheme | None = None,
    kv_cache: KVCacheScheme | None = None,
) -> Plan:
    """Look at everything that does not need the weights themselves.

    Args:
        model: the directory of the original.
        output: where the quantized model is going to be; `None` if nothing is going to be written.
        schemes: of all matrices, or of each.
        format: the name of the format to write, see `formats.format_named`.
        head: of the head; None to keep it, or to leave it tied to the embedding.
        embedding: of the embedding; None to keep it.
        kv_cache: of the KV cache; None for no scales.

    Raises:
        CheckpointError: if the source cannot be read or is quantized already, except to FP8.
        TensorError: if a matrix is missing, or has not the shape that config.json gives it, or no floating dtype.
        SchemeError: if the group size does not divide a matrix' columns, the format cannot hold it, or parts of one
            fused matrix have different schemes; the message names its tensor.
        UsageError: if writing the output would delete the source, or the model's KV cache cannot have such scales.
    """
    checkpoint = dequantized(Checkpoint(model))
    if output is not None:
        check_kept(output, model)
    _check_unquantized(checkpoint, model)
    config = read_config(checkpoint, mtp="stored")
    if kv_cache is not None and not isinstance(config.attention, AttentionSpec):
        raise UsageError(f"--kv-cache {kv_cache}: {model} caches latents of all heads together: leave it out")
    schemes = Schemes(schemes) if isinstance(schemes, Scheme) else schemes
    chosen, tensors = format_named(format), tensor_map(config)
    matrices = tuple(_matrices(checkpoint, config, tensors, schemes))
    _check_schemes(matrices, chosen)
    rounded_head = None if head is None else _end("head", checkpoint, config, head, chosen)
    rounded_embedding = None if embedding is None else _end("embedding", checkpoint, config, embedding, chosen)
    rounded = [end for end in (rounded_embedding, rounded_head) if end is not None]
    kept, ends = _not_quantized(checkpoint, config, tensors, matrices)
    replaced = {end.name for end in rounded}
    if rounded_embedding is not None and config.tie_embeddings:  # the file may have the tied head, too
        replaced.add(_head_name(config))
    ends = tuple(name for name in ends if name not in replaced)
    scale_dtype = chosen.scale_dtype or checkpoint.dtype(matrices[0].sources[0])
    scale_dtype = scale_dtype if scale_dtype in _SCALE_DTYPES else torch.float32
    companions = find_companions(model)
    quantized, copied = _result_bytes(checkpoint, matrices, rounded, [*ends, *itertools.chain(*kept)], scale_dtype)
    return Plan(
        checkpoint=checkpoint,
        config=config,
        tensors=tensors,
        schemes=schemes,
        format=chosen,
        matrices=matrices,
        head=rounded_head,
        embedding=rounded_embedding,
        kv_cache=kv_cache,
        ends=ends,
        kept=kept,
        companions=companions,
        unquantized=tuple(
            name
            for name in _unquantized(checkpoint, config)
            if rounded_head is None or f"{name}.weight" != rounded_head.name
        ),
        scale_dtype=scale_dtype,
        bytes_quantized=quantized,
        bytes_after=quantized + copied + sum(file.stat().st_size for file in companions.values()),
        largest_unit=max(_unit_bytes(checkpoint, matrices, rounded, kept, ends)),
    )


def _check_unquantized(checkpoint: Checkpoint, model: Path) -> None:
    for key in ("quantization_config", "quantization_bit"):
        if checkpoint.config.get(key):
            raise CheckpointError(
                f"{model}: is quantized already (config.json has {key}): give the original checkpoint instead"
            )


def _check_schemes(matrices: Sequence[Matrix], format: WritableFormat) -> None:
    """Refuse a scheme that does not fit its matrix or the format."""
    for matrix in matrices:
        for source, rows in zip(matrix.sources, matrix.rows, strict=True):
            matrix.scheme.groups(matrix.columns, source)
            format.check(matrix.scheme, (rows, matrix.columns), source)
            if not matrix.scheme.symmetric:
                # Any group may get a zero point 0: not even one could be seen before all the work is done.
                format.check_zeros(torch.zeros(1, dtype=torch.uint8), f"{source} in {matrix.scheme}")


def _result_bytes(
    checkpoint: Checkpoint,
    matrices: Sequence[Matrix],
    ends: Sequence[EndMatrix],
    copied: Sequence[str],
    scale_dtype: torch.dtype,
) -> tuple[int, int]:
    """Bytes of the quantized layers, and of all other tensors: quantized ends, and tensors that are `copied`."""
    scale_bits = scale_dtype.itemsize * 8
    layers = sum(
        sum(matrix.rows) * matrix.columns * matrix.scheme.bits_per_weight(matrix.columns, scale_bits) / 8
        for matrix in matrices
    )
    others = sum(map(checkpoint.nbytes, copied))
    for end in ends:
        rows, columns = end.shape
        others += int(rows * columns * end.scheme.bits_per_weight(columns, scale_bits) / 8)
    return int(layers), others


def _unit_bytes(
    checkpoint: Checkpoint,
    matrices: Sequence[Matrix],
    rounded: Sequence[EndMatrix],
    kept: Sequence[Sequence[str]],
    ends: Sequence[str],
) -> list[int]:
    """Bytes of what is read at a time: each layer of the original, and each tensor outside of the layers."""
    layers = [sum(map(checkpoint.nbytes, names)) for names in kept]
    for matrix in matrices:
        layers[matrix.layer] += sum(map(checkpoint.nbytes, matrix.sources))
    return [*layers, *map(checkpoint.nbytes, ends), *(checkpoint.nbytes(end.source) for end in rounded)]


def check_kv_cache(scheme: KVCacheScheme, schemes: Schemes, format: str, *, calibrated: bool) -> None:
    """Refuse scales of a KV cache where they cannot be found, or not be stored.

    Args:
        scheme: of the cache.
        schemes: of the layers.
        format: the name of the format to write.
        calibrated: the algorithm looks at calibration data.

    Raises:
        UsageError: as said.
    """
    if not calibrated:
        raise UsageError(f"--kv-cache {scheme}: its scales are calibrated, and rtn has no calibration data: use gptq")
    if format != _END_FORMAT:
        raise UsageError(f"format {format} holds no scales of a KV cache: use {_END_FORMAT}, or drop --kv-cache")
    if any(each.element is not None for each in schemes.distinct()):
        raise UsageError(
            f"--kv-cache {scheme}: layers in FP4 or trellis codes exclude it: Warpbus does not read such a model"
        )


def check_end(what: str, scheme: Scheme, format: str) -> None:
    """Refuse what a head or an embedding cannot be quantized to.

    Args:
        what: "head" or "embedding".
        scheme: of it.
        format: the name of the format to write.

    Raises:
        SchemeError: if the activations of the scheme are not in 16 bits, its weights are no codes, or those of an
            embedding have fewer than 8 bits.
        UsageError: if the format has no such quantized matrix.
    """
    if scheme.activations is not None or scheme.element is not None:
        raise SchemeError(f"{what} {scheme}: expected codes and activations in 16 bits, w8a16-g128 for instance")
    if what == "embedding" and scheme.bits != _EMBEDDING_BITS:
        raise SchemeError(f"embedding {scheme}: expected {_EMBEDDING_BITS} bits, w8a16 or w8a16-g128 for instance")
    if format != _END_FORMAT:
        raise UsageError(f"format {format} holds no quantized {what}: use {_END_FORMAT}, or leave the {what} as it is")


def _head_name(config: ModelConfig) -> str:
    """The tensor name of a head that is not tied."""
    return tensor_map(replace(config, tie_embeddings=False))["head.weight"][0]


def _end(what: str, checkpoint: Checkpoint, config: ModelConfig, scheme: Scheme, format: WritableFormat) -> EndMatrix:
    """The head or the embedding with its scheme, checked."""
    check_end(what, scheme, format.name)
    (embedding,) = tensor_map(config)["embedding.weight"]
    name = embedding if what == "embedding" else _head_name(config)
    source = embedding if config.tie_embeddings else name
    shape, fitting = (config.vocab_size, config.hidden_size), scheme.fitting(config.hidden_size)
    if checkpoint.shape(source) != shape or not checkpoint.dtype(source).is_floating_point:
        raise TensorError(
            f"{checkpoint.directory}: {source}: expected floating point weights of shape {list(shape)}, found "
            f"{checkpoint.dtype(source)} {list(checkpoint.shape(source))}: check that config.json belongs to these "
            "weights"
        )
    format.check(fitting, shape, source)
    return EndMatrix(name, source, shape, fitting)


def _unquantized(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[str]:
    """The linear layers that are kept: the head, routers, indexers, the projection of multi-token prediction, and
    layers that the decoder does not use."""
    tensors = tensor_map(replace(config, tie_embeddings=False))
    yield tensors["head.weight"][0].removesuffix(".weight")
    for parameter, names in tensors.items():
        layer, _, _ = parameter.partition(".")
        if layer == "layers" and config.matrix(parameter) is None and len(config.parameters[parameter]) == 2:
            yield names[0].removesuffix(".weight")
    ignores, used = BY_NAME[config.family].ignores, {name for names in tensors.values() for name in names}
    for name in checkpoint.names():
        if name not in used and ignores(config, name) and name.endswith(".weight") and len(checkpoint.shape(name)) == 2:
            yield name.removesuffix(".weight")


def _not_quantized(
    checkpoint: Checkpoint, config: ModelConfig, tensors: TensorMap, matrices: Sequence[Matrix]
) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The names of the tensors that are not quantized: those of each layer, and those outside of the layers."""
    quantized = {source for matrix in matrices for source in matrix.sources}
    kept: list[list[str]] = [[] for _ in config.all_layers]
    for parameter, names in tensors.items():
        if parameter.startswith("layers."):
            kept[int(parameter.split(".")[1])] += [name for name in names if name not in quantized]
    within = quantized.union(*kept)
    return tuple(map(tuple, kept)), tuple(name for name in checkpoint.names() if name not in within)


def _matrices(checkpoint: Checkpoint, config: ModelConfig, tensors: TensorMap, schemes: Schemes) -> list[Matrix]:
    found = []
    for index, spec in config.matrices:
        expected = spec.shape
        sources = tensors[f"layers.{index}.{spec.name}.weight"]
        shapes = [checkpoint.shape(source) for source in sources]
        if any(len(shape) != 2 or shape[1] != expected[1] for shape in shapes) or expected[0] != sum(
            shape[0] for shape in shapes
        ):
            raise TensorError(
                f"{checkpoint.directory}: {', '.join(sources)}: expected {expected[0]} rows in all and "
                f"{expected[1]} columns, found {', '.join(str(list(shape)) for shape in shapes)}: "
                "check that config.json belongs to these weights"
            )
        for source in sources:
            if not checkpoint.dtype(source).is_floating_point:
                raise TensorError(
                    f"{checkpoint.directory}: {source}: expected floating point weights, found "
                    f"{checkpoint.dtype(source)}: give the original checkpoint instead"
                )
        scheme = _scheme(schemes, sources).fitting(expected[1])
        rows, dtype = tuple(shape[0] for shape in shapes), checkpoint.dtype(sources[0])
        mlp = config.all_layers[index].mlp
        experts = mlp.router.experts if spec.expert is not None and isinstance(mlp, MoESpec) else 1
        found.append(Matrix(index, spec.name, sources, rows, expected[1], dtype, scheme, experts))
    return found


def _scheme(schemes: Schemes, sources: tuple[str, ...]) -> Scheme:
    """The one scheme of the parts of a fused matrix."""
    found = [schemes.of(source.removesuffix(".weight")) for source in sources]
    if len(set(found)) > 1 or found[0] is None:
        listed = ", ".join(f"{source} {scheme}" for source, scheme in zip(sources, found, strict=True))
        raise SchemeError(f"{listed}: expected one scheme, since they are computed as one matrix")
    return found[0]

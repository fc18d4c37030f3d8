"""What is going to be quantized, and every reason not to begin, found before the first weight is read."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from warpbus.errors import CheckpointError, TensorError, UsageError
from warpbus.formats import Checkpoint
from warpbus.formats.companions import find_companions
from warpbus.models import LINEARS, DecoderLayer, ModelConfig, read_config, tensor_map
from warpbus.qtensor import Scheme

REPORT_NAME = "warpbus-report.json"

_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Matrix:
    """A linear layer of the decoder.

    Attributes:
        layer: the number of its decoder layer.
        linear: its name there, one of `LINEARS`.
        sources: the checkpoint's tensors that are stacked along rows to make it.
        rows: the rows of each of them.
        columns: its input features.
    """

    layer: int
    linear: str
    sources: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int

    @property
    def name(self) -> str:
        return f"layers.{self.layer}.{self.linear}"


@dataclass(frozen=True)
class Plan:
    """A model that can be quantized.

    Attributes:
        checkpoint: the source.
        config: of its decoder.
        scheme: what it is quantized to.
        matrices: what is quantized, in the order of the computation.
        copied: the names of the tensors that stay as they are.
        companions: the files that come along.
        unquantized: the linear layers that stay as they are, by the names that the checkpoint has for them.
        scale_dtype: of the quantized matrices' scales: that of the weights.
        bytes_quantized: of the quantized matrices.
        bytes_after: of all files that are going to be written, to a few kilobytes.
        largest_unit: bytes of the largest of what is held at a time: a layer, the embedding, or the head.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    scheme: Scheme
    matrices: tuple[Matrix, ...]
    copied: tuple[str, ...]
    companions: tuple[Path, ...]
    unquantized: tuple[str, ...]
    scale_dtype: torch.dtype
    bytes_quantized: int
    bytes_after: int
    largest_unit: int

    def layer(self, index: int) -> dict[str, Matrix]:
        """The matrices of a decoder layer, by their names in it."""
        return {matrix.linear: matrix for matrix in self.matrices if matrix.layer == index}


def prepare(model: Path, output: Path, scheme: Scheme) -> Plan:
    """Look at everything that does not need the weights themselves.

    Raises:
        CheckpointError: if the source cannot be read or is quantized already.
        TensorError: if a matrix is missing, or has not the shape that config.json gives it, or no floating dtype.
        SchemeError: if the group size does not divide a matrix' columns; the message names its tensor.
        UsageError: if the output is the source.
    """
    checkpoint = Checkpoint(model)
    if output.resolve() == model.resolve():
        raise UsageError(f"{output}: the output is the model itself: name another directory")
    for key in ("quantization_config", "quantization_bit"):
        if checkpoint.config.get(key):
            raise CheckpointError(
                f"{model}: is quantized already (config.json has {key}): give the original checkpoint instead"
            )
    config = read_config(checkpoint)
    matrices = tuple(_matrices(checkpoint, config))
    for matrix in matrices:
        scheme.groups(matrix.columns, matrix.sources[0])
    quantized = {source for matrix in matrices for source in matrix.sources}
    copied = tuple(name for name in checkpoint.names() if name not in quantized)
    companions = find_companions(model)
    scale_dtype = checkpoint.dtype(matrices[0].sources[0])
    scale_dtype = scale_dtype if scale_dtype in _SCALE_DTYPES else torch.float32
    weights = sum(
        sum(matrix.rows) * matrix.columns * scheme.bits_per_weight(matrix.columns, scale_dtype.itemsize * 8) / 8
        for matrix in matrices
    )
    layers = [0] * config.num_layers
    for matrix in matrices:
        layers[matrix.layer] += sum(checkpoint.nbytes(source) for source in matrix.sources)
    kept = [checkpoint.nbytes(name) for name in copied]
    head = tensor_map(replace(config, tie_embeddings=False))["head.weight"][0]
    return Plan(
        checkpoint=checkpoint,
        config=config,
        scheme=scheme,
        matrices=matrices,
        copied=copied,
        companions=companions,
        unquantized=(head.removesuffix(".weight"),),
        scale_dtype=scale_dtype,
        bytes_quantized=int(weights),
        bytes_after=int(weights) + sum(kept) + sum(file.stat().st_size for file in companions),
        largest_unit=max(layers + kept),
    )


def _matrices(checkpoint: Checkpoint, config: ModelConfig) -> list[Matrix]:
    tensors = tensor_map(config)
    with torch.device("meta"):
        layer = DecoderLayer(config)
    found = []
    for index in range(config.num_layers):
        for linear in LINEARS:
            expected = tuple(layer.get_submodule(linear).get_parameter("weight").shape)
            sources = tensors[f"layers.{index}.{linear}.weight"]
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
            found.append(Matrix(index, linear, sources, tuple(shape[0] for shape in shapes), expected[1]))
    return found

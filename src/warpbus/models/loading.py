"""Loads a decoder from a checkpoint, one tensor at a time."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from warpbus.dist import Group
from warpbus.errors import CheckpointError, UnknownArchitectureError, UsageError
from warpbus.formats import Checkpoint
from warpbus.formats.format import format_of
from warpbus.models.config import ModelConfig
from warpbus.models.decoder import Decoder, DecoderLayer, make_layer
from warpbus.models.families import MODEL_TYPES, family_of
from warpbus.models.families.family import Fields
from warpbus.models.kv_scales import load_kv_scales
from warpbus.models.layers import QuantizedLinear
from warpbus.models.parallel import Part
from warpbus.models.parameter_source import ParameterSource, tensor_map
from warpbus.models.placement import keeps_trellises, round_onto
from warpbus.models.stored_schemes import prefix_of
from warpbus.qtensor import Scheme

Progress = Callable[[int, int], None]
"""Called with the bytes of the file that were read so far, and the bytes to read in total."""


def read_config(
    checkpoint: Checkpoint, *, mtp: Literal["unused", "announced", "stored", "required"] = "unused"
) -> ModelConfig:
    """Read the model's shape from config.json, and its stop tokens from generation_config.json if that lists any.

    Stop ids beyond the vocabulary, which cannot be generated, are dropped.

    Args:
        mtp: whether the config has the layer of multi-token prediction: "unused": no; "announced": if config.json
            says so; "stored": if the checkpoint has all of its tensors, too; "required": yes.

    Raises:
        UnknownArchitectureError: no family declares the model_type.
        CheckpointError: a value is missing, invalid or not supported, and the message names its key; or a required
            layer of multi-token prediction is not announced or not complete.
    """
    generation = Fields(checkpoint.load_json("generation_config.json") or {}, "generation_config.json")
    try:
        config = _parsed(checkpoint.config)
        stop_ids = generation.token_ids("eos_token_id", config.stop_ids)
    except CheckpointError as error:
        raise type(error)(f"{checkpoint.directory}: {error}") from None
    config = replace(config, stop_ids=tuple(token for token in stop_ids if token < config.vocab_size))
    if mtp == "unused":
        return replace(config, mtp=None)
    if mtp == "announced":
        return config
    missing = _missing_mtp(checkpoint, config)
    if missing is not None and mtp == "required":
        raise CheckpointError(f"{checkpoint.directory}: {missing}")
    return config if missing is None else replace(config, mtp=None)


def _missing_mtp(checkpoint: Checkpoint, config: ModelConfig) -> str | None:
    """Why multi-token prediction cannot be used; None if it can."""
    advice = "use a checkpoint that has it, or leave out --speculation mtp or --mtp-weight"
    if config.mtp is None:
        return f"config.json: num_nextn_predict_layers: there is no layer of multi-token prediction (MTP): {advice}"
    format = format_of(checkpoint.config, trellises=True)
    for parameter, names in tensor_map(config).items():
        if not parameter.startswith(f"layers.{config.num_layers}."):
            continue
        for name in names:
            if name not in checkpoint and not (format and format.is_quantized(checkpoint, prefix_of(name))):
                return (
                    f"{name}: missing, although config.json announces a layer of multi-token prediction (MTP) with "
                    f"num_nextn_predict_layers: {advice}"
                )
    return None


def check_loadable(config: dict[str, Any], *, processes: int = 1, expert_parallel: bool = False) -> None:
    """Check that a model is supported, before its weights are downloaded.

    Args:
        config: its parsed `config.json`.
        processes: the number of processes that will share it.
        expert_parallel: see `load_model`.

    Raises:
        CheckpointError: as `read_config`.
        UsageError: the model cannot be sharded over so many processes.
    """
    Part(_parsed(config), 0, processes, expert_parallel)


def _parsed(config: dict[str, Any]) -> ModelConfig:
    family = family_of(config)
    if family is None:
        raise UnknownArchitectureError(
            f"config.json: model_type: {config.get('model_type')!r} is not supported: "
            f"expected one of {', '.join(MODEL_TYPES)}"
        )
    return family.config(config)


def part_rows(config: ModelConfig, parameter: str, count: int, total: int) -> list[int]:
    """Rows of each of the `count` tensors of the file that make up the `total` rows of a decoder's parameter."""
    matrix = config.matrix(parameter)
    return [total] if matrix is None else matrix.part_rows(count)


def load_model(
    checkpoint: Checkpoint,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
    layer_scheme: Scheme | None = None,
    head: Scheme | None = None,
    embedding: Scheme | None = None,
    embedding_device: torch.device | str | None = None,
    group: Group | None = None,
    expert_parallel: bool = False,
    mtp: bool = False,
    offloaded: Sequence[int] = (),
    int8_activations: bool = False,
) -> Decoder:
    """Load a model for inference, unquantized or quantized in any format that `warpbus.formats` reads.

    FP8 matrices that no scheme represents, for instance those with a scale per block, are dequantized to `dtype`; so
    are trellises, except for a single process on a GPU.

    Besides the model, at most one tensor of the file (for a fused quantized matrix, its parts) is in memory. It stays
    on the CPU; a GPU receives it in chunks.

    Args:
        device: the device of the model.
        dtype: of its parameters and activations. Scales of matrices that are packed for kernels are rounded to it;
            other scales keep the dtype of the file.
        progress: see `Progress`.
        layer_scheme: a symmetric scheme. Matrices of the layers that the file does not hold quantized are rounded to
            it while loading.
        head: a symmetric scheme that the head is rounded to, unless the file has it quantized.
        embedding: the same for the embedding. A tied head is then the same matrix, and `head` is not used.
        embedding_device: the device of the embedding; `device` by default. A tied head is on the same device as the
            embedding unless one of them is quantized.
        group: the processes of tensor parallelism (`warpbus.models.parallel`), each with its own device. The decoder
            then has the config of this process's part, with the whole vocabulary and embedding. Hidden states and
            logits are complete and bit-identical on every process. Each process reads only its part of the file; in
            formats other than compressed-tensors it reads each matrix as a whole.
        expert_parallel: with a group, each process has whole routed experts of its own instead of a part of each, and
            reads only those.
        mtp: load the layer of multi-token prediction, too.
        offloaded: for each layer, how many of its experts lie in pinned memory of the host, the last ones; by default
            none. For a single process.
        int8_activations: on a CPU, quantized layers round their inputs to 8 bits; see `QuantizedLinear`.

    Returns:
        the decoder in eval mode, its parameters without gradients.

    Raises:
        TensorError: a tensor is missing or has the wrong shape or type.
        CheckpointError: the config is not supported, or the file has weights that the decoder does not use.
        UsageError: the model cannot be sharded over so many processes, or a scheme does not fit a matrix.
    """
    config = read_config(checkpoint, mtp="required" if mtp else "unused")
    part = None if group is None or group.world == 1 else Part(config, group.rank, group.world, expert_parallel)
    with torch.device("meta"):
        model = Decoder(config if part is None else part.config)
    if part is not None:
        part.narrow(model)
    source = replace(
        ParameterSource.open(
            checkpoint, config, device, dtype, trellises=part is None and keeps_trellises(device, dtype)
        ),
        layer_scheme=layer_scheme,
        head=head,
        embedding=embedding,
        embedding_device=embedding_device,
        part=part,
        offloaded=offloaded,
        int8_activations=int8_activations,
    )
    source.warn_of_router_biases()
    total = source.nbytes(list(source.tensors))
    done = 0
    left = Counter(map(_layer_of, source.tensors))
    for parameter in source.tensors:
        if part is None or part.has(parameter):
            source.fill(model, parameter, parameter)
        done += source.nbytes([parameter])
        layer = _layer_of(parameter)
        left[layer] -= 1
        if layer is not None and left[layer] == 0:
            source.stack(model, layer)
        if progress is not None:
            progress(done, total)
    if config.tie_embeddings and isinstance(model.embedding, nn.Embedding):
        source.check_tied_head(model.embedding.weight)
        tied = model.embedding.weight if part is None else part.tied_head(model.embedding.weight)
        if head is None:
            model.head.weight = tied
        else:
            rounded = round_onto(tied, head, device, dtype)
            model.add_module("head", QuantizedLinear(rounded, dtype=dtype, int8_activations=int8_activations))
    model.kv_scales = load_kv_scales(checkpoint, config, None if part is None else part.kv_heads)
    if part is not None and group is not None:
        part.join(model, group)
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # staging and intermediate tensors
    return model.eval()


def quantized_parameters(
    checkpoint: Checkpoint, config: ModelConfig, *, trellises: bool = False
) -> Mapping[str, Scheme]:
    """The schemes of those parameters of the decoder that the file holds quantized, and that are loaded so.

    Args:
        trellises: they are loaded as they are stored; see `keeps_trellises`.

    Raises:
        CheckpointError: as `load_model`.
    """
    return ParameterSource.open(checkpoint, config, "cpu", torch.float32, trellises=trellises).schemes


def load_layer(
    checkpoint: Checkpoint,
    config: ModelConfig,
    index: int,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> DecoderLayer:
    """Load a single layer; arguments, result and errors as `load_model`. For all layers, `LayerLoader` is faster.

    Raises:
        UsageError: there is no layer `index`.
    """
    return LayerLoader(checkpoint, config, device=device, dtype=dtype).load(index)


class LayerLoader:
    """Loads layers one at a time; what they need is looked up once, which takes long for thousands of experts.

    On a GPU, copies are in the order of the stream that is current. For one thread at a time.

    Args:
        checkpoint, config, device, dtype: as of `load_model`, which also has the errors.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self._source = ParameterSource.open(checkpoint, config, device, dtype, trellises=keeps_trellises(device, dtype))
        self._parameters: dict[int, list[str]] = {}
        for parameter in self._source.tensors:
            if parameter.startswith("layers."):
                self._parameters.setdefault(int(parameter.split(".")[1]), []).append(parameter)

    def load(self, index: int) -> DecoderLayer:
        """A layer. Raises UsageError: there is no layer `index`."""
        source, layers = self._source, self._source.config.all_layers
        if not 0 <= index < len(layers):
            raise UsageError(
                f"layer {index}: expected 0 to {len(layers) - 1}, the layers of {source.checkpoint.directory}"
            )
        with torch.device("meta"):
            layer = make_layer(layers[index], source.config.rope)
        for parameter in self._parameters[index]:
            source.fill(layer, parameter, parameter.removeprefix(f"layers.{index}."))
        return layer.eval()


def _layer_of(parameter: str) -> int | None:
    """The number of the layer that a parameter belongs to."""
    return int(parameter.split(".")[1]) if parameter.startswith("layers.") else None

"""Loads a decoder from a checkpoint, one tensor at a time."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import nn

from warpbus.cuda.staging import PinnedStaging
from warpbus.dist import Group
from warpbus.errors import CheckpointError, TensorError, UnknownArchitectureError, UsageError
from warpbus.formats import Checkpoint
from warpbus.formats.dequantizing import dequantized, dequantized_reordered
from warpbus.formats.format import Format, format_of
from warpbus.formats.kv_cache import scale_names
from warpbus.kernels.ops.packed import PackedWeight
from warpbus.kernels.ops.trellis_packed import PackedTrellis
from warpbus.models.config import ModelConfig
from warpbus.models.decoder import Decoder, DecoderLayer, make_layer
from warpbus.models.families import BY_NAME, MODEL_TYPES, TensorMap, family_of
from warpbus.models.families.family import Fields
from warpbus.models.kv_scales import attention_prefix, kv_cache_scheme, load_kv_scales
from warpbus.models.layer_spec import FLOAT32_PARAMETERS
from warpbus.models.layers import MoE, QuantizedEmbedding, QuantizedLinear
from warpbus.models.parallel import Part, Put, Spans, copy_spans, joined, quantized_columns, quantized_rows
from warpbus.models.placement import keeps_trellises, place, round_onto
from warpbus.models.row_order import spans_in_file
from warpbus.models.stored_schemes import prefix_of, read_stored_schemes
from warpbus.qtensor import QTensor, Scheme

Progress = Callable[[int, int], None]
"""Called with the bytes of the file that were read so far, and the bytes to read in total."""

_log = logging.getLogger("warpbus.models")

# Constants that some exporters wrote next to the weights.
_KNOWN_EXTRAS = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")
_PREFIX_ENCODER = "transformer.prefix_encoder."
_ELEMENTS_AT_ONCE = 2**24
_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
    advice = "use a checkpoint that has it, or other speculation than mtp"
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


def tensor_map(config: ModelConfig) -> TensorMap:
    """Map each parameter of the decoder to the tensors of the checkpoint that are stacked along its rows."""
    return BY_NAME[config.family].tensors(config)


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
        _Source.open(checkpoint, config, device, dtype, trellises=part is None and keeps_trellises(device, dtype)),
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
    return _Source.open(checkpoint, config, "cpu", torch.float32, trellises=trellises).schemes


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
        self._source = _Source.open(checkpoint, config, device, dtype, trellises=keeps_trellises(device, dtype))
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


@dataclass(frozen=True)
class _Source:
    """Reads the decoder's parameters from a checkpoint onto a device.

    Attributes:
        tensors: see `tensor_map`.
        format: the format of the file's quantized matrices; None if it has none.
        schemes: of the parameters that the file holds quantized.
        part: the part of the model to read; None for all of it.
        staging: copies tensors to a GPU; None on the CPU.
        offloaded: see `load_model`.
        int8_activations: see `load_model`.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    tensors: TensorMap
    format: Format | None
    schemes: Mapping[str, Scheme]
    device: torch.device | str
    dtype: torch.dtype
    layer_scheme: Scheme | None = None
    head: Scheme | None = None
    embedding: Scheme | None = None
    embedding_device: torch.device | str | None = None
    part: Part | None = None
    staging: PinnedStaging | None = None
    offloaded: Sequence[int] = ()
    int8_activations: bool = False

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        trellises: bool,
    ) -> "_Source":
        """Check the tensor names of the file against those the decoder needs, before any tensor is read.

        Args:
            trellises: leave them in their codes.
        """
        format, tensors = format_of(checkpoint.config, trellises=trellises), tensor_map(config)
        if format is None:
            checkpoint = dequantized(checkpoint, dtype)
        else:
            checkpoint = dequantized_reordered(checkpoint, format, dtype)
        schemes = {} if format is None else read_stored_schemes(checkpoint, format, tensors)
        staging = PinnedStaging(torch.device(device)) if torch.device(device).type == "cuda" else None
        source = cls(checkpoint, config, tensors, format, schemes, device, dtype, staging=staging)
        source.refuse_prefix()
        source.refuse_unexpected()
        source.refuse_router_biases()
        return source

    def files_names(self, parameter: str) -> list[str]:
        """The tensors that store this parameter in the file."""
        names = self.tensors[parameter]
        if self.format is None or parameter not in self.schemes:
            return list(names)
        return [stored for name in names for stored in self.format.stored(self.checkpoint, prefix_of(name))]

    def nbytes(self, parameters: list[str]) -> int:
        """Bytes of these parameters in the file. Raises TensorError if one is missing."""
        return sum(self.checkpoint.nbytes(name) for parameter in parameters for name in self.files_names(parameter))

    def refuse_prefix(self) -> None:
        """Refuse a P-Tuning prefix among the weights: it is an adapter. A config.json that mentions one is accepted."""
        name = next((name for name in self.checkpoint.names() if name.startswith(_PREFIX_ENCODER)), None)
        if name is not None:
            raise CheckpointError(
                f"{self.checkpoint.directory}: {name}: this is a P-Tuning prefix: pass it as an adapter of the model "
                "that it was trained on"
            )

    def refuse_unexpected(self) -> None:
        """Refuse weights that the decoder would ignore: the architecture is not the one in config.json."""
        expected = {name for parameter in self.tensors for name in self.files_names(parameter)}
        if self.config.tie_embeddings:
            expected.add(self.tied_head_name)
        if self.format is not None and kv_cache_scheme(self.checkpoint, self.config) is not None:
            for index in range(len(self.config.all_layers)):
                expected.update(scale_names(attention_prefix(self.config, index)).values())
        extras = [name for name in self.checkpoint.names() if name not in expected]
        ignores = BY_NAME[self.config.family].ignores
        extras = [
            name
            for name in extras
            if not (name.endswith(_KNOWN_EXTRAS) or ignores(self.config, name) or self.is_zero_bias(name))
        ]
        if extras:
            shown = ", ".join(extras[:3]) + (f" and {len(extras) - 3} more" if len(extras) > 3 else "")
            raise CheckpointError(
                f"{self.checkpoint.directory}: unexpected weights {shown}: a {self.config.family} model with this "
                "config.json has none of that name: check that config.json belongs to these weights"
            )

    @property
    def router_biases(self) -> dict[str, torch.dtype]:
        """The dtypes of the router biases that the file has."""
        names = [names[0] for parameter, names in self.tensors.items() if parameter.endswith(FLOAT32_PARAMETERS)]
        return {name: self.checkpoint.dtype(name) for name in names if name in self.checkpoint}

    def refuse_router_biases(self) -> None:
        """Refuse router biases that are not floating point."""
        for name, dtype in self.router_biases.items():
            if dtype not in _FLOATING:
                raise TensorError(
                    f"{self.checkpoint.directory}: {name}: a router bias is {dtype}, expected float32: use a "
                    "checkpoint that keeps it in float32"
                )

    def warn_of_router_biases(self) -> None:
        """Warn in one line of router biases in 16 bits, which round differences away that choose a token's experts."""
        stored = self.router_biases
        halves = [name for name, dtype in stored.items() if dtype.itemsize < torch.float32.itemsize]
        if halves:
            more = f" and {len(halves) - 1} more" if len(halves) > 1 else ""
            _log.warning(
                "%s: %s%s: router biases are %s, expected float32: rounded biases let some tokens choose other experts",
                *(self.checkpoint.directory, halves[0], more, stored[halves[0]]),
            )

    def is_zero_bias(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros: AutoGPTQ adds one to every layer that it quantizes."""
        prefix = name.removesuffix(".bias")
        if prefix == name or self.format is None or not self.format.is_quantized(self.checkpoint, prefix):
            return False
        return not bool(self.checkpoint.tensor(name).any())

    @property
    def tied_head_name(self) -> str:
        """The tensor name that an untied head would have."""
        return tensor_map(replace(self.config, tie_embeddings=False))["head.weight"][0]

    def check_tied_head(self, embedding: torch.Tensor | QTensor) -> None:
        """Check that a head stored in the file equals the embedding that it is tied to."""
        name = self.tied_head_name
        if name not in self.checkpoint:
            return
        head = self.checkpoint.tensor(name, expected=(self.config.vocab_size, self.config.hidden_size))
        whole = embedding.dequantize(self.dtype) if isinstance(embedding, QTensor) else embedding
        if not torch.equal(head.to(self.dtype), whole.to("cpu")):
            raise CheckpointError(
                f"{self.checkpoint.directory}: {name}: differs from the embedding, although config.json sets "
                "tie_word_embeddings: set that to false"
            )

    def fill(self, module: nn.Module, parameter: str, path: str) -> None:
        """Read the decoder's `parameter` and store it at `path` within `module`."""
        owner_path, _, leaf = path.rpartition(".")
        owner = module.get_submodule(owner_path)
        scheme = self.rounded_to(parameter)
        if isinstance(module, Decoder) and parameter == "embedding.weight" and self.quantizes_embedding:
            self.fill_embedding(module)
            return
        if parameter in self.schemes:
            if not isinstance(owner, nn.Linear):
                names = ", ".join(self.tensors[parameter])
                raise CheckpointError(
                    f"{self.checkpoint.directory}: {names}: only linear layers may be quantized, and in "
                    "compressed-tensors the embedding to w<bits>a16: use another checkpoint"
                )
            if self.is_dequantized(parameter):
                weight = (
                    self.read_quantized(parameter, owner.out_features, owner.in_features)
                    .dequantize(self.dtype)
                    .to(self.device)
                )
                owner.weight = nn.Parameter(weight, requires_grad=False)
                return
            placed = place(
                self.read_quantized(parameter, owner.out_features, owner.in_features), self.device, self.dtype
            )
            self.put(module, owner_path, placed.to("cpu") if self.is_offloaded(parameter) else placed)
            return
        shape = tuple(getattr(owner, leaf).shape)
        if scheme is not None:
            scheme.groups(shape[1], parameter)
            rounded = round_onto(self.read_plain(parameter, shape, "cpu"), scheme, self.device, self.dtype)
            self.put(module, owner_path, rounded.to("cpu") if self.is_offloaded(parameter) else rounded)
            return
        device = self.embedding_device if parameter == "embedding.weight" else None
        tensor = self.read_plain(parameter, shape, device or self.device)
        if isinstance(owner, QuantizedLinear):
            owner.bias = tensor
        else:
            setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))

    @property
    def quantizes_embedding(self) -> bool:
        """Whether the decoder gets a quantized embedding: the file has one that can be looked up, or it is rounded."""
        stored = self.schemes.get("embedding.weight")
        if stored is None or self.format is None:
            return self.embedding is not None
        return self.format.has_embedding and stored.activations is None and stored.element is None

    def fill_embedding(self, model: Decoder) -> None:
        """Put a quantized embedding into a model; a tied head is the same matrix."""
        parameter, shape = "embedding.weight", (self.config.vocab_size, self.config.hidden_size)
        stored = parameter in self.schemes
        weight = self.read_quantized(parameter, *shape) if stored else self.read_plain(parameter, shape, "cpu")
        device = torch.device(self.embedding_device or self.device)
        embedded = self.arranged(weight, device)
        model.embedding = QuantizedEmbedding(embedded, dtype=self.dtype)
        if not self.config.tie_embeddings:
            return
        self.check_tied_head(weight)
        if self.part is not None:
            own = self.part.vocabulary[self.part.rank]
            rows = weight.rows(own.start, own.stop) if isinstance(weight, QTensor) else weight[own.start : own.stop]
            self.put(model, "head", self.arranged(rows, self.device))
        else:
            self.put(
                model, "head", embedded if device == torch.device(self.device) else self.arranged(weight, self.device)
            )

    def arranged(self, weight: QTensor | torch.Tensor, device: torch.device | str) -> QTensor | PackedWeight:
        """The embedding's matrix, or rows of it, as the kernels of a device need it; rounded if it is not quantized."""
        if isinstance(weight, QTensor):
            return cast(QTensor | PackedWeight, place(weight, device, self.dtype))
        assert self.embedding is not None
        self.embedding.groups(weight.shape[1], "embedding.weight")
        return round_onto(weight, self.embedding, device, self.dtype)

    def rounded_to(self, parameter: str) -> Scheme | None:
        """The scheme to round an unquantized matrix to; None to keep it."""
        if parameter == "head.weight":
            return self.head
        matrix = self.config.matrix(parameter)
        is_rounded = matrix is not None and not matrix.dequantized and parameter.endswith(".weight")
        return self.layer_scheme if is_rounded else None

    def is_dequantized(self, parameter: str) -> bool:
        """Whether a parameter is a matrix that a decoder holds dequantized."""
        matrix = self.config.matrix(parameter)
        return matrix is not None and matrix.dequantized

    def is_offloaded(self, parameter: str) -> bool:
        """Whether a parameter is a matrix of an expert that lies in the memory of the host."""
        return self.config.is_offloaded(parameter, self.offloaded)

    def stack(self, model: Decoder, layer: int) -> None:
        """Arrange the experts of a layer, which are all there, for the kernels."""
        mlp = model.layers[layer].mlp
        if isinstance(mlp, MoE):
            mlp.stack(self.offloaded[layer] if self.offloaded else 0)

    def put(self, module: nn.Module, path: str, weight: QTensor | PackedWeight | PackedTrellis) -> None:
        """Replace the linear layer at `path` within `module` by a quantized one."""
        parent, _, name = path.rpartition(".")
        linear = cast(nn.Linear, module.get_submodule(path))
        bias = None if linear.bias is None else linear.bias.data
        quantized = QuantizedLinear(weight, bias, dtype=self.dtype, int8_activations=self.int8_activations)
        setattr(module.get_submodule(parent), name, quantized)

    @cached_property
    def own_part(self) -> Part:
        """The part of the model to read. Made once: it looks at all matrices of the model."""
        return self.part or Part(self.config, 0, 1)

    def spans(self, parameter: str, shape: tuple[int, ...]) -> tuple[list[tuple[str, int, Spans]], int, Spans | None]:
        """The parts of the file's tensors to read for a parameter of this shape.

        Returns:
            for each tensor its name, its number of rows and the rows to read; then the number of columns and the
            columns to read (0 and None for a vector).
        """
        part = self.own_part
        names = self.tensors[parameter]
        fused = part.rows(parameter, shape[0])
        if len(names) == 1:
            count, spans = joined(fused)
            fused = ((count, spans_in_file(self.config, parameter, spans)),)
        rows = [(name, count, spans) for name, (count, spans) in zip(names, fused, strict=True)]
        return rows, *(part.columns(parameter, shape[1]) if len(shape) == 2 else (0, None))

    def read_plain(self, parameter: str, shape: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
        """The parameter on `device`, in `dtype` or what its table says, its parts stacked."""
        rows, width, columns = self.spans(parameter, shape)
        for name, count, _ in rows:
            self.check(name, (count, width) if columns else (count,))
        dtype = torch.float32 if parameter.endswith(FLOAT32_PARAMETERS) else self.dtype
        stacked = torch.empty(shape, dtype=dtype, device=device)
        put: Put = torch.Tensor.copy_ if self.staging is None or stacked.device.type == "cpu" else self.staging.put
        parts = stacked.split([sum(span.size for span in spans) for _, _, spans in rows])
        for (name, _, spans), target in zip(rows, parts, strict=True):
            # On a GPU the conversion makes a copy: a few rows at a time, so that it stays small.
            copy_spans(target, self.checkpoint.tensor(name), spans, columns, _ELEMENTS_AT_ONCE, put)
        return stacked

    def check(self, name: str, expected: tuple[int, ...]) -> None:
        """Check a tensor's shape and dtype before memory is allocated for it."""
        found, dtype = self.checkpoint.shape(name), self.checkpoint.dtype(name)
        if found != expected:
            raise TensorError(
                f"{self.checkpoint.directory}: {name}: expected shape {list(expected)}, as config.json says, "
                f"found {list(found)}: check that config.json belongs to these weights"
            )
        if dtype not in _FLOATING:
            raise TensorError(
                f"{self.checkpoint.directory}: {name}: expected floating point of 16 to 64 bits, found {dtype}: "
                "use a checkpoint whose config.json says how it is quantized"
            )

    def read_quantized(self, parameter: str, rows: int, columns: int) -> QTensor:
        """The quantized matrix `[rows, columns]` on the CPU, its parts stacked."""
        format, scheme = cast(Format, self.format), self.schemes[parameter]
        stacked, width, own = self.spans(parameter, (rows, columns))
        parts = []
        for name, count, spans in stacked:
            part = format.from_tensors(self.checkpoint, prefix_of(name), scheme)
            if part.shape != (count, width):
                raise TensorError(
                    f"{self.checkpoint.directory}: {name}: expected shape {[count, width]}, as "
                    f"config.json says, found {list(part.shape)}"
                )
            where = f"{self.checkpoint.directory}: {name}"
            parts += [quantized_columns(piece, own or (), where) for piece in quantized_rows(part, spans)]
        # Concatenating copies: the result must not be a memory map of a file that may change.
        return QTensor.concatenate(parts)


def _layer_of(parameter: str) -> int | None:
    """The number of the layer that a parameter belongs to."""
    return int(parameter.split(".")[1]) if parameter.startswith("layers.") else None

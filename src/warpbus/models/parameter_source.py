"""Reads the parameters of a decoder from a checkpoint: checks their names, shapes and dtypes, and places them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import nn

from warpbus.cuda.staging import PinnedStaging
from warpbus.errors import CheckpointError, TensorError
from warpbus.formats import Checkpoint
from warpbus.formats.dequantizing import dequantized, dequantized_reordered
from warpbus.formats.format import Format, format_of
from warpbus.formats.kv_cache import scale_names
from warpbus.kernels.ops.packed import PackedWeight
from warpbus.kernels.ops.trellis_packed import PackedTrellis
from warpbus.models.config import ModelConfig
from warpbus.models.decoder import Decoder
from warpbus.models.families import BY_NAME, TensorMap
from warpbus.models.kv_scales import attention_prefix, kv_cache_scheme
from warpbus.models.layer_spec import FLOAT32_PARAMETERS
from warpbus.models.layers import MoE, QuantizedEmbedding, QuantizedLinear
from warpbus.models.parallel import Part, Put, Spans, copy_spans, joined, quantized_columns, quantized_rows
from warpbus.models.placement import place, round_onto
from warpbus.models.row_order import spans_in_file
from warpbus.models.stored_schemes import prefix_of, read_stored_schemes
from warpbus.qtensor import QTensor, Scheme

_log = logging.getLogger("warpbus.models")

# Constants that some exporters wrote next to the weights.
_KNOWN_EXTRAS = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")
_PREFIX_ENCODER = "transformer.prefix_encoder."
_ELEMENTS_AT_ONCE = 2**24
_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def tensor_map(config: ModelConfig) -> TensorMap:
    """Map each parameter of the decoder to the tensors of the checkpoint that are stacked along its rows."""
    return BY_NAME[config.family].tensors(config)


@dataclass(frozen=True)
class ParameterSource:
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
    ) -> "ParameterSource":
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

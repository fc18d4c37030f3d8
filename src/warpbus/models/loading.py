"""From a checkpoint to a decoder, one tensor at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from warpbus.cuda.staging import PinnedStaging
from warpbus.dist import Group
from warpbus.errors import CheckpointError, TensorError, UnknownArchitectureError, UsageError
from warpbus.formats import Checkpoint
from warpbus.formats.layout import Layout, layout_of
from warpbus.kernels.ops.packed import PackedWeight
from warpbus.models.config import ModelConfig
from warpbus.models.decoder import Decoder, DecoderLayer
from warpbus.models.families import BY_NAME, MODEL_TYPES, TensorMap, family_of
from warpbus.models.families.fields import Fields
from warpbus.models.layers import QuantizedLinear
from warpbus.models.parallel import Lines, Part, Put, copy_lines, joined, quantized_columns, quantized_rows
from warpbus.models.placement import place, round_onto
from warpbus.models.row_order import lines_in_file
from warpbus.qtensor import QTensor, Scheme

Progress = Callable[[int, int], None]
"""Called with the bytes of the file that have been read so far, and with all that will be."""

# Constants that some exporters wrote next to the weights.
_KNOWN_EXTRAS = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")
_PREFIX_ENCODER = "transformer.prefix_encoder."
_ELEMENTS_AT_ONCE = 2**24
_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """Read what a checkpoint's config.json and generation_config.json say of the model.

    The stop ids are those of generation_config.json where it names any. Ids past the vocabulary, which are never
    generated, are left out.

    Raises:
        UnknownArchitectureError: for a model_type that no family declares.
        CheckpointError: for a value that is missing, senseless or not supported; the message names its key.
    """
    generation = Fields(checkpoint.load_json("generation_config.json") or {}, "generation_config.json")
    try:
        config = _parsed(checkpoint.config)
        stop_ids = generation.token_ids("eos_token_id", config.stop_ids)
    except CheckpointError as error:
        raise type(error)(f"{checkpoint.directory}: {error}") from None
    return replace(config, stop_ids=tuple(token for token in stop_ids if token < config.vocab_size))


def check_loadable(config: dict[str, Any], *, processes: int = 1) -> None:
    """What can be said against a model before its weights are there.

    Args:
        config: its `config.json`.
        processes: that are to share it.

    Raises:
        CheckpointError: as of `read_config`.
        UsageError: it cannot be cut for so many.
    """
    Part(_parsed(config), 0, processes)


def _parsed(config: dict[str, Any]) -> ModelConfig:
    family = family_of(config)
    if family is None:
        raise UnknownArchitectureError(
            f"config.json: model_type: {config.get('model_type')!r} is not supported: "
            f"expected one of {', '.join(MODEL_TYPES)}"
        )
    return family.config(config)


def tensor_map(config: ModelConfig) -> TensorMap:
    """From each parameter of the decoder to the checkpoint's tensors that are stacked along rows to make it."""
    return BY_NAME[config.family].tensors(config)


def part_rows(config: ModelConfig, parameter: str, count: int, total: int) -> list[int]:
    """How the `total` rows of a decoder's parameter are shared by the `count` tensors of the file that make it."""
    matrix = config.matrix(parameter)
    return [total] if matrix is None else matrix.part_rows(count)


def load_model(
    checkpoint: Checkpoint,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
    linears: Scheme | None = None,
    head: Scheme | None = None,
    embedding: torch.device | str | None = None,
    group: Group | None = None,
) -> Decoder:
    """Load a whole model, plain or quantized in any format that `warpbus.formats` reads, for inference.

    At most one tensor of the file is in memory besides the model (for a fused quantized matrix, its parts); it is on
    the CPU, and goes to a GPU a piece at a time.

    Args:
        device: where the model will lie.
        dtype: of its parameters and activations. Where kernels take the quantized matrices packed, their scales are
            rounded to it; elsewhere they keep the file's.
        progress: see `Progress`.
        linears: a symmetric scheme that the matrices of the layers are rounded to as they come, but for those that the
            file has quantized.
        head: the same for the head.
        embedding: where the embedding lies, if not on `device`. A tied head cannot be apart from it, but rounded.
        group: the processes that compute the model together, each on its own device with a part of it, see
            `warpbus.models.parallel`. `config` of the decoder is then that of the part, but for the vocabulary; hidden
            states and logits are the whole ones, with the same bits on every process. Each has the whole embedding,
            and reads no more than its part of the file, or of formats other than compressed-tensors one matrix at a
            time.

    Returns:
        the decoder in eval mode, its parameters without gradients.

    Raises:
        TensorError: if a tensor is missing or has the wrong shape or type.
        CheckpointError: if the config is not understood, or if there are weights that the decoder has no use for.
        UsageError: more processes than the model can be cut for, or a scheme that does not fit a matrix.
    """
    config = read_config(checkpoint)
    part = None if group is None or group.world == 1 else Part(config, group.rank, group.world)
    with torch.device("meta"):
        model = Decoder(config if part is None else part.config)
    if part is not None:
        part.narrow(model)
    source = replace(
        _Source.open(checkpoint, config, device, dtype), linears=linears, head=head, embedding=embedding, part=part
    )
    total = source.nbytes(list(source.tensors))
    done = 0
    for parameter in source.tensors:
        if part is None or part.has(parameter):
            source.fill(model, parameter, parameter)
        done += source.nbytes([parameter])
        if progress is not None:
            progress(done, total)
    if config.tie_embeddings:
        source.check_tied_head(model.embedding.weight)
        tied = model.embedding.weight if part is None else part.tied_head(model.embedding.weight)
        if head is None:
            model.head.weight = tied
        else:
            model.add_module("head", QuantizedLinear(round_onto(tied, head, device, dtype), dtype=dtype))
    if part is not None and group is not None:
        part.join(model, group)
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # what was in between the file and the model
    return model.eval()


def quantized_parameters(checkpoint: Checkpoint, config: ModelConfig) -> Mapping[str, Scheme]:
    """The parameters of the decoder whose matrices the file has in quantized form, and their schemes.

    Raises:
        CheckpointError: as `load_model`.
    """
    return _Source.open(checkpoint, config, "cpu", torch.float32).schemes


def load_layer(
    checkpoint: Checkpoint,
    config: ModelConfig,
    index: int,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> DecoderLayer:
    """Load one layer alone; arguments, result and errors as in `load_model`.

    Raises:
        UsageError: if there is no layer `index`.
    """
    if not 0 <= index < config.num_layers:
        raise UsageError(f"layer {index}: expected 0 to {config.num_layers - 1}, the layers of {checkpoint.directory}")
    with torch.device("meta"):
        layer = DecoderLayer(config.layers[index], config.rope)
    source = _Source.open(checkpoint, config, device, dtype)
    prefix = f"layers.{index}."
    for parameter in source.tensors:
        if parameter.startswith(prefix):
            source.fill(layer, parameter, parameter.removeprefix(prefix))
    return layer.eval()


@dataclass(frozen=True)
class _Source:
    """A checkpoint with its names translated, and where its tensors are to go.

    Attributes:
        layout: how the file holds quantized matrices; None if it has none.
        schemes: of the parameters whose matrices it has quantized.
        part: what of the model is read; all where it is None.
        staging: what copies tensors to a GPU.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    tensors: TensorMap
    layout: Layout | None
    schemes: Mapping[str, Scheme]
    device: torch.device | str
    dtype: torch.dtype
    linears: Scheme | None = None
    head: Scheme | None = None
    embedding: torch.device | str | None = None
    part: Part | None = None
    staging: PinnedStaging | None = None

    @classmethod
    def open(
        cls, checkpoint: Checkpoint, config: ModelConfig, device: torch.device | str, dtype: torch.dtype
    ) -> "_Source":
        """Compare the names in the file with those that the decoder needs, before anything is read."""
        layout, tensors = layout_of(checkpoint.config), tensor_map(config)
        schemes = {} if layout is None else _read_schemes(checkpoint, layout, tensors)
        staging = PinnedStaging(torch.device(device)) if torch.device(device).type == "cuda" else None
        source = cls(checkpoint, config, tensors, layout, schemes, device, dtype, staging=staging)
        source.refuse_prefix()
        source.refuse_unexpected()
        return source

    def files_names(self, parameter: str) -> list[str]:
        """The tensors that are in the file for this parameter."""
        names = self.tensors[parameter]
        if self.layout is None or parameter not in self.schemes:
            return list(names)
        return [stored for name in names for stored in self.layout.stored(self.checkpoint, _prefix(name))]

    def nbytes(self, parameters: list[str]) -> int:
        """Bytes of these parameters in the file. Raises TensorError if one is missing."""
        return sum(self.checkpoint.nbytes(name) for parameter in parameters for name in self.files_names(parameter))

    def refuse_prefix(self) -> None:
        """A prefix of ChatGLM's P-Tuning belongs beside a model; that config.json tells of one does no harm."""
        name = next((name for name in self.checkpoint.names() if name.startswith(_PREFIX_ENCODER)), None)
        if name is not None:
            raise CheckpointError(
                f"{self.checkpoint.directory}: {name}: this is a P-Tuning prefix: give it as an adapter, beside the "
                "model that it was trained on"
            )

    def refuse_unexpected(self) -> None:
        """Weights that the decoder would leave out mean another architecture than config.json says."""
        expected = {name for parameter in self.tensors for name in self.files_names(parameter)}
        if self.config.tie_embeddings:
            expected.add(self.tied_head_name)
        extras = [name for name in self.checkpoint.names() if name not in expected]
        extras = [name for name in extras if not (name.endswith(_KNOWN_EXTRAS) or self.is_zero_bias(name))]
        if extras:
            shown = ", ".join(extras[:3]) + (f" and {len(extras) - 3} more" if len(extras) > 3 else "")
            raise CheckpointError(
                f"{self.checkpoint.directory}: unexpected weights {shown}: a {self.config.family} model with this "
                "config.json has none of that name: check that config.json belongs to these weights"
            )

    def is_zero_bias(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros, as AutoGPTQ gave every layer that it quantized."""
        prefix = name.removesuffix(".bias")
        if prefix == name or self.layout is None or not self.layout.is_quantized(self.checkpoint, prefix):
            return False
        return not bool(self.checkpoint.tensor(name).any())

    @property
    def tied_head_name(self) -> str:
        """What the head would be called if it were not the embedding."""
        return tensor_map(replace(self.config, tie_embeddings=False))["head.weight"][0]

    def check_tied_head(self, embedding: torch.Tensor) -> None:
        """Some files hold a tied head a second time; one that differs is not tied."""
        name = self.tied_head_name
        if name not in self.checkpoint:
            return
        head = self.checkpoint.tensor(name, expected=tuple(embedding.shape))
        if not torch.equal(head.to(self.dtype), embedding.to("cpu")):
            raise CheckpointError(
                f"{self.checkpoint.directory}: {name}: it differs from the embedding, although config.json says "
                "tie_word_embeddings: set that to false"
            )

    def fill(self, module: nn.Module, parameter: str, path: str) -> None:
        """Read the decoder's `parameter` and put it at `path` within `module`."""
        owner_path, _, leaf = path.rpartition(".")
        owner = module.get_submodule(owner_path)
        scheme = self.rounded_to(parameter, owner)
        if parameter in self.schemes:
            if not isinstance(owner, nn.Linear):
                names = ", ".join(self.tensors[parameter])
                raise CheckpointError(f"{self.checkpoint.directory}: {names}: only linear layers may be quantized")
            self.put(module, owner_path, place(self.read_quantized(parameter, owner), self.device, self.dtype))
            return
        shape = tuple(getattr(owner, leaf).shape)
        if scheme is not None:
            scheme.groups(shape[1], parameter)
            rounded = round_onto(self.read_plain(parameter, shape, "cpu"), scheme, self.device, self.dtype)
            self.put(module, owner_path, rounded)
            return
        device = self.embedding if parameter == "embedding.weight" else None
        tensor = self.read_plain(parameter, shape, device or self.device)
        if isinstance(owner, QuantizedLinear):
            owner.bias = tensor
        else:
            setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))

    def rounded_to(self, parameter: str, owner: nn.Module) -> Scheme | None:
        """The scheme that a plain matrix is to be rounded to."""
        if parameter == "head.weight":
            return self.head
        return self.linears if isinstance(owner, nn.Linear) and parameter.endswith(".weight") else None

    def put(self, module: nn.Module, path: str, weight: QTensor | PackedWeight) -> None:
        """A quantized layer in the place of the linear one at `path` within `module`."""
        parent, _, name = path.rpartition(".")
        linear = cast(nn.Linear, module.get_submodule(path))
        bias = None if linear.bias is None else linear.bias.data
        setattr(module.get_submodule(parent), name, QuantizedLinear(weight, bias, dtype=self.dtype))

    def lines(self, parameter: str, shape: tuple[int, ...]) -> tuple[list[tuple[str, int, Lines]], int, Lines | None]:
        """What is read of the file for a parameter of this shape.

        Returns:
            of each tensor its name, how many rows it has and which are read; how many columns they have, and which are
            read (0 and None where a parameter is a vector).
        """
        part = self.part or Part(self.config, 0, 1)
        names = self.tensors[parameter]
        fused = part.rows(parameter, shape[0])
        if len(names) == 1:
            count, lines = joined(fused)
            fused = ((count, lines_in_file(self.config, parameter, lines)),)
        rows = [(name, count, lines) for name, (count, lines) in zip(names, fused, strict=True)]
        return rows, *(part.columns(parameter, shape[1]) if len(shape) == 2 else (0, None))

    def read_plain(self, parameter: str, shape: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
        """The parameter in the wanted dtype and place, its parts stacked."""
        rows, width, columns = self.lines(parameter, shape)
        for name, count, _ in rows:
            self.check(name, (count, width) if columns else (count,))
        stacked = torch.empty(shape, dtype=self.dtype, device=device)
        put: Put = torch.Tensor.copy_ if self.staging is None or stacked.device.type == "cpu" else self.staging.put
        parts = stacked.split([sum(span.size for span in lines) for _, _, lines in rows])
        for (name, _, lines), target in zip(rows, parts, strict=True):
            # A GPU converts a copy that it makes first: of some rows at a time, not of the whole tensor.
            copy_lines(target, self.checkpoint.tensor(name), lines, columns, _ELEMENTS_AT_ONCE, put)
        return stacked

    def check(self, name: str, expected: tuple[int, ...]) -> None:
        """Refuse a tensor before memory is set aside for it."""
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

    def read_quantized(self, parameter: str, linear: nn.Linear) -> QTensor:
        """The quantized matrix on the CPU, its parts stacked."""
        layout, scheme = cast(Layout, self.layout), self.schemes[parameter]
        rows, width, columns = self.lines(parameter, (linear.out_features, linear.in_features))
        parts = []
        for name, count, lines in rows:
            part = layout.from_tensors(self.checkpoint, _prefix(name), scheme)
            if part.shape != (count, width):
                raise TensorError(
                    f"{self.checkpoint.directory}: {name}: expected shape {[count, width]}, as "
                    f"config.json says, found {list(part.shape)}"
                )
            where = f"{self.checkpoint.directory}: {name}"
            parts += [quantized_columns(piece, columns or (), where) for piece in quantized_rows(part, lines)]
        # Stacking also makes a copy: what stays in memory must not be a map of a file that may change.
        return QTensor.concatenate(parts)


def _read_schemes(checkpoint: Checkpoint, layout: Layout, tensors: TensorMap) -> dict[str, Scheme]:
    """The schemes of the parameters whose matrices a file has quantized."""
    declared = layout.read_schemes(checkpoint.config)
    schemes = {}
    for parameter, names in tensors.items():
        prefixes = [_prefix(name) for name in names]
        kinds = [parameter.endswith(".weight") and layout.is_quantized(checkpoint, prefix) for prefix in prefixes]
        if not any(kinds):
            continue
        if not all(kinds):
            raise CheckpointError(
                f"{checkpoint.directory}: {', '.join(names)}: some of them are quantized and some are not: "
                "expected all or none, since they are computed as one matrix"
            )
        found = [declared.of(prefix) for prefix in prefixes]
        scheme = found[0]
        if any(other != scheme for other in found):
            listed = ", ".join(f"{prefix} {other or 'none'}" for prefix, other in zip(prefixes, found, strict=True))
            raise CheckpointError(
                f"{checkpoint.directory}: config.json: schemes of {listed}: expected one scheme, since they are "
                "computed as one matrix"
            )
        if scheme is None:
            raise CheckpointError(
                f"{checkpoint.directory}: {names[0]}: it is stored quantized, but no group of config.json's "
                "quantization_config has it: name it among the targets of one, or take it out of ignore"
            )
        schemes[parameter] = scheme
    return schemes


def _prefix(name: str) -> str:
    return name.removesuffix(".weight")

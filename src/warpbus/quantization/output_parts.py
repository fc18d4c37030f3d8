"""The output of a run: the parts of the new checkpoint, the tensors of each, and their entries in config.json."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from warpbus.formats import Checkpoint, FinishedParts
from warpbus.models import DecoderLayer
from warpbus.models.kv_scales import attention_prefix
from warpbus.models.loading import part_rows
from warpbus.models.row_order import in_decoder_order, in_file_order
from warpbus.qtensor import QTensor
from warpbus.quantization.preflight import Matrix, Plan
from warpbus.quantization.statistics import scales_of

# Bytes of a part that holds tensors from outside of the layers. Embedding and head are parts of their own: what is
# being written counts as this process's memory.
_PART_BYTES = 2**26


def layer_part(index: int) -> str:
    """The name of the part that holds a decoder layer."""
    return f"layer-{index:05}"


def end_parts(plan: Plan) -> list[tuple[str, list[str]]]:
    """The parts for what is outside of the layers, and the names of their tensors."""
    parts: list[list[str]] = []
    size = _PART_BYTES
    for name in plan.ends:
        nbytes = plan.checkpoint.nbytes(name)
        if not parts or size + nbytes > _PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += nbytes
    return [(f"ends-{number}", names) for number, names in enumerate(parts)]


def kept_end_parts(plan: Plan) -> list[tuple[str, list[str]]]:
    """All parts of what is outside of the layers, and the tensors of the original that each is made of."""
    return end_parts(plan) + [(part, [end.source]) for part, end in plan.quantized_ends.items()]


def is_readable(parts: FinishedParts, part: str) -> bool:
    """Whether a part is there; one that is damaged is not."""
    return parts.facts(part) is not None


def kept_parameters(plan: Plan, index: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The parameters of a layer that are not quantized, and the names of the tensors that make each of them."""
    prefix = f"layers.{index}."
    kept = set(plan.kept[index])
    for parameter, names in plan.tensors.items():
        if parameter.startswith(prefix) and kept.issuperset(names):
            yield parameter.removeprefix(prefix), tuple(names)


def kept_tensors(plan: Plan, index: int, changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer that are not quantized: as the checkpoint has them, or parameters that were changed."""
    checkpoint = plan.checkpoint
    tensors: dict[str, Tensor] = {}
    for parameter, names in kept_parameters(plan, index):
        if parameter not in changed:
            tensors |= {name: checkpoint.tensor(name) for name in names}
            continue
        whole = in_file_order(plan.config, parameter, changed[parameter].detach())
        rows = part_rows(plan.config, f"layers.{index}.{parameter}", len(names), len(whole))
        for name, piece in zip(names, whole.split(rows), strict=True):
            tensors[name] = piece.to(checkpoint.dtype(name), copy=True)
    return tensors


def kv_scale_tensors(plan: Plan, index: int, largest: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
    """The scales of a layer's KV cache as tensors of the checkpoint; none if none are asked for."""
    if plan.kv_cache is None or largest is None:
        return {}
    return plan.kv_cache.to_tensors(attention_prefix(plan.config, index), *scales_of(plan.kv_cache, largest))


def stored_tensors(plan: Plan, matrix: Matrix, weight: QTensor) -> dict[str, Tensor]:
    """A quantized matrix as the tensors of the checkpoint.

    Raises:
        SchemeError: if the format cannot hold its zero points.
    """
    tensors: dict[str, Tensor] = {}
    weight = in_file_order(plan.config, f"{matrix.name}.weight", weight)
    start = 0
    for source, rows in zip(matrix.sources, matrix.rows, strict=True):
        part = weight.rows(start, start + rows)
        if part.zeros is not None:
            plan.format.check_zeros(part.zeros, source)
        tensors |= plan.format.to_tensors(source.removesuffix(".weight"), part)
        start += rows
    return tensors


def stored_layer(parts: FinishedParts, index: int) -> Checkpoint:
    """The tensors of a finished layer."""
    return Checkpoint.of_tensors(parts.directory, parts.read(layer_part(index)))


def quantized_matrix(plan: Plan, part: Checkpoint, matrix: Matrix) -> QTensor:
    """A quantized matrix of a finished layer, as it is in the decoder, on the CPU."""
    pieces = [
        plan.format.from_tensors(part, source.removesuffix(".weight"), matrix.scheme) for source in matrix.sources
    ]
    return in_decoder_order(plan.config, f"{matrix.linear}.weight", QTensor.concatenate(pieces))


def restore_kept(plan: Plan, part: Checkpoint, index: int, layer: DecoderLayer) -> None:
    """Put the parameters of a finished layer that are not quantized into the layer."""
    for parameter, names in kept_parameters(plan, index):
        whole = torch.cat([part.tensor(name) for name in names])
        layer.get_parameter(parameter).data.copy_(in_decoder_order(plan.config, parameter, whole))


def quantization_config(plan: Plan) -> dict[str, Any]:
    """The `quantization_config` of `config.json`."""
    schemes = {source.removesuffix(".weight"): matrix.scheme for matrix in plan.matrices for source in matrix.sources}
    for end in plan.quantized_ends.values():
        schemes[end.name.removesuffix(".weight")] = end.scheme
    distinct = {*schemes.values()}
    only = distinct.pop() if len(distinct) == 1 and not plan.quantized_ends else schemes
    found = plan.format.quantization_config(only, plan.unquantized)
    return found if plan.kv_cache is None else found | {"kv_cache_scheme": plan.kv_cache.to_json()}


def written_config(plan: Plan) -> dict[str, Any]:
    """The config.json of the new checkpoint."""
    config = plan.checkpoint.config | {"quantization_config": quantization_config(plan)}
    return config | ({"tie_word_embeddings": False} if plan.head is not None and plan.head.is_untied else {})

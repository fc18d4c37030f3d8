"""The compressed-tensors formats, which vLLM, SGLang and transformers load.

`pack-quantized`: a linear layer `prefix` of `out` rows and `in` columns is stored as

    prefix.weight_packed      int32 [out, ceil(in * bits / 32)]      codes, a dense stream of bits along `in`
    prefix.weight_scale       float [out, groups]                    groups = 1: one scale per row, strategy "channel"
    prefix.weight_zero_point  int32 [ceil(out * bits / 32), groups]  asymmetric schemes only, packed along `out`
    prefix.weight_shape       int64 [2]                              out, in

and read as `weight = (code - zero) * scale`, where a symmetric scheme's zero is `2**(bits - 1)`. compressed-tensors
reads 2, 4 and 8 bits in every release, 3 bits from release 0.18 on: older ones put ten values of 3 bits in a word
and leave two bits of it unused. That older layout is recognized by its width and refused.

`int-quantized` and `float-quantized` (w8a8-int8, w8a8-fp8), read as `weight = value * scale`:

    prefix.weight        int8 or float8_e4m3fn [out, in]
    prefix.weight_scale  float [out, 1]

Layers of different schemes are groups of `config_groups`, each with the names of its layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import CheckpointError, SchemeError, TensorError
from warpbus.formats.checkpoint import Checkpoint
from warpbus.formats.fp4 import describe_fp4, fp4_from_tensors, fp4_to_tensors
from warpbus.formats.kv_cache import read_kv_cache_scheme
from warpbus.formats.reading import (
    matrix_shape,
    read_scales,
    read_tensor,
    require,
    section,
    unreadable,
    whole_number,
)
from warpbus.qtensor import QTensor, Scheme, Schemes, pack, packed_words, unpack

PARTS = (
    ".weight",
    ".weight_packed",
    ".weight_scale",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_global_scale",
)
"""The endings of the tensors that a quantized matrix may have."""

_WHERE = "quantization_config"
_METHOD = "compressed-tensors"
_FORMATS = {None: "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}  # by a scheme's activations
_MIXED = "mixed-precision"
_TYPES = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float"}
_EVERY = "Linear"  # the target that means every linear layer
_EMBEDDING = "Embedding"  # the target that means the embedding
_EMBEDDINGS = ("embed_tokens", "word_embeddings")  # its last names
_HEADS = ("lm_head", "output_layer")  # for engines, the head is no "Linear": it has to be named

_KNOWN = {"num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder"}
# Keys that say how weights were chosen, or repeat what the tensors say: they do not change how weights are read.
_IRRELEVANT = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}


def quantization_config(schemes: Scheme | Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of `config.json`.

    Args:
        schemes: that of all quantized linear layers, or that of each by its name, `model.layers.0.mlp.down_proj`; and
            that of the embedding by its name, `model.embed_tokens`.
        ignore: names of the linear layers that are not quantized, for instance `lm_head`.
    """
    of_layers = {_EVERY: schemes} if isinstance(schemes, Scheme) else {_target(name): schemes[name] for name in schemes}
    ends = {name: each for name, each in of_layers.items() if name == _EMBEDDING or name.rpartition(".")[2] in _HEADS}
    inner = {name: scheme for name, scheme in of_layers.items() if name not in ends}
    if len(set(inner.values())) == 1:
        inner = {_EVERY: next(iter(inner.values()))}
    of_layers = inner | ends
    distinct = list(dict.fromkeys(of_layers.values()))
    formats = [_format(scheme) for scheme in distinct]
    mixed = len(set(formats)) > 1
    groups = {}
    for index, (scheme, stored_as) in enumerate(zip(distinct, formats, strict=True)):
        # All by their names: engines that fuse layers look for "Linear" before they look for the parts' names.
        targets = [name for name, other in of_layers.items() if other == scheme]
        groups[f"group_{index}"] = _describe(scheme, targets) | ({"format": stored_as} if mixed else {})
    return {
        "quant_method": _METHOD,
        "format": _MIXED if mixed else formats[0],
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": groups,
    }


def _target(name: str) -> str:
    """What a group names a matrix by: the embedding by its class, as engines may look for that without its name."""
    return _EMBEDDING if name.rpartition(".")[2] in _EMBEDDINGS else name


def _format(scheme: Scheme) -> str:
    return _FORMATS[scheme.activations] if scheme.element is None else f"{scheme.element}-pack-quantized"


def _describe(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    if scheme.element is not None:
        return describe_fp4(scheme, targets)
    stored_as = _FORMATS[scheme.activations]
    weights: dict[str, Any] = {"num_bits": scheme.bits, "type": _TYPES[stored_as], "symmetric": scheme.symmetric}
    if scheme.group_size is None:
        weights |= {"strategy": "channel"}
    else:
        weights |= {"strategy": "group", "group_size": scheme.group_size}
    activations = None
    if scheme.activations is not None:
        activations = weights | {"strategy": "token", "dynamic": True}
    return {"targets": targets, "input_activations": activations, "weights": weights | {"dynamic": False}}


def detect(config: dict[str, Any]) -> bool:
    """Whether a config.json describes this format."""
    found = config.get(_WHERE)
    return isinstance(found, dict) and found.get("quant_method") == _METHOD


def read_schemes(config: dict[str, Any]) -> Schemes:
    """The schemes of a model's layers by their names in the checkpoint, from its `config.json`.

    A layer belongs to the group that names it, else to one with a fitting `re:` pattern, else to one of "Linear", or,
    the embedding, to one of "Embedding"; and to none if `ignore` names it.

    Raises:
        CheckpointError: if the model is quantized in a way that is not understood.
    """
    quantization = section(config)
    require(quantization, _WHERE, "quant_method", (_METHOD,))
    check_section(quantization)
    read_kv_cache_scheme(config)
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise unreadable(f"{_WHERE}.config_groups", groups, "at least one group")
    targets: dict[str, Scheme] = {}
    for name, group in groups.items():
        scheme = _read_group(name, group, quantization.get("format"))
        where = f"{_WHERE}.config_groups.{name}.targets"
        for target in _names(group.get("targets"), where):
            if targets.setdefault(target, scheme) != scheme:
                raise unreadable(where, target, f"in one group only (in another it is {targets[target]})")
    default, embedding = targets.pop(_EVERY, None), targets.pop(_EMBEDDING, None)
    exceptions: dict[str, Scheme | None] = dict.fromkeys(_names(quantization.get("ignore"), f"{_WHERE}.ignore"))
    for target in sorted(targets, key=lambda target: target.startswith("re:")):
        exceptions.setdefault(target, targets[target])
    if embedding is not None:
        exceptions |= {f"re:.*{name}$": embedding for name in _EMBEDDINGS}
    try:
        return Schemes(default, exceptions)
    except SchemeError as error:
        raise CheckpointError(f"config.json: {_WHERE}: {error}") from error


def check_section(quantization: dict[str, Any]) -> None:
    """Check what `quantization_config` says besides its groups. Raises CheckpointError if it is not supported."""
    require(quantization, _WHERE, "quantization_status", ("compressed", None))
    for key in ("sparsity_config", "moe_sparsity_config", "transform_config"):
        found = quantization.get(key)
        if found and not (isinstance(found, dict) and found.get("format") == "dense"):
            raise unreadable(f"{_WHERE}.{key}", found, "absent")


def _names(value: object, where: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise unreadable(where, value, "a list of names")
    return value


def to_tensors(prefix: str, weight: QTensor) -> dict[str, Tensor]:
    """A quantized matrix as the tensors of a checkpoint, for instance `model.layers.0.mlp.down_proj.weight_packed`."""
    if weight.scheme.element is not None:
        return fp4_to_tensors(prefix, weight)
    if weight.holds_values:
        return {f"{prefix}.weight": weight.qweight, f"{prefix}.weight_scale": weight.scales}
    tensors = {
        f"{prefix}.weight_packed": weight.qweight,
        f"{prefix}.weight_scale": weight.scales,
        f"{prefix}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if weight.zeros is not None:
        tensors[f"{prefix}.weight_zero_point"] = pack(weight.zeros.T, weight.scheme.bits).T.contiguous()
    return tensors


def from_tensors(checkpoint: Checkpoint, prefix: str, scheme: Scheme) -> QTensor:
    """Read a quantized matrix.

    Raises:
        TensorError: if one of its tensors is missing or has the wrong shape or type.
        CheckpointError: if its columns were reordered, or its 3-bit codes packed by an old release.
        SchemeError: if the scheme's group size does not divide its columns.
    """
    if scheme.element is not None:
        return fp4_from_tensors(checkpoint, prefix, scheme)
    if f"{prefix}.weight_g_idx" in checkpoint:
        raise CheckpointError(
            f"{prefix}.weight_g_idx: columns reordered by activation (actorder group) have no such form: convert the "
            "model to float16 or bfloat16"
        )
    if scheme.activations is not None:
        return _read_values(checkpoint, prefix, scheme)
    out, columns = _read_shape(checkpoint, f"{prefix}.weight_shape")
    groups = scheme.groups(columns, prefix)
    words, old_words = packed_words(columns, scheme.bits), -(-columns // (32 // scheme.bits))
    name = f"{prefix}.weight_packed"
    if old_words != words and name in checkpoint and checkpoint.shape(name) == (out, old_words):
        raise CheckpointError(
            f"{name}: {scheme.bits}-bit values packed {32 // scheme.bits} to a word, as compressed-tensors before 0.18 "
            "did, are not supported: save the model again with a newer release"
        )
    packed = read_tensor(checkpoint, name, (out, words), torch.int32)
    scales = read_scales(checkpoint, f"{prefix}.weight_scale", (out, groups))
    zeros = None
    if not scheme.symmetric:
        zeros_shape = (packed_words(out, scheme.bits), groups)
        packed_zeros = read_tensor(checkpoint, f"{prefix}.weight_zero_point", zeros_shape, torch.int32)
        zeros = unpack(packed_zeros.T, scheme.bits, out).T.contiguous()
    return QTensor(scheme, packed, scales, zeros, (out, columns))


def is_quantized(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether the linear layer `prefix` is stored quantized."""
    return f"{prefix}.weight_packed" in checkpoint or f"{prefix}.weight_scale" in checkpoint


def _read_values(checkpoint: Checkpoint, prefix: str, scheme: Scheme) -> QTensor:
    name = f"{prefix}.weight"
    for part, meaning in {"input_scale": "static scales of activations", "weight_zero_point": "zero points"}.items():
        if f"{prefix}.{part}" in checkpoint:
            raise CheckpointError(
                f"{prefix}.{part}: {meaning} are not supported with 8-bit activations: quantize the model again with "
                f"dynamic, symmetric {scheme}"
            )
    shape = matrix_shape(checkpoint, name)
    values = read_tensor(checkpoint, name, shape, scheme.dtype)
    return QTensor.from_values(scheme, values, read_scales(checkpoint, f"{prefix}.weight_scale", (shape[0], 1)))


def _read_group(name: str, group: object, default_format: object) -> Scheme:
    where = f"{_WHERE}.config_groups.{name}"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise unreadable(where, group, "an object with weights")
    stored_as = group.get("format") or default_format
    if stored_as not in list(_TYPES):
        raise unreadable(f"{where}.format", stored_as, " or ".join(map(repr, _TYPES)))
    require(group, where, "output_activations", (None,))
    activations = next(kind for kind, name in _FORMATS.items() if name == stored_as)
    if activations is None:
        require(group, where, "input_activations", (None,))
    else:
        _check_activations(group.get("input_activations"), f"{where}.input_activations", _TYPES[stored_as])

    weights = group["weights"]
    where = f"{where}.weights"
    require(weights, where, "type", (_TYPES[stored_as],))
    require(weights, where, "dynamic", (False, None))
    require(weights, where, "strategy", ("group", "channel") if activations is None else ("channel",))
    require(weights, where, "actorder", (None, "static", "weight", "group"))
    require(weights, where, "symmetric", (True, False))
    _refuse_others(weights, where)
    group_size = None if weights["strategy"] == "channel" else whole_number(weights, where, "group_size")
    bits = whole_number(weights, where, "num_bits")
    try:
        return Scheme(bits, group_size, weights["symmetric"], activations)
    except SchemeError as error:
        raise CheckpointError(f"config.json: {where}: {error}") from error


def _check_activations(found: object, where: str, kind: str) -> None:
    """Only 8 bits, symmetric, with a scale for each token that is found when it comes by."""
    if not isinstance(found, dict):
        raise unreadable(where, found, "an object")
    only = {"dynamic": True, "strategy": "token", "num_bits": 8, "type": kind, "symmetric": True, "actorder": None}
    for key, value in only.items():
        require(found, where, key, (value,))
    _refuse_others(found, where)


def _refuse_others(found: dict[str, Any], where: str) -> None:
    for key in sorted(found.keys() - _KNOWN - _IRRELEVANT):
        require(found, where, key, (None,))


def _read_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    out, columns = (int(size) for size in read_tensor(checkpoint, name, (2,), torch.int64))
    if out < 1 or columns < 1:
        raise TensorError(f"{name}: expected two positive sizes, found {out} and {columns}")
    return out, columns

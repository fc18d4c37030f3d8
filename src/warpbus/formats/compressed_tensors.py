"""The compressed-tensors format `pack-quantized`, which vLLM, SGLang and transformers load.

A linear layer `prefix` of `out` rows and `in` columns is stored as

    prefix.weight_packed      int32 [out, ceil(in * bits / 32)]      codes, a dense stream of bits along `in`
    prefix.weight_scale       float [out, groups]                    groups = 1: one scale a row, strategy "channel"
    prefix.weight_zero_point  int32 [ceil(out * bits / 32), groups]  asymmetric schemes only, packed along `out`
    prefix.weight_shape       int64 [2]                              out, in

and read as `weight = (code - zero) * scale`, where a symmetric scheme's zero is `2**(bits - 1)`. compressed-tensors
reads 2, 4 and 8 bits in every release, 3 bits from release 0.18 on: older ones put ten values of 3 bits in a word
and leave two bits of it unused. That older layout is recognized by its width and refused.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import CheckpointError, SchemeError, TensorError
from warpbus.formats.checkpoint import Checkpoint
from warpbus.qtensor import QTensor, Scheme, pack, packed_words, unpack

_METHOD = "compressed-tensors"
_FORMAT = "pack-quantized"

# What says how weights were chosen, or repeats what the tensors themselves tell: it does not change how they are read.
_IRRELEVANT = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}


def quantization_config(scheme: Scheme, ignore: Sequence[str]) -> dict[str, Any]:
    """What `config.json` holds under `quantization_config`.

    Args:
        scheme: that of all quantized linear layers.
        ignore: names of the linear layers that are not quantized, for instance `lm_head`.
    """
    weights: dict[str, Any] = {"num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric}
    if scheme.group_size is None:
        weights |= {"strategy": "channel"}
    else:
        weights |= {"strategy": "group", "group_size": scheme.group_size}
    weights |= {"dynamic": False}
    return {
        "quant_method": _METHOD,
        "format": _FORMAT,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": weights}},
    }


def read_scheme(config: dict[str, Any]) -> Scheme | None:
    """The scheme of a model's quantized layers, from its `config.json`; `None` if it is not quantized.

    Raises:
        CheckpointError: if the model is quantized in a way that is not understood.
    """
    if config.get("quantization_bit"):
        raise _unreadable("quantization_bit", config["quantization_bit"], "absent (the integer format of THUDM)")
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        raise _unreadable("quantization_config", quantization, "an object")
    _require(quantization, "quantization_config", "quant_method", (_METHOD,))
    _require(quantization, "quantization_config", "quantization_status", ("compressed", None))
    for key in ("kv_cache_scheme", "sparsity_config", "moe_sparsity_config", "transform_config"):
        section = quantization.get(key)
        if section and not (isinstance(section, dict) and section.get("format") == "dense"):
            raise _unreadable(f"quantization_config.{key}", section, "absent")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _unreadable("quantization_config.config_groups", groups, "at least one group")
    schemes = {name: _read_group(name, group, quantization.get("format")) for name, group in groups.items()}
    if len(set(schemes.values())) > 1:
        listed = ", ".join(f"{name} {scheme}" for name, scheme in schemes.items())
        raise CheckpointError(
            f"config.json: quantization_config has groups of different schemes: {listed}; expected one"
        )
    return next(iter(schemes.values()))


def to_tensors(prefix: str, weight: QTensor) -> dict[str, Tensor]:
    """A quantized matrix as the tensors of a checkpoint, for instance `model.layers.0.mlp.down_proj.weight_packed`."""
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
    if f"{prefix}.weight_g_idx" in checkpoint:
        raise CheckpointError(
            f"{prefix}.weight_g_idx: columns reordered by activation (actorder group) are not supported: "
            "quantize the model again with actorder static"
        )
    out, columns = _read_shape(checkpoint, f"{prefix}.weight_shape")
    groups = scheme.groups(columns, prefix)
    words, old_words = packed_words(columns, scheme.bits), -(-columns // (32 // scheme.bits))
    name = f"{prefix}.weight_packed"
    if old_words != words and name in checkpoint and checkpoint.shape(name) == (out, old_words):
        raise CheckpointError(
            f"{name}: {scheme.bits}-bit values packed {32 // scheme.bits} to a word, as compressed-tensors before 0.18 "
            "did, are not supported: save the model again with a newer release"
        )
    packed = _read(checkpoint, name, (out, words), torch.int32)
    scales = checkpoint.tensor(f"{prefix}.weight_scale", expected=(out, groups))
    if not scales.is_floating_point():
        raise TensorError(f"{prefix}.weight_scale: expected a floating-point type, found {scales.dtype}")
    zeros = None
    if not scheme.symmetric:
        zeros_shape = (packed_words(out, scheme.bits), groups)
        packed_zeros = _read(checkpoint, f"{prefix}.weight_zero_point", zeros_shape, torch.int32)
        zeros = unpack(packed_zeros.T, scheme.bits, out).T.contiguous()
    return QTensor(scheme, packed, scales, zeros, (out, columns))


def is_quantized(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether the linear layer `prefix` is stored quantized."""
    return f"{prefix}.weight_packed" in checkpoint


def _read_group(name: str, group: object, default_format: object) -> Scheme:
    where = f"quantization_config.config_groups.{name}"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise _unreadable(where, group, "an object with weights")
    stored_as = group.get("format") or default_format
    if stored_as != _FORMAT:
        raise _unreadable(f"{where}.format", stored_as, repr(_FORMAT))
    for key in ("input_activations", "output_activations"):
        _require(group, where, key, (None,))

    weights = group["weights"]
    where = f"{where}.weights"
    _require(weights, where, "type", ("int",))
    _require(weights, where, "dynamic", (False, None))
    _require(weights, where, "strategy", ("group", "channel"))
    _require(weights, where, "actorder", (None, "static", "weight"))
    _require(weights, where, "symmetric", (True, False))
    known = {"num_bits", "type", "dynamic", "strategy", "group_size", "actorder", "symmetric"} | _IRRELEVANT
    for key in weights.keys() - known:
        _require(weights, where, key, (None,))
    bits, group_size = weights.get("num_bits"), weights.get("group_size")
    if weights["strategy"] == "channel":
        group_size = None
    elif type(group_size) is not int:
        raise _unreadable(f"{where}.group_size", group_size, "an integer")
    if type(bits) is not int:
        raise _unreadable(f"{where}.num_bits", bits, "an integer")
    try:
        return Scheme(bits, group_size, weights["symmetric"])
    except SchemeError as error:
        raise CheckpointError(f"config.json: {where}: {error}") from error


def _require(section: dict[str, Any], where: str, key: str, accepted: tuple[object, ...]) -> None:
    value = section.get(key)
    if not any(value is one or (type(value) is type(one) and value == one) for one in accepted):
        raise _unreadable(
            f"{where}.{key}", value, " or ".join("absent" if one is None else repr(one) for one in accepted)
        )


def _unreadable(where: str, found: object, expected: str) -> CheckpointError:
    described = ascii(found)
    if len(described) > 80:
        described = f"{described[:80]}..."
    return CheckpointError(
        f"config.json: {where} is {described}, expected {expected}: this kind of quantization is not supported"
    )


def _read(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if name in checkpoint and checkpoint.dtype(name) != dtype:
        raise TensorError(f"{name}: expected {dtype}, found {checkpoint.dtype(name)}")
    return checkpoint.tensor(name, expected=shape)


def _read_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    out, columns = (int(size) for size in _read(checkpoint, name, (2,), torch.int64))
    if out < 1 or columns < 1:
        raise TensorError(f"{name}: expected two positive sizes, found {out} and {columns}")
    return out, columns

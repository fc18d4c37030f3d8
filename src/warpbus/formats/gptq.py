"""The GPTQ format, versions 1 (`gptq`) and 2 (`gptq_v2`), of AutoGPTQ and GPTQModel.

A linear layer `prefix` of `out` rows and `in` columns is stored as

    prefix.qweight  int32 [in * bits / 32, out]      codes, a dense stream of bits along `in`
    prefix.qzeros   int32 [groups, out * bits / 32]  zero points, packed along `out`: v1 stores zero - 1, v2 zero
    prefix.scales   float16 [groups, out]
    prefix.g_idx    int32 [in]                       the group of each column

and read as `weight[o, i] = (code[o, i] - zero[g_idx[i], o]) * scale[g_idx[i], o]`. So `qweight` is a `QTensor`'s,
transposed; the zero point of a symmetric file is `2**(bits - 1)` everywhere.

Columns in an order of their own (`desc_act`, unless the groups were static) make a `g_idx` that goes back and forth
between groups. A `QTensor` has its groups side by side, and no order of the columns would serve the next matrix too,
which has another: such matrices are dequantized (`dequantizing`). Whole groups may lie in any order.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import CheckpointError, SchemeError, TensorError
from warpbus.formats.checkpoint import Checkpoint
from warpbus.formats.reading import (
    matrix_shape,
    read_scales,
    read_tensor,
    require,
    scheme_of,
    section,
    unreadable,
    whole_number,
)
from warpbus.qtensor import QTensor, Scheme, Schemes, pack, packed_words, unpack

PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
_WHERE = "quantization_config"
_HEADS = ("lm_head", "output_layer")  # the last part of a head's name
_VERSIONS = {1: "gptq", 2: "gptq_v2"}
_BITS = (2, 3, 4, 8)


def version(config: dict[str, Any]) -> int | None:
    """1 or 2, from a `config.json`; `None` if it describes another format.

    Raises:
        CheckpointError: for a packing of GPTQ's codes that is neither.
    """
    quantization = config.get(_WHERE)
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "gptq":
        return None
    key = "checkpoint_format" if quantization.get("checkpoint_format") is not None else "format"
    return 2 if require(quantization, _WHERE, key, (*_VERSIONS.values(), None)) == _VERSIONS[2] else 1


def read_schemes(config: dict[str, Any]) -> Schemes:
    """The schemes of the quantized layers of a GPTQ model.

    `dynamic` has those of single layers, by regular expressions of their names: after "-:" a layer that is not
    quantized, else one whose values replace those of the whole model.

    Raises:
        CheckpointError: if they are not understood.
    """
    quantization = section(config)
    dynamic = quantization.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise unreadable(f"{_WHERE}.dynamic", dynamic, "an object")
    exceptions: dict[str, Scheme | None] = {}
    for pattern, overrides in dynamic.items():
        where = f"{_WHERE}.dynamic.{pattern}"
        if not isinstance(overrides, dict):
            raise unreadable(where, overrides, "an object")
        left_out = pattern.startswith("-:")
        scheme = None if left_out else _scheme(quantization | overrides, where)
        exceptions["re:" + pattern.removeprefix("-:").removeprefix("+:")] = scheme
    try:
        return Schemes(_scheme(quantization, _WHERE), exceptions)
    except SchemeError as error:
        raise CheckpointError(f"config.json: {_WHERE}.dynamic: {error}") from error


def quantization_config(
    schemes: Scheme | Mapping[str, Scheme], ignore: Sequence[str], *, version: int
) -> dict[str, Any]:
    """The `quantization_config` of `config.json`.

    Args:
        schemes: that of all quantized linear layers, or that of each by its name, `model.layers.0.mlp.down_proj`.
        ignore: names of the linear layers that are not quantized, for instance `lm_head`.
    """
    layers = {"": schemes} if isinstance(schemes, Scheme) else schemes
    (default, _), *_ = Counter(layers.values()).most_common(1)
    dynamic: dict[str, dict[str, Any]] = {f"-:{_pattern(name)}": {} for name in ignore}
    dynamic |= {f"+:{_pattern(name)}": _describe(scheme) for name, scheme in layers.items() if scheme != default}
    return {
        "quant_method": "gptq",
        **_describe(default),
        "desc_act": False,
        "lm_head": any(name.rpartition(".")[2] in _HEADS for name in layers),
        "checkpoint_format": _VERSIONS[version],
        "dynamic": dynamic,
    }


def check(scheme: Scheme, shape: tuple[int, int], name: str) -> None:
    """Refuse what the format cannot hold.

    Raises:
        SchemeError: if the scheme is none of weights only, or the rows or columns do not fill whole words.
    """
    if scheme.bits not in _BITS:
        raise SchemeError(
            f"{name}: the GPTQ format has weights of 2, 3, 4 or 8 bits, not {scheme}: use compressed-tensors"
        )
    if scheme.activations is not None or scheme.element is not None:
        raise SchemeError(
            f"{name}: the GPTQ format has no {scheme}, only integer schemes of weights: use compressed-tensors"
        )
    scheme.groups(shape[1], name)
    for size, axis in zip(shape, ("rows", "columns"), strict=True):
        if size * scheme.bits % 32:
            values = 32 if scheme.bits == 3 else 32 // scheme.bits
            raise SchemeError(
                f"{name}: {size} {axis} of {scheme.bits} bits do not fill whole words: the GPTQ format needs a "
                f"multiple of {values}: pad the FFN if it is one of its matrices, or use compressed-tensors"
            )


def check_zeros(zeros: Tensor, name: str, *, version: int) -> None:
    """Refuse zero points that version 1 cannot hold. Raises SchemeError."""
    if version == 1 and bool((zeros == 0).any()):
        raise SchemeError(
            f"{name}: has zero points 0, which GPTQ v1 would store as -1, and its readers disagree on that: use gptq-v2"
        )


def to_tensors(prefix: str, weight: QTensor, *, version: int) -> dict[str, Tensor]:
    """A quantized matrix as the tensors of a checkpoint.

    Raises:
        SchemeError: see `check` and `check_zeros`.
        TensorError: if the scales are not float16.
    """
    scheme, (out, columns) = weight.scheme, weight.shape
    check(scheme, weight.shape, prefix)
    if weight.scales.dtype != torch.float16:
        raise TensorError(f"{prefix}: GPTQ's scales are float16, found {weight.scales.dtype}: convert them first")
    if weight.zeros is None:
        zeros = torch.full((weight.scales.shape[1], out), scheme.middle_code, dtype=torch.uint8)
    else:
        check_zeros(weight.zeros, prefix, version=version)
        zeros = weight.zeros.T.cpu()
    group_size = scheme.group_size or columns
    return {
        f"{prefix}.qweight": weight.qweight.T.contiguous(),
        f"{prefix}.qzeros": pack(zeros - (2 - version), scheme.bits),
        f"{prefix}.scales": weight.scales.T.contiguous(),
        f"{prefix}.g_idx": torch.arange(columns, dtype=torch.int32) // group_size,
    }


def is_quantized(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether the linear layer `prefix` is stored quantized."""
    return f"{prefix}.qweight" in checkpoint


def from_tensors(checkpoint: Checkpoint, prefix: str, scheme: Scheme, *, version: int) -> QTensor:
    """Read a quantized matrix.

    A symmetric file is taken at its word where its stored zero points are those of the other version: some exporters
    call a file v1 that stores what v2 does.

    Raises:
        TensorError: if one of its tensors is missing or has the wrong shape, type or values.
        CheckpointError: if its columns were reordered, or v1 does not tell its zero points.
        SchemeError: if the scheme's group size does not divide its columns.
    """
    words, out = matrix_shape(checkpoint, f"{prefix}.qweight")
    if words * 32 % scheme.bits:
        raise TensorError(
            f"{prefix}.qweight: {words} words hold no whole number of values of {scheme.bits} bits: "
            "check quantization_config in config.json"
        )
    columns = words * 32 // scheme.bits
    groups = scheme.groups(columns, prefix)
    packed = read_tensor(checkpoint, f"{prefix}.qweight", (words, out), torch.int32)
    scales = read_scales(checkpoint, f"{prefix}.scales", (groups, out))
    zeros = _read_zeros(checkpoint, f"{prefix}.qzeros", (groups, out), scheme, version)
    order = _read_order(checkpoint, f"{prefix}.g_idx", columns, groups)
    if order is not None:
        scales, zeros = scales[order], None if zeros is None else zeros[order]
    return QTensor(
        scheme,
        packed.T.contiguous(),
        scales.T.contiguous(),
        None if zeros is None else zeros.T.contiguous(),
        (out, columns),
    )


def _read_zeros(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], scheme: Scheme, version: int
) -> Tensor | None:
    """Zero points uint8 `[groups, out]`, or `None` for those of a symmetric scheme."""
    groups, out = shape
    packed = read_tensor(checkpoint, name, (groups, packed_words(out, scheme.bits)), torch.int32)
    stored = unpack(packed, scheme.bits, out)
    if scheme.symmetric:
        expected = scheme.middle_code - (2 - version)
        if not any(bool((stored == value).all()) for value in (scheme.middle_code - 1, scheme.middle_code)):
            wrong = int(stored[(stored != expected)][0])
            raise TensorError(
                f"{name}: stores {wrong}, expected {expected} everywhere, since config.json says that the scheme is "
                "symmetric: set sym to false"
            )
        return None
    if version == 1 and bool((stored == scheme.max_code).any()):
        raise CheckpointError(
            f"{name}: stores {scheme.max_code} for a zero point, which in GPTQ v1 is {scheme.max_code + 1} to some "
            "readers and 0 to others: save the model again as gptq_v2"
        )
    return stored + (2 - version)


def _read_order(checkpoint: Checkpoint, name: str, columns: int, groups: int) -> Tensor | None:
    """The group of scales of each group of columns; `None` if they are in order."""
    if name not in checkpoint:
        return None
    index = read_tensor(checkpoint, name, (columns,), torch.int32)
    if bool(((index < 0) | (index >= groups)).any()):
        wrong = int(index[(index < 0) | (index >= groups)][0])
        raise TensorError(f"{name}: names group {wrong}, expected 0 to {groups - 1}")
    blocks = index.view(groups, -1)
    if not torch.equal(blocks, blocks[:, :1].expand_as(blocks)):
        raise CheckpointError(
            f"{name}: columns reordered by activation (desc_act) have no such form: convert the model to float16 or "
            "bfloat16"
        )
    order = blocks[:, 0].long()
    return None if torch.equal(order, torch.arange(groups)) else order


def _scheme(values: Mapping[str, Any], where: str) -> Scheme:
    bits, group_size = whole_number(values, where, "bits"), whole_number(values, where, "group_size")
    require(values, where, "bits", _BITS)
    symmetric: bool = require(values, where, "sym", (True, False))
    return scheme_of(where, bits, None if group_size == -1 else group_size, symmetric)


def _describe(scheme: Scheme) -> dict[str, Any]:
    group_size = -1 if scheme.group_size is None else scheme.group_size
    return {"bits": scheme.bits, "group_size": group_size, "sym": scheme.symmetric}


def _pattern(name: str) -> str:
    return f"^{re.escape(name)}$"

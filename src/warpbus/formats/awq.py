"""The AWQ format, version `gemm`, of AutoAWQ: 4 bits.

A linear layer `prefix` of `out` rows and `in` columns is stored as

    prefix.qweight  int32 [in, out / 8]      codes of eight rows in a word
    prefix.qzeros   int32 [groups, out / 8]  zero points of eight rows in a word
    prefix.scales   float16 [groups, out]

and read as `weight[o, i] = (code[o, i] - zero[g, o]) * scale[g, o]`, `g = i // group_size`. Nibble `k` of a word,
counted from the least significant, belongs to row `8 * word + (0, 2, 4, 6, 1, 3, 5, 7)[k]`.

The format always has zero points. A symmetric matrix is one whose zero points are all 8; a key of our own in
`quantization_config` says that they are, so that it comes back as what it was. (`sym` does not say it: other programs
write it as true beside zero points of every kind.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import SchemeError, TensorError
from warpbus.formats.checkpoint import Checkpoint
from warpbus.formats.reading import (
    matrix_shape,
    read_scales,
    read_tensor,
    require,
    scheme_of,
    section,
    whole_number,
)
from warpbus.qtensor import QTensor, Scheme, Schemes, pack, packed_words, unpack

PARTS = (".qweight", ".qzeros", ".scales")
_WHERE = "quantization_config"
_SYMMETRIC = "all_zero_points_are_8"
_PER_WORD = 8
_ROW_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
_NIBBLE_OF_ROW = tuple(_ROW_OF_NIBBLE.index(row) for row in range(_PER_WORD))
_CODES_AT_ONCE = 2**22  # while they are unpacked, each takes some ten bytes


def detect(config: dict[str, Any]) -> bool:
    """Whether a `config.json` describes this format."""
    quantization = config.get(_WHERE)
    return isinstance(quantization, dict) and quantization.get("quant_method") == "awq"


def read_schemes(config: dict[str, Any]) -> Schemes:
    """The scheme of the quantized layers of an AWQ model.

    Raises:
        CheckpointError: if it is not understood.
    """
    quantization = section(config)
    # AutoAWQ wrote "GEMM" and "gemm"; what has no version is this one.
    key = "version" if quantization.get("version") is not None else "format"
    require(quantization, _WHERE, key, ("gemm", "GEMM", None))
    bits_key = "bits" if quantization.get("bits") is not None else "w_bit"
    group_key = "group_size" if quantization.get("group_size") is not None else "q_group_size"
    require(quantization, _WHERE, bits_key, (4,))
    group_size = whole_number(quantization, _WHERE, group_key)
    zero_point = require(quantization, _WHERE, "zero_point", (True, False, None))
    said = require(quantization, _WHERE, _SYMMETRIC, (True, False, None))
    symmetric = zero_point is False or said is True
    return Schemes(scheme_of(_WHERE, 4, None if group_size == -1 else group_size, symmetric))


def quantization_config(schemes: Scheme | Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of `config.json`.

    Args:
        schemes: that of all quantized linear layers, or that of each by its name, `model.layers.0.mlp.down_proj`.
        ignore: names of the linear layers that are not quantized, for instance `lm_head`.

    Raises:
        SchemeError: if there are several: the format has one for the whole model.
    """
    scheme, *others = [schemes] if isinstance(schemes, Scheme) else dict.fromkeys(schemes.values())
    if others:
        listed = ", ".join(map(str, (scheme, *others)))
        raise SchemeError(f"the AWQ format has one scheme for all layers, not {listed}: use compressed-tensors")
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": scheme.bits,
        "group_size": -1 if scheme.group_size is None else scheme.group_size,
        "zero_point": True,
        _SYMMETRIC: scheme.symmetric,
        "modules_to_not_convert": list(ignore),
    }


def check(scheme: Scheme, shape: tuple[int, int], name: str) -> None:
    """Refuse what the format cannot hold. Raises SchemeError."""
    if scheme.activations is not None or scheme.element is not None or scheme.bits != 4:
        raise SchemeError(f"{name}: the AWQ format has weights of 4 bits only, not {scheme}: use compressed-tensors")
    scheme.groups(shape[1], name)
    if shape[0] % _PER_WORD:
        raise SchemeError(
            f"{name}: {shape[0]} rows: the AWQ format needs a multiple of {_PER_WORD}: pad the FFN if it is one of its "
            "matrices, or use compressed-tensors"
        )


def to_tensors(prefix: str, weight: QTensor) -> dict[str, Tensor]:
    """A quantized matrix as the tensors of a checkpoint.

    Raises:
        SchemeError: see `check`.
        TensorError: if the scales are not float16.
    """
    check(weight.scheme, weight.shape, prefix)
    if weight.scales.dtype != torch.float16:
        raise TensorError(f"{prefix}: AWQ's scales are float16, found {weight.scales.dtype}: convert them first")
    zeros = torch.full(weight.scales.shape, weight.scheme.middle_code, dtype=torch.uint8)
    out, columns = weight.shape
    packed = torch.empty(columns, out // _PER_WORD, dtype=torch.int32)
    for start, stop in _spans(out, columns):
        codes = weight.rows(start, stop).codes()
        packed[:, start // _PER_WORD : stop // _PER_WORD] = _interleave(codes.T)
    return {
        f"{prefix}.qweight": packed,
        f"{prefix}.qzeros": _interleave((zeros if weight.zeros is None else weight.zeros.cpu()).T),
        f"{prefix}.scales": weight.scales.T.contiguous(),
    }


def is_quantized(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether the linear layer `prefix` is stored quantized."""
    return f"{prefix}.qweight" in checkpoint


def from_tensors(checkpoint: Checkpoint, prefix: str, scheme: Scheme) -> QTensor:
    """Read a quantized matrix.

    Raises:
        TensorError: if one of its tensors is missing or has the wrong shape, type or values.
        SchemeError: if the scheme's group size does not divide its columns.
    """
    columns, words = matrix_shape(checkpoint, f"{prefix}.qweight")
    out = words * _PER_WORD
    groups = scheme.groups(columns, prefix)
    stored = read_tensor(checkpoint, f"{prefix}.qweight", (columns, words), torch.int32)
    scales = read_scales(checkpoint, f"{prefix}.scales", (groups, out))
    zeros = _read_zeros(checkpoint, f"{prefix}.qzeros", (groups, words), scheme)
    packed = torch.empty(out, packed_words(columns, scheme.bits), dtype=torch.int32)
    for start, stop in _spans(out, columns):
        codes = _deinterleave(stored[:, start // _PER_WORD : stop // _PER_WORD])
        packed[start:stop] = pack(codes.T, scheme.bits)
    return QTensor(scheme, packed, scales.T.contiguous(), zeros, (out, columns))


def _read_zeros(checkpoint: Checkpoint, name: str, shape: tuple[int, int], scheme: Scheme) -> Tensor | None:
    """Zero points uint8 `[out, groups]`, or `None` for those of a symmetric scheme."""
    if scheme.symmetric and name not in checkpoint:
        return None
    zeros = _deinterleave(read_tensor(checkpoint, name, shape, torch.int32))
    if not scheme.symmetric:
        return zeros.T.contiguous()
    differing = zeros[zeros != scheme.middle_code]
    if len(differing):
        raise TensorError(
            f"{name}: stores {int(differing[0])}, expected {scheme.middle_code} everywhere, since config.json says "
            f"that the scheme is symmetric: set zero_point to true and {_SYMMETRIC} to false"
        )
    return None


def _interleave(codes: Tensor) -> Tensor:
    """Codes `[n, out]` as words int32 `[n, out / 8]`."""
    return pack(codes.unflatten(1, (-1, _PER_WORD))[..., _ROW_OF_NIBBLE], 4).squeeze(-1)


def _deinterleave(words: Tensor) -> Tensor:
    """Words int32 `[n, out / 8]` as codes uint8 `[n, out]`."""
    return unpack(words.unsqueeze(-1), 4, _PER_WORD)[..., _NIBBLE_OF_ROW].flatten(1)


def _spans(rows: int, columns: int) -> list[tuple[int, int]]:
    """Whole words of rows that hold about `_CODES_AT_ONCE` together."""
    height = max(1, _CODES_AT_ONCE // (columns * _PER_WORD)) * _PER_WORD
    return [(start, min(start + height, rows)) for start in range(0, rows, height)]

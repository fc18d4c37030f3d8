"""NVFP4 and MXFP4 checkpoints: written for the schemes w4a16-nvfp4 and w4a16-mxfp4, dequantized when they are read.

A matrix `[out, in]` is stored in compressed-tensors' `nvfp4-pack-quantized` as

    P.weight_packed        uint8 [out, in / 2]          4-bit numbers, the even column in the low nibble
    P.weight_scale         float8_e4m3fn [out, in / 16]
    P.weight_global_scale  float32 [1]                  scales are divided by it

in its `mxfp4-pack-quantized` as `P.weight_packed` and

    P.weight_scale         uint8 [out, in / 32]         n means the scale 2^(n - 127)

and in ModelOpt's format (`NVFP4`, `W4A16_NVFP4`) as

    P.weight, P.weight_scale                            as the first two
    P.weight_scale_2       float32                      scales are multiplied by it

Scales of activations (`input_scale`, `input_global_scale`) are ignored, since the activations keep their dtype.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import CheckpointError, SchemeError, TensorError
from warpbus.formats.checkpoint import Checkpoint
from warpbus.formats.reading import matrix_shape, require, section, unreadable
from warpbus.formats.stored import ComputedTensor, StoredTensor, row_bands
from warpbus.qtensor import QTensor, Scheme, Schemes
from warpbus.qtensor.fp4 import fp4_values
from warpbus.qtensor.scheme import ELEMENTS

MODELOPT_PARTS = (".weight", ".weight_scale", ".weight_scale_2")
_WHERE = "quantization_config"
_MODELOPT = "modelopt"
_FORMATS = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
_E4M3 = torch.float8_e4m3fn
_LARGEST_E4M3 = 448.0
_E4M3_STEP = 2.0**-9
_BIAS = 127  # of MXFP4's exponents
_COMMON_EXPONENT = -6
"""The power of two of NVFP4's global scales, one for all matrices: engines that fuse q, k and v want them equal."""

_SHARE = 2.0**-9  # of the common scale's range that the largest scale of a matrix has to reach
_ACTIVATIONS = (".input_scale", ".input_global_scale")


@dataclass(frozen=True)
class Fp4:
    """How a checkpoint stores its FP4 matrices.

    Attributes:
        element: "nvfp4" or "mxfp4".
        packed: the suffix of the codes.
        factor: the suffix of the factor of all scales of a matrix; None for none.
        divides: whether scales are divided by it.
    """

    element: str
    packed: str
    factor: str | None
    divides: bool = False


_MODELOPT_STORAGE = Fp4("nvfp4", ".weight", ".weight_scale_2")
_STORAGE = {
    "nvfp4": Fp4("nvfp4", ".weight_packed", ".weight_global_scale", divides=True),
    "mxfp4": Fp4("mxfp4", ".weight_packed", None),
}


def fp4_storage(config: Mapping[str, Any]) -> Fp4 | None:
    """How an FP4 checkpoint stores its matrices, from its `config.json`; None if it is none.

    Raises:
        CheckpointError: this kind of FP4 is not supported.
    """
    found = config.get(_WHERE)
    if not isinstance(found, dict):
        return None
    if found.get("quant_method") == _MODELOPT:
        require(found, _WHERE, "quant_algo", _ALGORITHMS)
        return _MODELOPT_STORAGE
    groups = found.get("config_groups")
    if found.get("quant_method") != "compressed-tensors" or not isinstance(groups, dict):
        return None
    names = {
        name: str((group.get("format") if isinstance(group, dict) else None) or found.get("format"))
        for name, group in groups.items()
    }
    if not any(each in _FORMATS for each in names.values()):
        return None
    first = next(each for each in names.values() if each in _FORMATS)
    for name, stored_as in names.items():
        where = f"{_WHERE}.config_groups.{name}"
        if stored_as != first:
            raise unreadable(f"{where}.format", stored_as, f"{first!r}, as in the other groups")
        weights = groups[name].get("weights")
        if not isinstance(weights, dict):
            raise unreadable(f"{where}.weights", weights, "an object")
        element = _FORMATS[stored_as]
        require(weights, f"{where}.weights", "num_bits", (4,))
        require(weights, f"{where}.weights", "type", ("float",))
        require(weights, f"{where}.weights", "group_size", (ELEMENTS[element],))
    return _STORAGE[_FORMATS[first]]


def dequantized_fp4(checkpoint: Checkpoint, dtype: torch.dtype) -> Checkpoint:
    """An FP4 checkpoint as an unquantized one: each matrix is dequantized when it is read.

    Args:
        checkpoint: any; returned unchanged if it is not an FP4 checkpoint.
        dtype: of the dequantized matrices.

    Raises:
        CheckpointError: this kind of FP4 is not supported.
        TensorError: a part of a matrix is missing, or has the wrong shape or dtype.
    """
    storage = fp4_storage(checkpoint.config)
    if storage is None:
        return checkpoint
    config = {key: value for key, value in checkpoint.config.items() if key != _WHERE}
    tensors: dict[str, StoredTensor] = {}
    for name in checkpoint.names():
        prefix = _prefix(name)
        if f"{prefix}.weight_scale" not in checkpoint:
            tensors[name] = checkpoint.stored(name)
        elif name.endswith(".weight_scale"):
            tensors[f"{prefix}.weight"] = _matrix(checkpoint, prefix, storage, dtype)
        elif name.endswith(".bias"):
            tensors[name] = checkpoint.stored(name)
    return Checkpoint.of_tensors(checkpoint.directory, tensors, config)


def _prefix(name: str) -> str:
    return name.rpartition(".")[0]


@dataclass(frozen=True)
class Fp4Matrix(ComputedTensor):
    """An FP4 matrix, dequantized when it is read."""

    checkpoint: Checkpoint
    prefix: str
    storage: Fp4

    def bands(self) -> Iterator[Tensor]:
        """A product in float32 is rounded once, to `dtype`."""
        codes = self.checkpoint.tensor(self.prefix + self.storage.packed)
        scales, size = read_scales(self.checkpoint, self.prefix, self.storage), ELEMENTS[self.storage.element]
        for rows in row_bands(self.shape):
            band = codes[rows]
            numbers = fp4_values(torch.stack([band & 15, band >> 4], -1).flatten(1), torch.float32)
            yield numbers * scales[rows].repeat_interleave(size, 1)


def _matrix(checkpoint: Checkpoint, prefix: str, storage: Fp4, dtype: torch.dtype) -> Fp4Matrix:
    """A matrix whose parts are checked but not read."""
    packed = prefix + storage.packed
    out, half = matrix_shape(checkpoint, packed)
    size = ELEMENTS[storage.element]
    if half * 2 % size:
        raise SchemeError(f"{packed}: {half * 2} columns cannot be cut into groups of {size}")
    expected = [
        (packed, (out, half), torch.uint8),
        (f"{prefix}.weight_scale", (out, half * 2 // size), _E4M3 if storage.factor else torch.uint8),
    ]
    for name, shape, kind in expected:
        if checkpoint.shape(name) != shape or checkpoint.dtype(name) != kind:
            raise TensorError(
                f"{checkpoint.directory}: {name}: expected {kind} of shape {list(shape)}, found "
                f"{checkpoint.dtype(name)} of shape {list(checkpoint.shape(name))}: check that config.json belongs to "
                "these weights"
            )
    if storage.factor is not None:
        _factor(checkpoint, prefix, storage)
    return Fp4Matrix((out, half * 2), dtype, checkpoint, prefix, storage)


def _factor(checkpoint: Checkpoint, prefix: str, storage: Fp4) -> float:
    """The factor of the scales of a matrix."""
    name = f"{prefix}{storage.factor}"
    if checkpoint.dtype(name) != torch.float32 or math.prod(checkpoint.shape(name)) != 1:
        raise TensorError(
            f"{checkpoint.directory}: {name}: expected one number of float32: use an undamaged checkpoint"
        )
    found = float(checkpoint.tensor(name).reshape(()))
    if not math.isfinite(found) or found <= 0:
        raise TensorError(f"{checkpoint.directory}: {name}: is {found}, expected a positive number")
    return 1 / found if storage.divides else found


def read_scales(checkpoint: Checkpoint, prefix: str, storage: Fp4) -> Tensor:
    """The scales of a matrix with everything that multiplies them, float32 `[out, groups]`."""
    scales = checkpoint.tensor(f"{prefix}.weight_scale")
    if storage.factor is None:
        return torch.exp2(scales.float() - _BIAS)
    return scales.float() * _factor(checkpoint, prefix, storage)


def fp4_from_tensors(checkpoint: Checkpoint, prefix: str, scheme: Scheme, *, modelopt: bool = False) -> QTensor:
    """Read a matrix without dequantizing it.

    Raises:
        TensorError: one of its tensors is missing or has the wrong shape or type.
    """
    assert scheme.element is not None
    storage = _MODELOPT_STORAGE if modelopt else _STORAGE[scheme.element]
    rows, columns = _matrix(checkpoint, prefix, storage, torch.float32).shape
    packed = checkpoint.tensor(prefix + storage.packed).clone()
    return QTensor(scheme, packed.view(torch.int32), read_scales(checkpoint, prefix, storage), None, (rows, columns))


def fp4_to_tensors(prefix: str, weight: QTensor, *, modelopt: bool = False) -> dict[str, Tensor]:
    """The tensors of a matrix. Scales far below the largest (by 2^-15 and less) lose digits to e4m3's range.

    Raises:
        SchemeError: the format has no such scheme.
        TensorError: a scale is no positive number that the format has.
    """
    if modelopt:
        check_modelopt(weight.scheme, weight.shape, prefix)
    codes = weight.qweight.contiguous().cpu().view(torch.uint8)
    scales = weight.scales.float().cpu()
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise TensorError(f"{prefix}: has scales that are not positive numbers: use an undamaged checkpoint")
    if weight.scheme.element == "mxfp4":
        exponents = (torch.log2(scales).round() + _BIAS).clamp(0, 254).to(torch.uint8)
        return {f"{prefix}.weight_packed": codes, f"{prefix}.weight_scale": exponents}
    exponent = _exponent(float(scales.max()))
    stored = (scales * 2.0**-exponent).clamp(min=_E4M3_STEP).to(_E4M3)
    if modelopt:
        factor = torch.tensor(2.0**exponent)
        return {f"{prefix}.weight": codes, f"{prefix}.weight_scale": stored, f"{prefix}.weight_scale_2": factor}
    return {
        f"{prefix}.weight_packed": codes,
        f"{prefix}.weight_scale": stored,
        f"{prefix}.weight_global_scale": torch.tensor([2.0**-exponent]),
    }


def _exponent(largest: float) -> int:
    """The exponent of the global scale of a matrix whose largest scale is given."""
    share = largest / (_LARGEST_E4M3 * 2.0**_COMMON_EXPONENT)
    if _SHARE <= share <= 1:
        return _COMMON_EXPONENT
    return math.ceil(math.log2(largest / _LARGEST_E4M3))


def describe_fp4(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    """A group of compressed-tensors' `config_groups`."""
    nvfp4 = scheme.element == "nvfp4"
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group" if nvfp4 else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn" if nvfp4 else "torch.uint8",
    }
    return {"targets": targets, "input_activations": None, "weights": weights}


def modelopt_config(schemes: Scheme | Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of `config.json` in ModelOpt's format."""
    distinct = {schemes} if isinstance(schemes, Scheme) else set(schemes.values())
    for scheme in distinct:
        check_modelopt(scheme, (1, ELEMENTS["nvfp4"]), str(scheme))
    size = ELEMENTS["nvfp4"]
    group = {"weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": size}, "targets": ["Linear"]}
    return {
        "quant_method": _MODELOPT,
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_scheme": None,
        "group_size": size,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "exclude_modules": list(ignore),
        "producer": {"name": "warpbus"},
    }


def check_modelopt(scheme: Scheme, shape: tuple[int, int], name: str) -> None:
    """Refuse schemes that ModelOpt's format does not have. Raises SchemeError."""
    if scheme.element != "nvfp4":
        raise SchemeError(f"{name}: the format modelopt is written for w4a16-nvfp4 only, not {scheme}")
    scheme.groups(shape[1], name)


def modelopt_detect(config: dict[str, Any]) -> bool:
    """Whether a config.json describes ModelOpt's format."""
    found = config.get(_WHERE)
    return isinstance(found, dict) and found.get("quant_method") == _MODELOPT


def modelopt_schemes(config: dict[str, Any]) -> Schemes:
    """The schemes of a model in ModelOpt's format. Raises CheckpointError for algorithms other than NVFP4."""
    found = section(config)
    require(found, _WHERE, "quant_algo", _ALGORITHMS)
    ignored = found.get("ignore") or []
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise unreadable(f"{_WHERE}.ignore", ignored, "a list of names")
    try:
        return Schemes(Scheme.parse("w4a16-nvfp4"), dict.fromkeys(ignored))
    except SchemeError as error:
        raise CheckpointError(f"config.json: {_WHERE}: {error}") from error

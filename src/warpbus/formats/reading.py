"""Helpers of the readers of quantized formats: checked values of `config.json` and checked tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import CheckpointError, SchemeError, TensorError
from warpbus.formats.checkpoint import Checkpoint
from warpbus.qtensor import Scheme


def section(config: dict[str, Any]) -> dict[str, Any]:
    """The object `quantization_config` of a config.json. Raises CheckpointError if it is something else."""
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        raise unreadable("quantization_config", found, "an object")
    return found


def require(section: Mapping[str, Any], where: str, key: str, accepted: tuple[object, ...]) -> Any:
    """The value of `key`, which has to be one of `accepted`; `None` there stands for a key that is absent.

    Raises:
        CheckpointError: if it is another.
    """
    value = section.get(key)
    if not any(value is one or (type(value) is type(one) and value == one) for one in accepted):
        expected = " or ".join("absent" if one is None else repr(one) for one in accepted)
        raise unreadable(f"{where}.{key}" if where else key, value, expected)
    return value


def whole_number(section: Mapping[str, Any], where: str, key: str) -> int:
    """The value of `key`. Raises CheckpointError if it is no integer."""
    value = section.get(key)
    if type(value) is not int:
        raise unreadable(f"{where}.{key}", value, "an integer")
    return value


def scheme_of(where: str, bits: int, group_size: int | None, symmetric: bool) -> Scheme:
    """The scheme that a config.json describes at `where`. Raises CheckpointError if there is none like it."""
    try:
        return Scheme(bits, group_size, symmetric)
    except SchemeError as error:
        raise CheckpointError(f"config.json: {where}: {error}") from error


def unreadable(where: str, found: object, expected: str) -> CheckpointError:
    """The error for a value of config.json that is not supported."""
    described = ascii(found)
    if len(described) > 80:
        described = f"{described[:80]}..."
    return CheckpointError(
        f"config.json: {where} is {described}, expected {expected}: this kind of quantization is not supported"
    )


def read_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of a known shape and type. Raises TensorError if it is missing or another."""
    if name in checkpoint and checkpoint.dtype(name) != dtype:
        raise TensorError(f"{name}: expected {dtype}, found {checkpoint.dtype(name)}")
    return checkpoint.tensor(name, expected=shape)


def read_scales(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
    """Scales, of any floating-point type. Raises TensorError if they are missing or something else."""
    if name in checkpoint and not checkpoint.dtype(name).is_floating_point:
        raise TensorError(f"{name}: expected a floating-point type, found {checkpoint.dtype(name)}")
    return checkpoint.tensor(name, expected=shape)


def matrix_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """The shape of a tensor that has to be a matrix. Raises TensorError if it is missing or none, or empty."""
    shape = checkpoint.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise TensorError(f"{name}: expected a matrix, found shape {list(shape)}")
    return shape[0], shape[1]

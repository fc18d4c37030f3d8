"""The C++ kernels for the CPU, in `csrc/cpu`: their library, and the structures that it is called with."""

import ctypes
import functools
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.host_compiler import CpuVariant, load_library, own_variant
from warpbus.errors import DeviceError, TensorError, UsageError
from warpbus.kernels.units import CSRC

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of activations."""

SCALES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of scales; their places here are `scale_type` in csrc/cpu/matrix.h."""

_SOURCE = CSRC / "cpu" / "operators.cpp"
_ACTIVATIONS = ("int8", "float")


class Task(ctypes.Structure):
    """A structure that a function of the library takes; 0 is the null pointer."""

    def run(self, name: str, variant: CpuVariant | None = None) -> None:
        """Call the function `warpbus_<name>`, of this CPU's variant by default."""
        _function(name, variant)(ctypes.byref(self))


class CpuMatrix(ctypes.Structure):
    """`Matrix` of csrc/cpu/matrix.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros")),
        *((name, ctypes.c_int64) for name in ("n", "k", "group", "bits", "middle", "scale_type", "tiles")),
    )


def pointer(tensor: Tensor | None) -> int:
    """The address of a tensor, which the caller keeps; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def as_float(tensor: Tensor | None) -> Tensor | None:
    """In float32 and contiguous."""
    if tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous()):
        return tensor
    return tensor.float().contiguous()


def check_operands(
    operator: str, x: Tensor, shape: tuple[int, int], columns: int | None = None, **others: Tensor | None
) -> None:
    """The operands of a product `x @ weight.T` fit the weight and are on the CPU.

    Args:
        operator: for the messages.
        shape: `[n, k]`, of the weight.
        columns: of the result; n by default.
        others: of "bias" `[n]`, "norm" `[k]` and "residual", which has the shape of the result.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    n, k = shape
    if x.dim() == 0 or x.shape[-1] != k:
        raise TensorError(f"{operator}: x has shape {list(x.shape)}, the weight expects {k} features")
    if x.dtype not in DTYPES or not x.is_cpu:
        raise TensorError(
            f"{operator}: x is {x.dtype} on {x.device}, expected float32, bfloat16 or float16 on the CPU: "
            "convert it with .to()"
        )
    expected = {"bias": (n,), "norm": (k,), "residual": (*x.shape[:-1], columns or n)}
    for name, tensor in others.items():
        if tensor is not None and (tensor.shape != expected[name] or not tensor.is_cpu):
            raise TensorError(
                f"{operator}: {name} has shape {list(tensor.shape)} on {tensor.device}, expected "
                f"{list(expected[name])} on the CPU"
            )


@functools.cache
def _function(name: str, variant: CpuVariant | None) -> Any:
    return getattr(library(variant or own_variant()), f"warpbus_{name}")


@functools.cache
def library(variant: CpuVariant) -> ctypes.CDLL:
    """The library for a variant.

    Raises:
        DeviceError: it cannot be compiled or loaded; see `load_library`.
    """
    found = load_library(_SOURCE, CSRC, variant)
    for name in ("linear", "experts", "attention", "trellis"):
        function: Any = getattr(found, f"warpbus_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p], None
    return found


@functools.cache
def is_available() -> bool:
    """Whether the kernels can be used; if they cannot be compiled, a warning says why, once."""
    try:
        library(own_variant())
    except DeviceError as error:
        warnings.warn(f"no kernels for this CPU: quantized models decode slower ({error})", stacklevel=2)
        return False
    return True


def activations_in_8_bits() -> bool:
    """Whether the CPU may round activations to 8 bits: not if `WARPBUS_CPU_ACTIVATIONS` is "float".

    Raises:
        UsageError: the variable has another value than "int8" or "float".
    """
    wanted = os.environ.get("WARPBUS_CPU_ACTIVATIONS", "int8")
    if wanted not in _ACTIVATIONS:
        raise UsageError(f"WARPBUS_CPU_ACTIVATIONS is {wanted!r}: set it to {' or '.join(_ACTIVATIONS)}")
    return wanted == "int8"

"""Checks of operators' arguments, where kernels support them, and how these cover them with blocks."""

import functools
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.dtype_names import short_name
from warpbus.cuda.green import multiprocessors
from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.cuda.remote import remote_backend
from warpbus.errors import TensorError, UsageError
from warpbus.kernels.units import unit

ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
HALVES = (torch.float16, torch.bfloat16)
ACTIVATIONS = {"none": 0, "sigmoid": 1, "relu": 2, "gelu": 3, "silu": 4}  # as in csrc/common/numeric.cuh
PROJECTED = ("none", "swiglu")  # activations behind a quantized projection

_KINDS = {1: "a vector", 2: "a matrix", 3: "a volume"}
_OLDEST = (8, 0)  # compute capability that the kernels are written for
_BLOCKS_OF_A_MULTIPROCESSOR = 8  # of 256 threads: as many as one can hold


def per_dtype(
    source: str, name: str, signature: str, dtypes: tuple[torch.dtype, ...] = tuple(ELEMENTS), needs: str = "sm_80"
) -> dict[torch.dtype, Kernel]:
    """A kernel of a file that takes its element type as the macro `ELEMENT`, once for each dtype.

    Args:
        source: the file, below `csrc`; `needs`: the oldest architecture that it compiles for.
        name: that of the kernel; `signature`: its parameters, see `Parameters`.
    """
    parameters = Parameters(signature)
    return {dtype: unit(source, needs=needs, ELEMENT=ELEMENTS[dtype]).kernel(name, parameters) for dtype in dtypes}


def has_kernels(x: Tensor) -> bool:
    """Whether kernels support these activations: 16 bits, on a supported GPU, and gradients are disabled."""
    return x.dtype in HALVES and not torch.is_grad_enabled() and gpu_has_kernels(x.device)


def gpu_has_kernels(device: torch.device) -> bool:
    """Whether a device is a GPU that the kernels support, or a pool device backed by one."""
    if device.type == "cuda":
        return _is_young_enough(device)
    backend = remote_backend(device)
    capability = None if backend is None else backend.capability()
    return capability is not None and capability >= _OLDEST


def _is_young_enough(device: torch.device) -> bool:
    return _capability(device) >= _OLDEST


# The effect of `torch.compiler.assume_constant_result`, without which the compiler warns about the cache. Calling it
# would import the compiler and sympy, which takes nearly as long as torch itself, also for users who do not compile.
_is_young_enough._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def check_alike(operator: str, dtypes: tuple[torch.dtype, ...] = tuple(ELEMENTS), **tensors: Tensor) -> None:
    """All tensors have one of `dtypes`, the same one, and are on one device.

    Raises:
        TensorError: they do not.
    """
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.dtype not in dtypes:
            known = ", ".join(short_name(dtype) for dtype in dtypes)
            raise TensorError(
                f"{operator}: {name} is {short_name(tensor.dtype)}, expected {known}: convert it with .to()"
            )
        if tensor.dtype != first.dtype:
            raise TensorError(
                f"{operator}: {name} is {short_name(tensor.dtype)} and {first_name} {short_name(first.dtype)}: "
                f"convert one of them with .to()"
            )
        if tensor.device != first.device:
            raise TensorError(
                f"{operator}: {name} is on {tensor.device} and {first_name} on {first.device}: move one with .to()"
            )


def check_rank(operator: str, rank: int, **tensors: Tensor) -> None:
    """All tensors have `rank` axes.

    Raises:
        TensorError: one has not.
    """
    for name, tensor in tensors.items():
        if tensor.dim() != rank:
            raise TensorError(f"{operator}: {name} has shape {list(tensor.shape)}, expected {_KINDS[rank]}: reshape it")


def check_shape(operator: str, expected: dict[str, tuple[int, ...]], because: str, **tensors: Tensor) -> None:
    """Each tensor has the shape expected of its name.

    Raises:
        TensorError: one has not; the message says `because`.
    """
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise TensorError(
                f"{operator}: {name} has shape {list(tensor.shape)}, expected {list(expected[name])}: {because}"
            )


def check_device(operator: str, first: Tensor, **tensors: Tensor) -> None:
    """All tensors are where the first one is.

    Raises:
        TensorError: one is not.
    """
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise TensorError(
                f"{operator}: {name} is on {tensor.device}, the others on {first.device}: move it with .to()"
            )


def check_strides(operator: str, **tensors: Tensor) -> None:
    """The last axis of each tensor is contiguous.

    Raises:
        TensorError: one's is not.
    """
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise TensorError(
                f"{operator}: {name} has strides {list(tensor.stride())}, expected 1 in the last: use .contiguous()"
            )


def check_epilogue(operator: str, n: int, bias: Tensor | None, activation: str) -> None:
    """A bias has one element for each column, and the activation is known.

    Raises:
        TensorError, UsageError: they are not.
    """
    if bias is not None:
        check_shape(operator, {"bias": (n,)}, f"one element for each of the {n} columns", bias=bias)
    if activation not in ACTIVATIONS:
        raise UsageError(f"{operator}: activation is {activation!r}: give one of {', '.join(ACTIVATIONS)}")


def check_projection(
    operator: str, n: int, k: int, x: Tensor, activation: str, **around: Tensor | None
) -> dict[str, Tensor]:
    """The shapes of a product with a quantized weight `[n, k]` and of what surrounds it.

    Args:
        around: bias `[n]`, norm `[k]` and residual, in the shape of the result, each of which may be `None`.

    Returns:
        those of `around` that are there.

    Raises:
        TensorError: a shape is wrong.
        UsageError: no such activation.
    """
    if activation not in PROJECTED:
        raise UsageError(f"{operator}: activation is {activation!r}: give one of {', '.join(PROJECTED)}")
    if x.dim() == 0 or x.shape[-1] != k:
        raise TensorError(f"{operator}: x has shape {list(x.shape)}, the weight expects {k} features")
    if activation == "swiglu" and n % 2:
        raise TensorError(f"{operator}: swiglu needs as many rows for the gate as for up, the weight has {n}")
    columns = n // 2 if activation == "swiglu" else n
    expected = {"bias": (n,), "norm": (k,), "residual": (*x.shape[:-1], columns)}
    there = {name: tensor for name, tensor in around.items() if tensor is not None}
    for name, tensor in there.items():
        check_shape(operator, expected, f"the weight is {n} x {k}", **{name: tensor})
    return there


def aligned(*tensors: Tensor) -> bool:
    """Whether rows of contiguous tensors can be read 16 bytes at a time: each begins at a multiple of 16 bytes."""
    return all(
        tensor.data_ptr() % 16 == 0 and (tensor.dim() < 2 or tensor.shape[-1] * tensor.element_size() % 16 == 0)
        for tensor in tensors
    )


def contiguous_aligned(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy that is contiguous and whose rows kernels can read 16 bytes at a time."""
    tensor = tensor.contiguous()
    return tensor if aligned(tensor) else tensor.clone()


def strides(*axes: str, **tensors: Tensor) -> dict[str, Any]:
    """The strides of the first axes of some tensors: a kernel's parameters `<tensor>_<axis>`, in elements."""
    return {f"{name}_{axis}": tensor.stride(at) for name, tensor in tensors.items() for at, axis in enumerate(axes)}


def blocks(*sides: tuple[int, int]) -> int:
    """How many blocks cover an array: the product over `(extent, what a block covers of it)`."""
    count = 1
    for extent, covered in sides:
        count *= -(-extent // covered)
    return count


def blocks_in_stride(size: int, block: int, device: torch.device) -> int:
    """The blocks of a kernel whose threads stride over `size` elements: no more than the GPU holds at once."""
    resident = multiprocessors(device) * _BLOCKS_OF_A_MULTIPROCESSOR
    return min(blocks((size, block)), resident)

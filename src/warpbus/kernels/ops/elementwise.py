"""The first kernels one writes: vectors, matrices and volumes added, and the sigmoid."""

import torch
from torch import Tensor

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import aligned, blocks, blocks_in_stride, check_alike, check_rank, per_dtype
from warpbus.kernels.reference import elementwise as reference

VECTOR_ADD_VARIANTS = ("scalar", "vectorised")

_BLOCK = 256
_BYTES_OF_A_BLOCK = _BLOCK * 4 * 16  # kBlock * kLoads vectors of 16 bytes, in vector_add.cu
_LARGEST_GRID_SIDE = 65_535  # of gridDim.y and gridDim.z

_VECTOR_ADD_SCALAR = per_dtype(
    "ladder/vector_add.cu", "vector_add_scalar", "const ELEMENT* a, const ELEMENT* b, ELEMENT* out, long long size"
)
_VECTOR_ADD_VECTORISED = per_dtype(
    "ladder/vector_add.cu", "vector_add_vectorised", "const ELEMENT* a, const ELEMENT* b, ELEMENT* out, long long size"
)
_MATRIX_ADD = per_dtype(
    "ladder/matrix_add.cu",
    "matrix_add",
    "const ELEMENT* a, const ELEMENT* b, ELEMENT* out, long long rows, long long columns",
)
_VOLUME_ADD = per_dtype(
    "ladder/matrix_add.cu",
    "volume_add",
    "const ELEMENT* a, const ELEMENT* b, ELEMENT* out, long long depth, long long rows, long long columns",
)
_SIGMOID = per_dtype("ladder/sigmoid.cu", "sigmoid_forward", "const ELEMENT* x, ELEMENT* out, long long size")


def vector_add(a: Tensor, b: Tensor, variant: str = "auto") -> Tensor:
    """`a + b` for vectors.

    Args:
        a, b: `[size]`, float32, float16 or bfloat16, of any stride.
        variant: "scalar", "vectorised" (16 bytes a load; the data has to begin at a multiple of 16 bytes), or "auto",
            which is "vectorised" where it can be. On the CPU they are the same.

    Returns:
        `[size]`, contiguous, in the dtype of `a`; the sum is taken in float32.

    Raises:
        TensorError: other shapes, dtypes or devices, or data that "vectorised" cannot read.
        UsageError: another variant.
    """
    if variant not in ("auto", *VECTOR_ADD_VARIANTS):
        raise UsageError(f"vector_add: variant is {variant!r}: give auto, {' or '.join(VECTOR_ADD_VARIANTS)}")
    _check_sum("vector_add", 1, a, b)
    return _vector_add(a, b, variant)


def matrix_add(a: Tensor, b: Tensor) -> Tensor:
    """`a + b` for matrices, on 2D blocks of threads.

    Args:
        a, b: `[rows, columns]`, float32, float16 or bfloat16, of any strides.

    Returns:
        `[rows, columns]`, contiguous, in the dtype of `a`; the sum is taken in float32.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    _check_sum("matrix_add", 2, a, b)
    return _matrix_add(a, b)


def volume_add(a: Tensor, b: Tensor) -> Tensor:
    """`a + b` for volumes, on 3D blocks of threads.

    Args:
        a, b: `[depth, rows, columns]`, float32, float16 or bfloat16, of any strides.

    Returns:
        `[depth, rows, columns]`, contiguous, in the dtype of `a`; the sum is taken in float32.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    _check_sum("volume_add", 3, a, b)
    return _volume_add(a, b)


def sigmoid(x: Tensor) -> Tensor:
    """`1 / (1 + exp(-x))`.

    Args:
        x: of any shape; float32, float16 or bfloat16, computed in float32.

    Returns:
        The shape and dtype of `x`, contiguous.

    Raises:
        TensorError: another dtype.
    """
    check_alike("sigmoid", x=x)
    return _sigmoid(x)


def _check_sum(name: str, rank: int, a: Tensor, b: Tensor) -> None:
    check_rank(name, rank, a=a, b=b)
    check_alike(name, a=a, b=b)
    if a.shape != b.shape:
        raise TensorError(
            f"{name}: a has shape {list(a.shape)} and b {list(b.shape)}: they have to be the same, nothing is broadcast"
        )


def _launch_vector_add(a: Tensor, b: Tensor, variant: str) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty_like(a)
    if variant == "vectorised" and not aligned(a, b):
        raise TensorError(
            "vector_add: a or b does not begin at a multiple of 16 bytes, as the variant vectorised needs: "
            "clone() it, or give variant auto"
        )
    size = a.numel()
    if size == 0:
        return out
    if variant == "scalar" or not aligned(a, b):
        grid = blocks_in_stride(size, _BLOCK, a.device)
        _VECTOR_ADD_SCALAR[a.dtype](grid, _BLOCK, a=a, b=b, out=out, size=size)
    else:
        grid = blocks((a.nbytes, _BYTES_OF_A_BLOCK))
        _VECTOR_ADD_VECTORISED[a.dtype](grid, _BLOCK, a=a, b=b, out=out, size=size)
    return out


def _launch_matrix_add(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty_like(a)
    rows, columns = a.shape
    if out.numel():
        grid = (blocks((columns, 32)), min(blocks((rows, 8)), _LARGEST_GRID_SIDE))
        _MATRIX_ADD[a.dtype](grid, (32, 8), a=a, b=b, out=out, rows=rows, columns=columns)
    return out


def _launch_volume_add(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty_like(a)
    depth, rows, columns = a.shape
    if out.numel():
        sides = (blocks((rows, 4)), blocks((depth, 2)))
        grid = (blocks((columns, 32)), *(min(side, _LARGEST_GRID_SIDE) for side in sides))
        _VOLUME_ADD[a.dtype](grid, (32, 4, 2), a=a, b=b, out=out, depth=depth, rows=rows, columns=columns)
    return out


def _launch_sigmoid(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.numel()
    if size:
        _SIGMOID[x.dtype](blocks_in_stride(size, _BLOCK, x.device), _BLOCK, x=x, out=out, size=size)
    return out


def _fake(x: Tensor, *others: object) -> Tensor:
    return x.new_empty(x.shape)


_vector_add = operator(
    "vector_add(Tensor a, Tensor b, str variant) -> Tensor",
    cuda=_launch_vector_add,
    reference=lambda a, b, variant: reference.add(a, b),
    fake=_fake,
)
_matrix_add = operator(
    "matrix_add(Tensor a, Tensor b) -> Tensor", cuda=_launch_matrix_add, reference=reference.add, fake=_fake
)
_volume_add = operator(
    "volume_add(Tensor a, Tensor b) -> Tensor", cuda=_launch_volume_add, reference=reference.add, fake=_fake
)
_sigmoid = operator("sigmoid(Tensor x) -> Tensor", cuda=_launch_sigmoid, reference=reference.sigmoid, fake=_fake)

"""The sequential inner step of a blocked Cholesky factorization."""

import torch
from torch import Tensor

from warpbus.cuda.parameters import Parameters
from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import check_alike, check_device, check_rank, check_shape, check_strides
from warpbus.kernels.reference import factor as reference
from warpbus.kernels.units import unit

LARGEST_CORNER = 128  # columns

_FLOAT = (torch.float32,)
# csrc/gptq/factor_corner.cu: threads of a block, and its dynamic shared memory.
_THREADS, _BYTES = 256, 4 * LARGEST_CORNER * (LARGEST_CORNER + 1)
_FACTOR_CORNER = unit("gptq/factor_corner.cu").kernel(
    "factor_corner",
    Parameters(
        "const float* matrix, float* upper, float* inverse, int* failed, long long matrix_row, long long upper_row, "
        "long long inverse_row, int columns"
    ),
)


def factor_corner(matrix: Tensor, upper: Tensor, inverse: Tensor, failed: Tensor) -> None:
    """Factor a small matrix S = U U^T, U upper triangular, and invert U. Nothing waits for the GPU.

    Args:
        matrix: S, float32 `[columns, columns]`, at most 128 columns, positive definite; values below its diagonal
            are not read. Any strides of rows, here and in the others, with the last axis contiguous.
        upper: U, alike; filled, with zeros below its diagonal.
        inverse: U^-1, alike; filled, with zeros below its diagonal.
        failed: int32 `[1]`: set to 1 if the matrix is not positive definite, and left unchanged otherwise. The other
            two are undefined in that case.

    Raises:
        TensorError: other shapes, strides, dtypes or devices.
    """
    name = "factor_corner"
    check_rank(name, 2, matrix=matrix)
    check_alike(name, _FLOAT, matrix=matrix, upper=upper, inverse=inverse)
    check_alike(name, (torch.int32,), failed=failed)
    columns = len(matrix)
    if not 1 <= columns <= LARGEST_CORNER:
        raise TensorError(f"{name}: matrix has {columns} rows, expected 1 to {LARGEST_CORNER}: cut it in blocks")
    check_shape(name, {"matrix": (columns, columns)}, "it is a square", matrix=matrix)
    square: tuple[int, ...] = (columns, columns)
    check_shape(name, {"upper": square, "inverse": square}, "that of matrix", upper=upper, inverse=inverse)
    check_shape(name, {"failed": (1,)}, "one number", failed=failed)
    check_device(name, matrix, failed=failed)
    check_strides(name, matrix=matrix, upper=upper, inverse=inverse)
    _factor_corner(matrix, upper, inverse, failed)


def _launch_factor_corner(matrix: Tensor, upper: Tensor, inverse: Tensor, failed: Tensor) -> None:
    _FACTOR_CORNER(
        1,
        _THREADS,
        matrix=matrix,
        upper=upper,
        inverse=inverse,
        failed=failed,
        matrix_row=matrix.stride(0),
        upper_row=upper.stride(0),
        inverse_row=inverse.stride(0),
        columns=len(matrix),
        shared=_BYTES,
    )


_factor_corner = operator(
    "factor_corner(Tensor matrix, Tensor(a!) upper, Tensor(b!) inverse, Tensor(c!) failed) -> ()",
    cuda=_launch_factor_corner,
    reference=reference.factor_corner,
    fake=lambda *_: None,
)

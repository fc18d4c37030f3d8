"""Sparse COO tensors on the device `warpbus:0`: indices and values are tensors of the device, the rest is here.

PyTorch's kernels for meta tensors make and take apart such tensors without touching memory. What computes is written
in operators of dense tensors, which the pool runs; so an index outside is an IndexError of the pool.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseMeta)
_KEY = "SparsePrivateUse1"
_OUTSIDE = 1 << 62

# They know no values.
_STRUCTURAL = """
    _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors _indices _values _nnz _coalesced_ indices
    values is_coalesced sparse_dim dense_dim sparse_resize_ sparse_resize_and_clear_ empty.memory_format
"""


def register(library: torch.library.Library) -> None:
    """Add the kernels to a library of "aten"."""
    for name in _STRUCTURAL.split():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(_aten, packet), overload or "default")
        library.impl(name, functools.partial(operator._handle.redispatch_boxed, _META), _KEY)
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, _KEY)
    for name, kernel in _OF_DENSE.items():
        library.impl(name, kernel, "PrivateUse1")


def _made(indices: Tensor, values: Tensor, shape: Sequence[int], *, coalesced: bool = False) -> Tensor:
    sparse = len(indices)
    return _aten._sparse_coo_tensor_with_dims_and_tensors(
        sparse,
        len(shape) - sparse,
        shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=coalesced,
    )


def _parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [sparse axes, n] and values [n, dense axes ...]."""
    return tensor._indices(), tensor._values()


def _places(tensor: Tensor) -> tuple[Tensor, ...]:
    """Indices for dense tensors, one tensor per sparse axis. A negative one is outside here: it counts from no end."""
    indices = tensor._indices()
    return tuple(indices.masked_fill(indices < 0, _OUTSIDE))


def _check_shapes(name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(found) != tuple(wanted):
        raise RuntimeError(f"{name} of a sparse tensor: shape {[*found]}, expected {[*wanted]}")


def _scaled(values: Tensor, alpha: Any) -> Tensor:
    if isinstance(alpha, float) and not (values.is_floating_point() or values.is_complex()):
        raise RuntimeError(f"alpha is {alpha}: expected an integer for tensors of {values.dtype}")
    return values if alpha == 1 else values * alpha


def _check_dtype(result: torch.dtype, target: torch.dtype) -> None:
    if not torch.can_cast(result, target):
        raise RuntimeError(f"result type {result} can't be cast to the desired output type {target}")


def coalesce(tensor: Tensor) -> Tensor:
    """`aten::_coalesce`: each index once, in ascending order, with the sum of its values."""
    indices, values = _parts(tensor)
    if not values.shape[0]:
        return _made(indices, values, tensor.shape, coalesced=True)
    places, inverse = torch.unique(indices, dim=1, return_inverse=True)
    summed = values.new_zeros((places.shape[1], *values.shape[1:])).index_add_(0, inverse, values)
    return _made(places, summed, tensor.shape, coalesced=True)


def to_dense(tensor: Tensor, dtype: torch.dtype | None = None, masked_grad: bool | None = None) -> Tensor:
    """`aten::_to_dense`."""
    dense = tensor._values().new_zeros(tensor.shape)
    _add_into(dense, tensor, 1)
    return dense if dtype is None else dense.to(dtype)


def _add_into(dense: Tensor, tensor: Tensor, alpha: Any) -> None:
    """Add a sparse tensor to a dense one of its shape."""
    _check_shapes("the sum", tensor.shape, dense.shape)
    values = _scaled(tensor._values(), alpha)
    _check_dtype(values.dtype, dense.dtype)
    dense.index_put_(_places(tensor), values.to(dense.dtype), accumulate=True)


def to_sparse(dense: Tensor, *, layout: Any = None, blocksize: Any = None, dense_dim: Any = None) -> Tensor:
    """`aten::_to_sparse`."""
    if layout not in (None, torch.sparse_coo) or blocksize is not None or dense_dim is not None:
        raise NotImplementedError(
            f"a layout {layout} of sparse tensors does not run on a remote GPU: use torch.sparse_coo, or the CPU"
        )
    return to_sparse_axes(dense, dense.dim())


def to_sparse_axes(dense: Tensor, sparse_dim: int) -> Tensor:
    """`aten::_to_sparse.sparse_dim`: the first axes are sparse."""
    kept = dense != 0
    if sparse_dim < dense.dim():
        kept = kept.flatten(sparse_dim).any(-1)
    indices = kept.nonzero().t().contiguous()
    return _made(indices, dense[tuple(indices)], dense.shape, coalesced=True)


def sparse_mask(dense: Tensor, mask: Tensor) -> Tensor:
    """`aten::sparse_mask`: the elements of a dense tensor at the indices of a sparse one."""
    _check_shapes("the mask", mask.shape, dense.shape)
    if dense.is_sparse:
        dense = to_dense(dense)
    return _made(mask._indices().clone(), dense[_places(mask)], mask.shape, coalesced=mask.is_coalesced())


def product(left: Tensor, right: Tensor) -> Tensor:
    """`aten::mm` of a sparse and a dense matrix; with two sparse ones the result is sparse."""
    if left.is_sparse and right.is_sparse:
        return to_sparse(product(left, to_dense(right)))
    if not left.is_sparse:
        return product(right.t(), left.t()).t()
    if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0] or left.sparse_dim() != 2:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied: {[*left.shape]} and {[*right.shape]}")
    if left.dtype != right.dtype:
        raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got {left.dtype} and {right.dtype}")
    rows, columns = _places(left)
    result = right.new_zeros((left.shape[0], right.shape[1]))
    return result.index_add_(0, rows, left._values().unsqueeze(1) * right[columns])


def add_product(base: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """`aten::addmm`."""
    found = product(left, right)
    if beta == 0:  # whatever the base is, infinite or no number
        return found * alpha
    return torch.add(base if beta == 1 else base * beta, found, alpha=alpha)


def add(left: Tensor, right: Tensor, *, alpha: Any = 1) -> Tensor:
    """`aten::add.Tensor`: of sparse tensors a sparse one, else a dense one."""
    if left.is_sparse and right.is_sparse:
        _check_shapes("the sum", right.shape, left.shape)
        dtype = torch.result_type(left, right)
        values = torch.cat((left._values().to(dtype), _scaled(right._values(), alpha).to(dtype)))
        return _made(torch.cat((left._indices(), right._indices()), 1), values, left.shape)
    if left.is_sparse:
        return torch.add(to_dense(left), right, alpha=alpha)
    return add_(left.to(torch.result_type(left, right), copy=True), right, alpha=alpha)


def add_(left: Tensor, right: Tensor, *, alpha: Any = 1) -> Tensor:
    """`aten::add_.Tensor`."""
    if left.is_sparse:
        return _replaced(left, add(left, right, alpha=alpha))
    _add_into(left, right, alpha)
    return left


def subtract(left: Tensor, right: Tensor, *, alpha: Any = 1) -> Tensor:
    """`aten::sub.Tensor`."""
    return add(left, right, alpha=-alpha)


def multiply(left: Any, right: Any) -> Tensor:
    """`aten::mul.Tensor`: by a number, by a dense tensor at the indices, or of two sparse tensors."""
    if not (isinstance(left, Tensor) and left.is_sparse):
        left, right = right, left
    if not isinstance(right, Tensor) or right.dim() == 0:
        return _with_values(left, left._values() * right)
    if left.shape != right.shape:
        raise RuntimeError(f"sparse multiplication needs equal shapes, not {[*left.shape]} and {[*right.shape]}")
    if not right.is_sparse:
        return _with_values(left, left._values() * right[_places(left)])
    return to_sparse_axes(to_dense(left) * to_dense(right), left.sparse_dim())


def divide(left: Tensor, right: Any) -> Tensor:
    """`aten::div.Tensor` by a number, which is what PyTorch allows."""
    if isinstance(right, Tensor) and right.dim():
        raise RuntimeError(f"sparse division requires a number or a tensor without axes, not {right.dim()} axes")
    return _with_values(left, left._values() / right)


def _with_values(tensor: Tensor, values: Tensor) -> Tensor:
    return _made(tensor._indices(), values, tensor.shape, coalesced=tensor.is_coalesced())


def _replaced(tensor: Tensor, by: Tensor) -> Tensor:
    """Change a sparse tensor in place."""
    _check_shapes("the result", by.shape, tensor.shape)
    _check_dtype(by.dtype, tensor.dtype)
    return _aten.copy_sparse_to_sparse_.default._handle.redispatch_boxed(_META, tensor, by, False)


def _into(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel with `out=`, of which the operators in place are made."""

    def call(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        return _replaced(out, kernel(*args, **kwargs))

    return call


def _in_place(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel whose result replaces its first argument."""

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _replaced(tensor, kernel(tensor, *args, **kwargs))

    return call


def transpose(tensor: Tensor, dim0: int, dim1: int) -> Tensor:
    """`aten::transpose.int` of two sparse axes."""
    shape, order = list(tensor.shape), list(range(tensor.sparse_dim()))
    dim0, dim1 = dim0 % len(shape), dim1 % len(shape)
    if max(dim0, dim1) >= len(order):
        raise RuntimeError(f"transpose: axes {dim0} and {dim1} of a tensor with {len(order)} sparse axes")
    shape[dim0], shape[dim1] = shape[dim1], shape[dim0]
    order[dim0], order[dim1] = order[dim1], order[dim0]
    indices, values = _parts(tensor)
    return _made(indices[order], values, shape)


def _transpose_matrix(tensor: Tensor) -> Tensor:
    return transpose(tensor, 0, 1) if tensor.dim() == 2 else tensor


def clone(tensor: Tensor, *, memory_format: Any = None) -> Tensor:
    """`aten::clone`."""
    indices, values = _parts(tensor)
    return _made(indices.clone(), values.clone(), tensor.shape, coalesced=tensor.is_coalesced())


def _total(tensor: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return tensor._values().sum(dtype=dtype)


def _zero_(tensor: Tensor) -> Tensor:
    return tensor.sparse_resize_and_clear_(tensor.shape, tensor.sparse_dim(), tensor.dense_dim())


def _negative(tensor: Tensor) -> Tensor:
    return _with_values(tensor, -tensor._values())


_KERNELS: dict[str, Callable[..., Any]] = {
    "_coalesce": coalesce,
    "_sparse_sparse_matmul": product,
    "_to_dense": to_dense,
    "add.Tensor": add,
    "add.out": _into(add),
    "add_.Tensor": add_,
    "addmm": add_product,
    "clone": clone,
    "div.Tensor": divide,
    "div_.Tensor": _in_place(divide),
    "div.out": _into(divide),
    "mm": product,
    "mul.Tensor": multiply,
    "mul_.Tensor": _in_place(multiply),
    "mul.out": _into(multiply),
    "neg": _negative,
    "sparse_mask": sparse_mask,
    "sub.Tensor": subtract,
    "sub_.Tensor": _in_place(subtract),
    "sum": _total,
    "t": _transpose_matrix,
    "transpose.int": transpose,
    "zero_": _zero_,
}
_OF_DENSE: dict[str, Callable[..., Any]] = {"_to_sparse": to_sparse, "_to_sparse.sparse_dim": to_sparse_axes}

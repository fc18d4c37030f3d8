"""The sequential inner loops of quantization: rounding columns one after the other, fitting scales, choosing grids.

A solve is laid out `[parts, columns, rows]`: the output rows of a matrix, transposed, so that a column of the matrix is
contiguous, in parts of equal size. Rows are independent of each other, bit for bit: what a row becomes does not depend
on the rows and parts that are given with it. All tensors may have any strides, with the last axis contiguous: what is
written is a part of something larger. Nothing waits for the GPU.

Parts may belong to several matrices with inputs of their own, such as experts. Then `corner`, `groups` and `members`
have one more axis in front, with an entry for each matrix; every matrix has as many parts, one after the other. A part
gets the same bits as without the other matrices.

What is carried over to other columns can be written in bfloat16, as the products that carry it take it on a GPU. Within
a block all is in float32.
"""

from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.errors import TensorError, UsageError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import (
    ELEMENTS,
    blocks,
    check_alike,
    check_device,
    check_rank,
    check_shape,
    check_strides,
    per_dtype,
    strides,
)
from warpbus.kernels.reference import gptq as reference
from warpbus.kernels.units import unit
from warpbus.qtensor import Scheme

LARGEST_BLOCK = 128  # columns of a block
_FLOAT = (torch.float32,)
_CARRIED = (torch.float32, torch.bfloat16)
_LARGEST_CODE = 255
_SCALE_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as in csrc/gptq/scale_dtype.cuh

# csrc/gptq/columns.cuh: columns of a tile, and threads of a block; csrc/gptq/fit_scales.cu: what the columns of a group
# are rounded up to, and threads of a block. A block of either has 32 rows.
_TILE, _ROUND_THREADS = 16, 128
_FIT_COLUMNS, _FIT_THREADS = 32, 128
_BLOCK_ROWS = 32
# csrc/gptq/clip_search.cu: threads of a block, and the lanes that share a group of one of these sizes.
_SEARCH_THREADS, _SEARCH_LANES = 256, 8
_SEARCH_SIZES = (32, 64, 128)

_ROUND_COLUMNS = unit("gptq/round_columns.cu").kernel(
    "round_columns",
    Parameters(
        "const float* weight, const float* target, const float* corner, const float* scales, const float* zeros, "
        "const int* groups, float* centred, void* errors, long long weight_part, int weight_column, "
        "long long target_part, int target_column, long long corner_matrix, long long corner_row, "
        "long long scales_part, int scales_group, long long zeros_part, int zeros_group, long long centred_part, "
        "int centred_column, long long errors_part, "
        "int errors_column, int errors_are_narrow, int columns, int rows, int max_code, long long groups_matrix, "
        "int matrix_parts, int vector"
    ),
)
_ROUND_AGAIN = unit("gptq/round_again.cu").kernel(
    "round_again",
    Parameters(
        "const float* gradient, const float* corner, float* centred, const float* scales, const float* zeros, "
        "const int* groups, void* changes, long long gradient_part, int gradient_column, long long corner_matrix, "
        "long long corner_row, "
        "long long centred_part, int centred_column, long long scales_part, int scales_group, long long zeros_part, "
        "int zeros_group, long long changes_part, int changes_column, int changes_are_narrow, int columns, "
        "int rows, int max_code, long long groups_matrix, int matrix_parts, int vector"
    ),
)
_FIT_SCALES = unit("gptq/fit_scales.cu").kernel(
    "fit_scales",
    Parameters(
        "const float* gradient, const float* centred, const long long* members, const float* corner, float* scales, "
        "void* changes, long long gradient_part, long long gradient_column, long long centred_part, "
        "long long centred_column, long long corner_matrix, long long corner_row, long long scales_part, "
        "long long changes_part, int changes_column, int changes_are_narrow, int size, int rows, int scale_dtype, "
        "long long members_matrix, int matrix_parts, int vector"
    ),
)
_SEARCH = {
    size: per_dtype(
        "gptq/clip_search.cu",
        f"clip_search_{size}",
        "const ELEMENT* weight, const float* importance, float* scales, float* zeros, long long weight_row, "
        "long long rows, int groups, int max_code, int symmetric, int scale_dtype",
    )
    for size in _SEARCH_SIZES
}
_SEARCH_ANY = per_dtype(
    "gptq/clip_search.cu",
    "clip_search_any",
    "const ELEMENT* weight, const float* importance, float* scales, float* zeros, long long weight_row, "
    "long long rows, int groups, int max_code, int symmetric, int scale_dtype, int size",
)


def round_columns(
    weight: Tensor,
    target: Tensor,
    corner: Tensor,
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor,
    max_code: int,
    centred: Tensor,
    errors: Tensor,
) -> None:
    """Round a block of columns in order, each after it has made up for the errors of those before it.

    GPTQ (Frantar et al., 2022), seen as Babai's nearest plane: `corner` belongs to the unit upper triangular C of
    H = C D C^T, D diagonal, and `target` is the weight with what the columns before the block contribute. For
    j = 0, 1, ...

        t = target[j] + sum over k < j of errors[k] * corner[k, j]
        centred[j] = clamp(round(t / scale) + zero, 0, max_code) - zero, half to even
        errors[j] = weight[j] - centred[j] * scale

    Args:
        weight, target: float32 `[parts, columns, rows]`, at most 128 columns.
        corner: float32 `[columns, columns]`, or one per matrix; only what is above the diagonal is used.
        scales, zeros: float32 `[parts, groups, rows]`; scales may be negative, zero points are integers.
        groups: int32 `[columns]`, or one row per matrix: the group of each column.
        max_code: 1 to 255.
        centred: float32 `[parts, columns, rows]`, filled with the codes less their zero points.
        errors: float32 or bfloat16 `[parts, columns, rows]`, filled. A GPU differs from the CPU by the rounding of the
            sum over k, and of the errors where a code times its scale is not a float32.

    Raises:
        TensorError: other shapes, strides, dtypes or devices.
        UsageError: another `max_code`.
    """
    name = "round_columns"
    _check_block(name, corner, scales, zeros, groups, max_code, weight=weight, target=target, centred=centred)
    _check_carried(name, weight, errors=errors)
    _round_columns(weight, target, corner, scales, zeros, groups, max_code, centred, errors)


def round_again(
    gradient: Tensor,
    corner: Tensor,
    centred: Tensor,
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor,
    max_code: int,
    changes: Tensor,
) -> None:
    """Round a block of columns anew in order, each to what is best while all others stay as they are.

    Coordinate descent on tr(dW H dW^T) (QuantEase; Behdin et al., 2023). For j = 0, 1, ...

        g = gradient[j] - sum over k < j of corner[k, j] * changes[k]
        wanted = centred[j] * scale + g / corner[j, j]
        new = clamp(round(wanted / scale) + zero, 0, max_code) - zero
        changes[j] = (new - centred[j]) * scale;  centred[j] = new

    Args:
        gradient: float32 `[parts, columns, rows]`, H (W - Q) of these columns, at most 128.
        corner: float32 `[columns, columns]`, or one per matrix: H among these columns; only what is above the diagonal
            and the diagonal are used.
        centred: float32 `[parts, columns, rows]`, the codes less their zero points; changed in place.
        scales, zeros, groups, max_code: as in `round_columns`.
        changes: of the weights, float32 or bfloat16 `[parts, columns, rows]`, filled. A GPU differs from the CPU by the
            rounding of the sum over k.

    Raises:
        TensorError: other shapes, strides, dtypes or devices.
        UsageError: another `max_code`.
    """
    name = "round_again"
    _check_block(name, corner, scales, zeros, groups, max_code, gradient=gradient, centred=centred)
    _check_carried(name, gradient, changes=changes)
    _round_again(gradient, corner, centred, scales, zeros, groups, max_code, changes)


def fit_scales(
    gradient: Tensor,
    centred: Tensor,
    members: Tensor,
    corner: Tensor,
    scales: Tensor,
    scale_dtype: torch.dtype,
    changes: Tensor,
) -> None:
    """Set the scales of one group to their least-squares optimum, where that helps after it is rounded.

    With the group's columns c of `centred`, and g of `gradient`, the optimum lies `c . g / c . corner c` from where the
    scale is. It is rounded to `scale_dtype`, and the scale stays where the error would not fall.

    Args:
        gradient: float32 `[parts, size, rows]`, H (W - Q) of the group's columns.
        centred: float32 `[parts, columns, rows]`, the codes less their zero points, of all columns.
        members: int64 `[size]`, or one row per matrix: which of them are the group's.
        corner: float32 `[size, size]`, or one per matrix: H among the members, symmetric.
        scales: float32 `[parts, rows]`, those of the group; changed in place.
        scale_dtype: float32, float16 or bfloat16.
        changes: of the members' weights, float32 or bfloat16 `[parts, size, rows]`, filled. A GPU differs from the CPU
            by the rounding of the sums.

    Raises:
        TensorError: other shapes, strides, dtypes or devices.
    """
    name = "fit_scales"
    check_rank(name, 3, gradient=gradient, centred=centred)
    check_rank(name, 1 if corner.dim() < 3 else 2, members=members)
    check_alike(name, _FLOAT, gradient=gradient, centred=centred, corner=corner, scales=scales)
    check_alike(name, (torch.int64,), members=members)
    parts, _, rows = centred.shape
    size = members.shape[-1]
    check_shape(name, {"gradient": (parts, size, rows)}, f"there are {size} members", gradient=gradient)
    _check_matrices(name, parts, size, f"there are {size} members", corner, members=members)
    check_shape(name, {"scales": (parts, rows)}, "one for each part and row of centred", scales=scales)
    check_device(name, gradient, members=members)
    check_strides(name, gradient=gradient, members=members, centred=centred, corner=corner, scales=scales)
    _check_carried(name, gradient, changes=changes)
    _check_scale_dtype(name, scale_dtype)
    _fit_scales(gradient, centred, members, corner, scales, scale_dtype, changes)


def clip_search(
    weight: Tensor, importance: Tensor, group_size: int, bits: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The grid of each group that rounds it with the least weighted error: the full range or a clipped one.

    The candidates, their order and what decides between them are those of `kernels.reference.grid.search`.

    Args:
        weight: float32, float16 or bfloat16 `[rows, columns]`.
        importance: float32 `[columns]`, what a squared error in a column costs.
        group_size: columns of a group, a divisor of `columns`; all of them for one group a row.
        bits, symmetric: of the codes; see `qtensor.scheme.WEIGHT_BITS`.
        scale_dtype: the dtype to which the scales are rounded: float32, float16 or bfloat16.

    Returns:
        scales and zero points, float32 `[rows, groups]`. A GPU sums the errors in another order than the CPU, so that
        one of two candidates with nearly the same error may win there and the other one here.

    Raises:
        TensorError: other shapes, strides, dtypes or devices.
        SchemeError: other bits.
    """
    name = "clip_search"
    check_rank(name, 2, weight=weight)
    check_rank(name, 1, importance=importance)
    check_alike(name, weight=weight)
    check_alike(name, _FLOAT, importance=importance)
    columns = weight.shape[1]
    check_shape(name, {"importance": (columns,)}, f"weight has {columns} columns", importance=importance)
    check_device(name, weight, importance=importance)
    check_strides(name, weight=weight, importance=importance)
    _check_scale_dtype(name, scale_dtype)
    if group_size < 1 or columns % group_size:
        raise TensorError(
            f"{name}: {columns} columns cannot be cut into groups of {group_size}: give a group_size that divides them"
        )
    return _clip_search(weight, importance, group_size, bits, symmetric, scale_dtype)


def _check_block(
    name: str, corner: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, max_code: int, **volumes: Tensor
) -> None:
    """The arguments of a loop over columns fit each other and the first of the volumes `[parts, columns, rows]`."""
    check_rank(name, 3, **volumes, scales=scales)
    check_alike(name, _FLOAT, **volumes, corner=corner, scales=scales, zeros=zeros)
    check_alike(name, (torch.int32,), groups=groups)
    first, *others = volumes
    parts, columns, rows = volumes[first].shape
    if columns > LARGEST_BLOCK:
        raise TensorError(f"{name}: {first} has {columns} columns, expected at most {LARGEST_BLOCK}: cut it in blocks")
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(others, (parts, columns, rows))
    check_shape(name, expected, f"that of {first}", **{other: volumes[other] for other in others})
    _check_matrices(name, parts, columns, f"{first} has {columns} columns", corner, groups=groups)
    grid: tuple[int, ...] = (parts, scales.shape[1], rows)
    check_shape(name, {"scales": grid, "zeros": grid}, "[parts, groups, rows]", scales=scales, zeros=zeros)
    check_device(name, volumes[first], groups=groups)
    check_strides(name, **volumes, corner=corner, scales=scales, zeros=zeros, groups=groups)
    if not 1 <= max_code <= _LARGEST_CODE:
        raise UsageError(f"{name}: max_code is {max_code}: give 1 to {_LARGEST_CODE}")


def _check_matrices(name: str, parts: int, columns: int, because: str, corner: Tensor, **rows: Tensor) -> None:
    """Tensors that belong to matrices fit the columns, and the matrices share the parts evenly."""
    stacked = (len(corner),) if corner.dim() == 3 else ()
    check_shape(name, {"corner": (*stacked, columns, columns)}, because, corner=corner)
    check_shape(name, dict.fromkeys(rows, (*stacked, columns)), because, **rows)
    if stacked and (not stacked[0] or parts % stacked[0]):
        raise TensorError(f"{name}: {parts} parts of {stacked[0]} matrices: give as many parts of each matrix")


def _check_carried(name: str, first: Tensor, **tensors: Tensor) -> None:
    """The carried errors are in one of the formats for that, in the shape of the first tensor."""
    check_alike(name, _CARRIED, **tensors)
    check_shape(name, dict.fromkeys(tensors, tuple(first.shape)), "one number for each of the block's", **tensors)
    check_device(name, first, **tensors)
    check_strides(name, **tensors)


def _check_scale_dtype(name: str, scale_dtype: torch.dtype) -> None:
    if scale_dtype not in ELEMENTS:
        raise TensorError(f"{name}: scale_dtype is {scale_dtype}, expected float32, float16 or bfloat16")


def _launch_round_columns(
    weight: Tensor,
    target: Tensor,
    corner: Tensor,
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor,
    max_code: int,
    centred: Tensor,
    errors: Tensor,
) -> None:
    volumes = {"weight": weight, "target": target, "centred": centred, "errors": errors}
    _launch_over_columns(_ROUND_COLUMNS, volumes, corner, scales, zeros, groups, max_code)


def _launch_round_again(
    gradient: Tensor,
    corner: Tensor,
    centred: Tensor,
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor,
    max_code: int,
    changes: Tensor,
) -> None:
    volumes = {"gradient": gradient, "centred": centred, "changes": changes}
    _launch_over_columns(_ROUND_AGAIN, volumes, corner, scales, zeros, groups, max_code)


def _launch_over_columns(
    kernel: Kernel,
    volumes: dict[str, Any],
    corner: Tensor,
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor,
    max_code: int,
) -> None:
    """Launch a loop over columns; the last of the volumes `[parts, columns, rows]` is what is carried over."""
    carried = list(volumes)[-1]
    parts, columns, rows = volumes[carried].shape
    if volumes[carried].numel():
        kernel(
            parts * blocks((rows, _BLOCK_ROWS)),
            _ROUND_THREADS,
            **volumes,
            scales=scales,
            zeros=zeros,
            groups=groups,
            **strides("part", "column", **volumes),
            **strides("part", "group", scales=scales, zeros=zeros),
            **_of_corner(corner, parts),
            **{f"{carried}_are_narrow": _is_narrow(volumes[carried])},
            columns=columns,
            rows=rows,
            max_code=max_code,
            groups_matrix=_matrix_stride(groups, 2),
            shared=_corner_bytes(columns),
        )


def _launch_fit_scales(
    gradient: Tensor,
    centred: Tensor,
    members: Tensor,
    corner: Tensor,
    scales: Tensor,
    scale_dtype: torch.dtype,
    changes: Tensor,
) -> None:
    size = members.shape[-1]
    if size > LARGEST_BLOCK:
        # One group a row: products of whole matrices, which torch's operators are good at.
        reference.fit_scales(gradient, centred, members, corner, scales, scale_dtype, changes)
    elif changes.numel():
        parts, _, rows = gradient.shape
        _FIT_SCALES(
            parts * blocks((rows, _BLOCK_ROWS)),
            _FIT_THREADS,
            gradient=gradient,
            centred=centred,
            members=members,
            scales=scales,
            changes=changes,
            **strides("part", "column", gradient=gradient, centred=centred, changes=changes),
            **strides("part", scales=scales),
            **_of_corner(corner, parts),
            changes_are_narrow=_is_narrow(changes),
            size=size,
            rows=rows,
            scale_dtype=_SCALE_DTYPES[scale_dtype],
            members_matrix=_matrix_stride(members, 2),
            shared=_fit_bytes(size),
        )


def _launch_clip_search(
    weight: Tensor, importance: Tensor, group_size: int, bits: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    scheme = Scheme(bits, None, symmetric)
    scales, zeros = _fake_clip_search(weight, importance, group_size, bits, symmetric, scale_dtype)
    rows, groups = scales.shape
    if scales.numel() == 0:
        return scales, zeros
    arguments: dict[str, Any] = {
        "weight": weight,
        "importance": importance,
        "scales": scales,
        "zeros": zeros,
        "weight_row": weight.stride(0),
        "rows": rows,
        "groups": groups,
        "max_code": scheme.max_code,
        "symmetric": symmetric,
        "scale_dtype": _SCALE_DTYPES[scale_dtype],
    }
    if group_size in _SEARCH:
        grid = blocks((rows * groups, _SEARCH_THREADS // _SEARCH_LANES))
        _SEARCH[group_size][weight.dtype](grid, _SEARCH_THREADS, **arguments)
    else:
        _SEARCH_ANY[weight.dtype](rows * groups, _SEARCH_THREADS, size=group_size, **arguments)
    return scales, zeros


def _corner_bytes(columns: int) -> int:
    """Shared memory for the tiles of a corner, down to the diagonal."""
    tiles = blocks((columns, _TILE))
    return 4 * _TILE * _TILE * tiles * (tiles + 1) // 2


def _fit_bytes(size: int) -> int:
    """Shared memory for a corner, the codes of a block's rows, and two sums per thread."""
    width = blocks((size, _FIT_COLUMNS)) * _FIT_COLUMNS
    return 4 * (width * width + width * _BLOCK_ROWS + 2 * _FIT_THREADS)


def _is_narrow(carried: Tensor) -> bool:
    return carried.dtype == torch.bfloat16


def _of_corner(corner: Tensor, parts: int) -> dict[str, Any]:
    """A kernel's parameters for the corners of the matrices that share the parts."""
    return {
        "corner": corner,
        "corner_matrix": _matrix_stride(corner, 3),
        "corner_row": corner.stride(-2),
        "matrix_parts": parts // (len(corner) if corner.dim() == 3 else 1),
        # Whether all rows begin at multiples of 16 bytes.
        "vector": corner.data_ptr() % 16 == 0 and all(stride % 4 == 0 for stride in corner.stride()[:-1]),
    }


def _matrix_stride(tensor: Tensor, stacked: int) -> int:
    """Elements from what belongs to one matrix to the next; `stacked`: axes of a tensor with one entry per matrix."""
    return tensor.stride(0) if tensor.dim() == stacked else 0


def _fake_clip_search(
    weight: Tensor, importance: Tensor, group_size: int, bits: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    scales = weight.new_empty(weight.shape[0], weight.shape[1] // group_size, dtype=torch.float32)
    return scales, torch.empty_like(scales)


_round_columns = operator(
    "round_columns(Tensor weight, Tensor target, Tensor corner, Tensor scales, Tensor zeros, Tensor groups, "
    "int max_code, Tensor(a!) centred, Tensor(b!) errors) -> ()",
    cuda=_launch_round_columns,
    reference=reference.round_columns,
    fake=lambda *_: None,
)
_round_again = operator(
    "round_again(Tensor gradient, Tensor corner, Tensor(a!) centred, Tensor scales, Tensor zeros, Tensor groups, "
    "int max_code, Tensor(b!) changes) -> ()",
    cuda=_launch_round_again,
    reference=reference.round_again,
    fake=lambda *_: None,
)
_fit_scales = operator(
    "fit_scales(Tensor gradient, Tensor centred, Tensor members, Tensor corner, Tensor(a!) scales, "
    "ScalarType scale_dtype, Tensor(b!) changes) -> ()",
    cuda=_launch_fit_scales,
    reference=reference.fit_scales,
    fake=lambda *_: None,
)
_clip_search = operator(
    "clip_search(Tensor weight, Tensor importance, int group_size, int bits, bool symmetric, ScalarType scale_dtype) "
    "-> (Tensor, Tensor)",
    cuda=_launch_clip_search,
    reference=reference.clip_search,
    fake=_fake_clip_search,
)

"""Tensor maps: how the copy engine of Hopper and later (TMA) learns where a matrix lies and which box to copy.

Source: the CUDA driver API reference, "tensor map object management".
"""

import ctypes
import functools

import torch
from torch import Tensor

from warpbus.cuda import driver
from warpbus.cuda.devices import enter_context
from warpbus.errors import TensorError

ALIGNMENT = 16  # bytes: of the address, and of the distance between rows

# CUtensorMapDataType; to a copy, 8 bits are 8 bits.
_ELEMENT = {
    torch.int8: 0,
    torch.float8_e4m3fn: 0,
    torch.int32: 3,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}
_SWIZZLES = {64: 2, 128: 3}
_PROMOTION_256 = 3  # fetch 256 bytes into L2 at a time


def fits(matrix: Tensor) -> bool:
    """Whether the copy engine can address a matrix [rows, columns] that is contiguous along its columns."""
    pitch, step = matrix.stride()
    return _addressable(matrix.data_ptr(), matrix.element_size(), matrix.shape[1], pitch, step)


def tensor_map(
    matrix: Tensor, box_rows: int, box_columns: int, *, swizzled: bool = True, panels: int | None = None
) -> bytes:
    """The 128 bytes for a matrix [rows, columns], contiguous along its columns, copied box by box.

    The box lies in shared memory with the swizzle over 64 bytes, if that is what `box_columns` elements take, else with
    the one over 128 bytes, which they must not exceed; or with `swizzled` false row by row, at most 256 elements each.
    With `panels`, a copy brings that many neighbouring boxes, one behind the other, and has three coordinates: column
    and row within a panel, and panel; the matrix is a whole number of panels wide.

    Raises:
        TensorError: the matrix is not aligned as `fits` says, or has no whole number of panels.
        DeviceError: the driver rejects it.
    """
    place = matrix.data_ptr(), matrix.dtype, *matrix.shape, *matrix.stride()
    return _map(*place, box_rows, box_columns, swizzled, panels)


def tile_maps(matrix: Tensor, rows: int, columns: int) -> bytes:
    """Two maps for tiles of so many rows and columns: for whole ones, and for the last one, which may have fewer rows.

    The copy engine could fill it up with zeros, but takes several times as long for a row that is not there.
    """
    return _tile_maps(matrix.data_ptr(), matrix.dtype, *matrix.shape, *matrix.stride(), rows, columns)


# A map only says where and how, so the same matrix at the same place has the same map, whatever it holds. One look-up
# finds what a launch asks for: an eager step launches thousands of kernels.
@functools.lru_cache(maxsize=16_384)
def _tile_maps(
    address: int, dtype: torch.dtype, height: int, width: int, pitch: int, step: int, rows: int, columns: int
) -> bytes:
    place = address, dtype, height, width, pitch, step
    whole = _map(*place, min(rows, height), columns, True, None)
    return whole + _map(*place, height % rows or rows, columns, True, None)


@functools.lru_cache(maxsize=16_384)
def _map(
    address: int,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    pitch: int,
    step: int,
    box_rows: int,
    box_columns: int,
    swizzled: bool,
    panels: int | None,
) -> bytes:
    """The map of a matrix at an address; `pitch` and `step` are its strides in elements."""
    size = dtype.itemsize
    if not _addressable(address, size, columns, pitch, step):
        raise TensorError(
            f"a matrix of shape {(rows, columns)}, strides {(pitch, step)} at address {address:#x} cannot be copied by "
            f"TMA: address and rows have to be aligned to {ALIGNMENT} bytes"
        )
    stride = pitch if rows > 1 else max(columns, ALIGNMENT)
    nbytes = -(-stride * size // ALIGNMENT) * ALIGNMENT
    swizzle = _SWIZZLES.get(box_columns * size, _SWIZZLES[128]) if swizzled else 0
    sides: tuple[int, ...] = (columns, rows)
    strides: tuple[int, ...] = (nbytes,)
    box: tuple[int, ...] = (box_columns, box_rows)
    if panels is not None:
        if columns % box_columns:
            raise TensorError(f"a matrix of {columns} columns has no whole number of panels of {box_columns}")
        sides, box = (box_columns, rows, columns // box_columns), (*box, panels)
        strides = (nbytes, box_columns * size)
    return _encode(address, _ELEMENT[dtype], sides, strides, box, swizzle)


def _addressable(address: int, size: int, columns: int, pitch: int, step: int) -> bool:
    return address % ALIGNMENT == 0 and pitch * size % ALIGNMENT == 0 and (step == 1 or columns == 1)


def _encode(
    address: int, element: int, sides: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> bytes:
    """Sides and box in elements, strides in bytes, without the first, from the innermost axis on."""
    enter_context()
    storage = (ctypes.c_uint64 * 24)()
    target = -(-ctypes.addressof(storage) // 64) * 64  # the driver wants 64-byte alignment
    status = driver.library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(target),
        element,
        len(sides),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * len(sides))(*sides),
        (ctypes.c_uint64 * len(strides))(*strides),
        (ctypes.c_uint32 * len(box))(*box),
        (ctypes.c_uint32 * len(box))(*([1] * len(box))),
        0,  # not interleaved
        swizzle,
        _PROMOTION_256,
        0,  # zeros outside
    )
    driver.check(status, f"tensor map of {sides} elements, box {box}")
    return ctypes.string_at(target, 128)

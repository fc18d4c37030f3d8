"""Tensors over memory that torch did not allocate, and of the remote device with an index.

By DLPack, in which an address and a device are simply believed: addresses may have no memory behind them yet, and
torch would ask the driver about those of `__cuda_array_interface__`. It is also the one way that PyTorch has to make a
tensor of a device of its PrivateUse1 backend with an index. Source: the DLPack specification, version 0.8
(`DLManagedTensor`).
"""

import ctypes

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

_CPU, _CUDA, _EXTENSION = 1, 2, 12  # DLDeviceType; the last is PyTorch's PrivateUse1
_UNSIGNED = 1  # DLDataTypeCode


class _Description(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _Description), ("context", ctypes.c_void_p), ("deleter", _Deleter))


# The owners of exported tensors, by the address of their description.
_owners: dict[int, tuple[_Managed, object]] = {}


def _forget(address: int, owners: dict[int, tuple[_Managed, object]] = _owners) -> None:
    owners.pop(address, None)


_deleter = _Deleter(_forget)
# Tensors may outlive this module when the interpreter ends, and call it then.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_deleter))

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def bytes_at(address: int, size: int, device: torch.device, owner: object) -> Tensor:
    """A tensor of uint8 `[size]` over memory at an address; `owner` lives as long as the tensor and its views."""
    kind, index = (_CUDA, device.index or 0) if device.type == "cuda" else (_CPU, 0)
    return _tensor(address, size, kind, index, owner)


def alias(tensor: Tensor) -> Tensor:
    """A tensor at the same place of a GPU's memory, which does not keep that memory allocated."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size()
    return (
        bytes_at(tensor.data_ptr(), size, tensor.device, None)
        .view(tensor.dtype)
        .as_strided(tensor.shape, tensor.stride())
    )


def empty_remote(index: int) -> Tensor:
    """A tensor of uint8 `[0]`, without memory, of the remote device `index` (`warpbus.cuda.remote`)."""
    return _tensor(None, 0, _EXTENSION, index, None)


def _tensor(address: int | None, size: int, kind: int, index: int, owner: object) -> Tensor:
    shape = ctypes.pointer(ctypes.c_int64(size))
    described = _Description(address, kind, index, 1, _UNSIGNED, 8, 1, shape, None, 0)
    managed = _Managed(described, None, _deleter)
    place = ctypes.addressof(managed)
    _owners[place] = managed, owner
    try:
        return from_dlpack(_capsule(place, b"dltensor", None))
    except BaseException:
        _forget(place)
        raise

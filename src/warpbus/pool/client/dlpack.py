"""Makes a tensor of a device with an index: DLPack is the one way that PyTorch has for it.

The structures are those of dlpack.h, version 0.8. A tensor that is made has no elements and no memory.
"""

import ctypes

import torch
from torch import Tensor

_EXTENSION_DEVICE = 12  # kDLExtDev, PyTorch's PrivateUse1
_UNSIGNED = 1  # kDLUInt


class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_shape, _strides = (ctypes.c_int64 * 1)(0), (ctypes.c_int64 * 1)(1)
_delete = _Deleter(lambda _: None)
_kept: list[_DLManagedTensor] = []
"""PyTorch refers to them as long as there are tensors of them: for good."""


def blank(index: int) -> Tensor:
    """A uint8 tensor [0] of the device `warpbus:index`."""
    tensor = _DLTensor(None, _DLDevice(_EXTENSION_DEVICE, index), 1, _DLDataType(_UNSIGNED, 8, 1), _shape, _strides, 0)
    managed = _DLManagedTensor(tensor, None, _delete)
    _kept.append(managed)
    made: Tensor = torch._C._from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))
    return made

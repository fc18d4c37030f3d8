"""Tensors of the devices `warpbus:0`, `warpbus:1`, ...: true sizes and strides over storages that have no memory here.

A storage of this device carries a `Remote`, the handle under which the pool's side keeps its bytes. Views share the
storage and cost no message. When the last view is gone, PyTorch frees the storage, and with it the `Remote`, which
informs the session. Lifetimes need no other accounting, in Python or in C++.
"""

import functools
from collections import deque
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch._C import _acc

from warpbus.cuda.dlpack import empty_remote
from warpbus.cuda.remote import REMOTE
from warpbus.errors import DeviceError
from warpbus.pool.protocol.geometry import MAX_BYTES, Geometry
from warpbus.pool.protocol.signature import New

NAME = REMOTE

# The kernels of the meta device compute views and set geometry without touching memory, for any device's tensors.
META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_set = torch.ops.aten.set_.source_Storage_storage_offset.redispatch
_alias = torch.ops.aten.as_strided.default.redispatch
_restride = torch.ops.aten.as_strided_.default.redispatch
_view_as = torch.ops.aten.view.dtype.redispatch
_create = _acc.create_empty_tensor
_handles = count(1).__next__


class FreedStorages(deque[tuple[int, int]]):
    """Handles and bytes of the storages of a session that are not needed any more.

    Attributes:
        device_index: of the session's device.
    """

    device_index: int = 0


class Remote:
    """A storage on the pool's side: its handle, its size in bytes, and the session that frees it."""

    __slots__ = ("__weakref__", "freed", "handle", "nbytes")

    def __init__(self, nbytes: int, freed: FreedStorages) -> None:
        self.handle = _handles()
        self.nbytes = nbytes
        self.freed = freed

    def __del__(self) -> None:
        # In any thread, at any time, inside any allocation: appending is all that is safe.
        self.freed.append((self.handle, self.nbytes))


def new_tensor(new: New, remote: Remote) -> Tensor:
    """A tensor of the device over a storage that is `remote`."""
    geometry = new.geometry
    if remote.freed.device_index:
        device = torch.device(NAME, remote.freed.device_index)
        large: Any = torch._C._construct_storage_from_data_pointer(0, device, MAX_BYTES)  # as nothing resizes it
        large.remote = remote
        return set_geometry(_alias(META, _blank(device, geometry.dtype), (0,), (1,)), large, geometry)
    tensor = _create(geometry.shape, geometry.dtype)
    storage = tensor.untyped_storage()
    storage.remote = remote  # type: ignore[attr-defined]
    if not geometry.is_contiguous:
        _set(META, tensor, storage, geometry.offset, geometry.shape, geometry.stride)
    return tensor


@functools.cache
def _blank(device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor [0] of a device that is not the first one: PyTorch makes them for Python backends on the first alone,
    but takes them by DLPack for each."""
    return _view_as(META, empty_remote(device.index), dtype)


_get_device = torch._C.TensorBase.device.__get__


def is_remote(tensor: Tensor) -> bool:
    """Whether a tensor lies on such a device. Under `pool run --remote`, `tensor.device` is `cuda:0`."""
    return _get_device(tensor).type == NAME


def remote_of(tensor: Tensor) -> Remote:
    """The remote storage of a tensor of this device."""
    try:
        return tensor.untyped_storage().remote  # type: ignore[attr-defined]
    except AttributeError:
        raise DeviceError(
            f"a tensor of shape {list(tensor.shape)} on {tensor.device} has no bytes on any pool: "
            "make it by .to(gpu.device) or by an operator on that device"
        ) from None


def geometry_of(tensor: Tensor) -> Geometry:
    """The geometry of a tensor in its storage."""
    return Geometry(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def set_geometry(tensor: Tensor, storage: torch.UntypedStorage, geometry: Geometry) -> Tensor:
    """Set the storage and geometry of a tensor of this device, as `Tensor.set_` does."""
    if storage.device.index:
        _set(META, tensor, storage, 0, (0,), (1,))
        return _restride(META, tensor, geometry.shape, geometry.stride, geometry.offset)
    remote = storage.remote  # type: ignore[attr-defined]
    _set(META, tensor, storage, geometry.offset, geometry.shape, geometry.stride)
    storage.remote = remote  # type: ignore[attr-defined]
    return tensor

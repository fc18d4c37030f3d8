"""Methods of `torch.UntypedStorage` that reach the bytes of a remote storage, and addresses of its tensors.

`torch.save`, `torch.load`, `pickle` and `copy.deepcopy` work on storages. A storage of the device has no memory in this
process, so that PyTorch's own methods would see no bytes there.
"""

import functools
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import reduce_storage

from warpbus.errors import StateError
from warpbus.pool.client import transfers
from warpbus.pool.client.session import selected, session_at
from warpbus.pool.client.tensors import NAME, Remote, is_remote, new_tensor
from warpbus.pool.protocol.geometry import contiguous
from warpbus.pool.protocol.signature import New


def replace_storage_methods() -> None:
    """Give `torch.UntypedStorage` methods for remote storages; other storages keep the methods that they had."""
    for name in _REMOTE_METHODS:
        setattr(torch.UntypedStorage, name, _method(name, getattr(torch.UntypedStorage, name)))
    ForkingPickler.register(torch.UntypedStorage, _reduce)
    torch.Tensor.data_ptr = _with_addresses(torch.Tensor.data_ptr)  # type: ignore[assignment,method-assign]


def _method(name: str, original: Any) -> Any:
    remote = _REMOTE_METHODS[name]

    def call(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, "remote"):
            return remote(self, *args, **kwargs)
        if name == "to" and torch.device(kwargs["device"]).type == NAME:
            return _tensor(self).to(kwargs["device"]).untyped_storage()
        return original(self, *args, **kwargs)

    return call


def _tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage of any device, [n] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return transfers.storage_bytes(session_at(storage.device.index), storage)


def _to(
    storage: torch.UntypedStorage, *, device: torch.device | str, non_blocking: bool = False
) -> torch.UntypedStorage:
    device = torch.device(device)
    if device.type == NAME:
        same = device.index is None or device.index == storage.device.index
        return storage if same else _tensor(storage).to(device).untyped_storage()
    return _to_cpu(storage).to(device=device)


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return _tensor(storage).clone().untyped_storage()


def _resize(storage: Any, nbytes: int) -> torch.UntypedStorage:
    """Give the storage other memory, with the same beginning. FSDP frees parameters by a size of 0."""
    with selected(session_at(storage.device.index)) as session:
        old, storage.remote = storage.remote, session.allocate(nbytes)
        kept = min(old.nbytes, nbytes)
        if kept:
            before, after = (new_tensor(New(contiguous(torch.uint8, (kept,)), kept), r) for r in (old, storage.remote))
            after.copy_(before)
    return storage


def _write_file(storage: torch.UntypedStorage, *args: Any) -> None:
    """Called by `pickle`: writes PyTorch's older format."""
    _to_cpu(storage)._write_file(*args)


def _set_from_file(storage: torch.UntypedStorage, *args: Any) -> torch.UntypedStorage:
    """Reads the older format."""
    read = torch.UntypedStorage(storage.nbytes())
    read._set_from_file(*args)
    _tensor(storage).copy_(_tensor(read))
    return storage


def _reduce(storage: torch.UntypedStorage) -> Any:
    """Called to send a storage to another process by `multiprocessing`. The error is raised where it arrives: the
    thread that sends could only print it, and a `DataLoader` would wait for ever."""
    return (_refuse, (storage.nbytes(),)) if hasattr(storage, "remote") else reduce_storage(storage)


def _refuse(nbytes: int) -> None:
    raise StateError(
        f"a tensor over {nbytes} bytes on a remote GPU was sent to another process, which cannot use it: "
        "send tensor.cpu()"
    )


class _Addresses:
    """Numbers in place of the addresses of remote storages, each with as many numbers after it as the storage has
    bytes: no two storages share one, and none is used again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: WeakKeyDictionary[Remote, int] = WeakKeyDictionary()
        self._next = _UNMAPPED

    def of(self, storage: Any) -> int:
        """The number of a storage; 0 if it has no bytes."""
        remote: Remote = storage.remote
        if not remote.nbytes:
            return 0
        with self._lock:
            if remote not in self._given:
                self._given[remote] = self._next
                self._next += -(-remote.nbytes // _ALIGNMENT) * _ALIGNMENT
            return self._given[remote]


_ALIGNMENT = 512
_UNMAPPED = 1 << 52
"""No process has memory there: code that takes such a number for an address is stopped by the processor."""

_addresses = _Addresses()


def _with_addresses(original: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], int]:
    """`torch.Tensor.data_ptr` by which programs tell remote tensors apart, and find those that share memory."""

    @functools.wraps(original)
    def data_ptr(self: torch.Tensor) -> int:
        if not is_remote(self) or not self.numel():
            return original(self)
        return self.untyped_storage().data_ptr() + int(self.storage_offset()) * self.element_size()

    return data_ptr


_REMOTE_METHODS: dict[str, Any] = {
    "cpu": _to_cpu,
    "clone": _clone,
    "data_ptr": _addresses.of,
    "resize_": _resize,
    "nbytes": lambda storage: storage.remote.nbytes,
    "to": _to,
    "_write_file": _write_file,
    "_set_from_file": _set_from_file,
}

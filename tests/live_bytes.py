"""The memory of a computation, by the bytes of all live storages."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages on one kind of device that were made while it was active.

    Attributes:
        peak: the most at one time.
    """

    def __init__(self, device):
        super().__init__()
        self._device = device
        self._live = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in self._storages((args, kwargs))}
        for storage in self._storages(out):
            if storage._cdata not in given | self._live.keys():
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.peak = max(self.peak, self.now())
        return out

    def _storages(self, values):
        tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
        return [each.untyped_storage() for each in tensors if each.device.type == self._device]

    def now(self):
        """Bytes that are alive."""
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        return sum(size for _, size in self._live.values())

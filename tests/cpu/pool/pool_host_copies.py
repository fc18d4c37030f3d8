"""A stream that copies to the host as a GPU does, later than it is asked to; and a tenant's process that reads by it,
whose storages are on the CPU."""

import ctypes
import os
from typing import NoReturn

import torch

from warpbus.pool.tenant import process, server, storages


class LaterCopies:
    """In place of `ReadBack`. A copy is done when its event has been looked at `looks` times."""

    looks = 3

    def __init__(self, device=None):
        self.allocated = 0
        self._events = 0
        self._pending = {}
        self._waiting = {}

    def buffer(self, nbytes):
        self.allocated += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def mark(self):
        self._events += 1
        return self._events

    def copy(self, target, source, nbytes, mark):
        # The source is read at once, as a GPU does before whatever is launched later.
        self._pending[mark] = target, ctypes.string_at(source, nbytes)
        self._waiting[mark] = self.looks

    def done(self, mark):
        if mark in self._pending:
            self._waiting[mark] -= 1
            if self._waiting[mark] > 0:
                return False
            target, data = self._pending.pop(mark)
            ctypes.memmove(target, data, len(data))
        return True


class _GpuServer(server.TenantServer):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._on_gpu = True


def main(descriptor: int) -> NoReturn:
    """Serve one lease."""
    LaterCopies.looks = int(os.environ.get("LOOKS", "3"))
    storages.ReadBack = LaterCopies
    process.TenantServer = _GpuServer
    process.main(descriptor)

"""Checkpoints that the daemon offers: their tensors come into the lease's memory without passing the client.

The daemon hands over descriptors of safetensors files. This process checks the headers, tells the client what is in
them, and loads the tensors that it chooses. On a CPU a tensor of `MAPPED_BYTES` or more is a private map of its file:
leases on one machine share its pages as long as none of them writes there, and a write goes to a page of the lease's
own. Every lease is charged with all bytes of its tensors, since it may write to all of them.
"""

import mmap
import os
import socket
from pathlib import Path
from typing import Any

import torch

from warpbus.errors import CheckpointError, ProtocolError, StateError
from warpbus.formats.safetensors_io import Entry, read_entries
from warpbus.pool.protocol.wire import Value
from warpbus.pool.tenant.storages import Storage, Storages

MAPPED_BYTES = 1 << 20
"""Smaller tensors are copied: a process can have some 65,000 maps."""
DESCRIBED = 2000
"""Tensors that one answer describes."""
MOST_CHECKPOINTS = 8
_MOST_NAME = 1024
_SECONDS = 10.0
_PAGE = mmap.ALLOCATIONGRANULARITY


class _OpenFile:
    """A file by its descriptor, and its size when its header was checked."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self.descriptor = descriptor
        self.nbytes = os.fstat(descriptor).st_size

    def map(self, entry: Entry, *, private: bool) -> tuple[mmap.mmap, int]:
        """The pages of a tensor, and where in them it begins.

        Args:
            private: it may be written to, and the file stays as it is.

        Raises:
            CheckpointError: the file has changed.
        """
        # Accessing a map beyond the end of its file kills the process (SIGBUS).
        if os.fstat(self.descriptor).st_size != self.nbytes:
            raise CheckpointError(f"{self.name}: has changed since it was offered: load the checkpoint again")
        start = entry.offset // _PAGE * _PAGE
        length = entry.offset + entry.nbytes - start
        flags, access = (
            (mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) if private else (mmap.MAP_SHARED, mmap.PROT_READ)
        )
        return mmap.mmap(self.descriptor, length, flags=flags, prot=access, offset=start), entry.offset - start


class OfferedCheckpoints:
    """The checkpoints that this lease may load.

    Args:
        storages: of the lease.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._known: dict[str, dict[str, tuple[_OpenFile, Entry]]] = {}

    def receive(self, name: str, files: int, source: socket.socket) -> tuple[int, int]:
        """Take in a checkpoint's files: `files` messages with a file name and a descriptor each.

        Returns:
            the number of tensors, and their bytes.

        Raises:
            CheckpointError: a file is damaged, or two have a tensor of one name.
            ProtocolError: the daemon sent something else.
        """
        source.settimeout(_SECONDS)
        opened: list[_OpenFile] = []
        try:
            for _ in range(files):
                data, descriptors, _, _ = socket.recv_fds(source, _MOST_NAME, 1)
                if len(descriptors) != 1:
                    raise ProtocolError(f"the daemon sent no file of the checkpoint {name}")
                opened.append(_OpenFile(data.decode(errors="replace"), descriptors[0]))
            tensors: dict[str, tuple[_OpenFile, Entry]] = {}
            for file in opened:
                with os.fdopen(os.dup(file.descriptor), "rb") as stream:
                    entries = read_entries(stream, Path(file.name))
                twice = tensors.keys() & entries.keys()
                if twice:
                    raise CheckpointError(f"{file.name}: its tensor {min(twice)!r:.80} is in another file, too")
                tensors |= {each: (file, entry) for each, entry in entries.items()}
        except BaseException as error:
            for file in opened:
                os.close(file.descriptor)
            if isinstance(error, OSError):
                raise ProtocolError(f"the files of the checkpoint {name} did not come: {error}") from None
            raise
        self._forget(name)
        while len(self._known) >= MOST_CHECKPOINTS:
            self._forget(next(iter(self._known)))
        self._known[name] = tensors
        return len(tensors), sum(entry.nbytes for _, entry in tensors.values())

    def describe(self, name: str, start: int) -> list[Value]:
        """Name, dtype, shape and bytes of `DESCRIBED` tensors, from the number `start` on."""
        tensors = list(self._checkpoint(name).values())[start : start + DESCRIBED]
        return [[entry.name, entry.dtype, list(entry.shape), entry.nbytes] for _, entry in tensors]

    @torch.inference_mode()  # as the storages' tensors are made
    def load(self, name: str, wanted: list[Any]) -> None:
        """Load tensors into new storages, all or none. Those that are there already stay: a client that has lost its
        connection asks again.

        Args:
            wanted: pairs of a tensor's name and the handle of its storage.

        Raises:
            torch.OutOfMemoryError: they do not fit into the quota; nothing was loaded.
            ProtocolError: the checkpoint has no such tensor, or a handle is in use for something else.
            CheckpointError: a file has changed.
        """
        tensors, storages = self._checkpoint(name), self._storages
        chosen: dict[int, tuple[_OpenFile, Entry]] = {}
        for pair in wanted:
            match pair:
                case [str(tensor), int(handle)] if tensor in tensors:
                    file, entry = tensors[tensor]
                    there = storages.live.get(handle)
                    if there is None or there.nbytes != entry.nbytes:
                        chosen[handle] = (file, entry)
                case _:
                    raise ProtocolError(f"the checkpoint {name} has no tensor {pair!r:.80}")
        storages.check_all_new(chosen)
        total = sum(entry.nbytes for _, entry in chosen.values())
        storages.charge(total)  # all of it is looked at before any of it is allocated
        storages.used -= total
        made = []
        try:
            for handle, (file, entry) in chosen.items():
                self._load(handle, file, entry)
                made.append(handle)
        except BaseException:
            for handle in made:
                storages.free(handle)
            raise

    def _load(self, handle: int, file: _OpenFile, entry: Entry) -> None:
        storages = self._storages
        aligned = entry.offset % entry.dtype.itemsize == 0
        if storages.device.type == "cpu" and entry.nbytes >= MAPPED_BYTES and aligned:
            pages, start = file.map(entry, private=True)
            base = torch.frombuffer(pages, dtype=torch.uint8, count=entry.nbytes, offset=start)
            storages.charge(entry.nbytes)
            storages.take(handle, Storage(entry.nbytes, base, {}, 0))
            return
        storages.create(handle, entry.nbytes)
        if not entry.nbytes:
            return
        try:
            pages, start = file.map(entry, private=False)
            with pages, memoryview(pages) as view, view[start : start + entry.nbytes] as data:
                storages.write(handle, 0, data)
                storages.synchronize()  # before the map goes
        except BaseException:
            storages.free(handle)
            raise

    def _checkpoint(self, name: str) -> dict[str, tuple[_OpenFile, Entry]]:
        tensors = self._known.get(name)
        if tensors is None:
            raise StateError(f"the checkpoint {name!r:.80} is not open in the lease's process: load it again")
        return tensors

    def _forget(self, name: str) -> None:
        # Tensors that were loaded have maps of their own.
        for file in {id(file): file for file, _ in self._known.pop(name, {}).values()}.values():
            os.close(file.descriptor)

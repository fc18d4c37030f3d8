"""Transfers the bytes of storages to another process: through the socket, or from GPU to GPU on one host.

Through the socket the bytes go in chunks, by way of pinned memory on both sides: the GPU fills one buffer while the
other is sent. On one host the source sends the addresses of the storages, and the destination's GPU reads them there
(over NVLink if there is one); ranges that it cannot read go through the socket.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from warpbus.cuda.ipc import IpcExport, IpcLocation, IpcMapping
from warpbus.errors import DeviceError
from warpbus.pool.protocol.wire import Value
from warpbus.pool.tenant.migration_messages import checksum, flat
from warpbus.pool.tenant.precopy import MOST_PIECES, StorageRange, follows
from warpbus.pool.tenant.staging import ByteStaging

# A few milliseconds at 2 GB/s, and at 100 GB/s.
_BUDGETS = {"sockets": 16 * 2**20, "GPU to GPU": 256 * 2**20}


class StorageMemory(Protocol):
    """The memory of storages (`warpbus.pool.tenant.storages.Storages`)."""

    device: torch.device

    def raw(self, handle: int) -> Tensor:
        """A storage as uint8 `[nbytes]`."""


class MemoryExporter(Protocol):
    """Exports memory to other processes (`warpbus.cuda.ipc.IpcExport`)."""

    def synchronize(self) -> None: ...
    def locations(self, tensors: list[Tensor]) -> list[IpcLocation]: ...


class MemoryReader(Protocol):
    """Reads memory that other processes export (`warpbus.cuda.ipc.IpcMapping`)."""

    def copy(self, parts: list[tuple[Tensor, IpcLocation]]) -> None: ...
    def close(self) -> None: ...


def this_host() -> str:
    """An id that the processes of one booted system share, and no others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def memory_exporter(device: torch.device) -> MemoryExporter | None:
    """The exporter of a device's memory; None if it cannot be exported."""
    return IpcExport(device) if device.type == "cuda" else None


def memory_reader(device: torch.device) -> MemoryReader | None:
    """The reader of other processes' memory into that of a device; None if there is none."""
    return IpcMapping(device) if device.type == "cuda" else None


class Outgoing:
    """The sender of storages, on the source's side.

    Args:
        storages: of the lease.
        say: sends a STATE frame: the name of the message, its values, `raw`.
        hear: returns the destination's next message and its values; the arguments are the expected names.
        shared: the exporter, if the destination can read this memory itself, else None.

    Attributes:
        path: "GPU to GPU" or "sockets".
        budget: bytes that are transferred in a few milliseconds.
    """

    def __init__(
        self,
        storages: StorageMemory,
        say: Callable[..., None],
        hear: Callable[..., tuple[str, list[Value]]],
        shared: MemoryExporter | None,
    ) -> None:
        self._storages = storages
        self._say = say
        self._hear = hear
        self._shared = shared
        self._staging = ByteStaging(storages.device)

    @property
    def path(self) -> str:
        return "sockets" if self._shared is None else "GPU to GPU"

    @property
    def budget(self) -> int:
        return _BUDGETS[self.path]

    def send(self, chunks: Iterator[list[StorageRange]]) -> None:
        """Send ranges of storages."""
        remaining = ((pieces, self._tensors(pieces)) for pieces in self._not_read(chunks))
        for pieces, views in self._staging.read(remaining):
            self._tell_changed(pieces)
            self._say("bytes", checksum(views), *flat(pieces), raw=views)

    def _tell_changed(self, pieces: Sequence[StorageRange]) -> None:
        changed = [(each.handle, each.since, each.version, each.offset, each.end) for each in pieces if each.since >= 0]
        if changed:
            self._say("changed", *(number for each in changed for number in each))

    def _tensors(self, pieces: Sequence[StorageRange]) -> list[Tensor]:
        raw = self._storages.raw
        return [raw(each.handle)[each.offset : each.offset + each.length] for each in pieces]

    def _not_read(self, chunks: Iterator[list[StorageRange]]) -> Iterator[list[StorageRange]]:
        """Let the destination read the ranges itself. Yields those that it could not read."""
        if self._shared is None:
            yield from chunks
            return
        together: list[list[StorageRange]] = []
        for chunk in chunks:
            full = sum(map(len, together)) + len(chunk) > MOST_PIECES
            if together and (full or follows(chunk[0], together[-1])):
                yield from self._offer(together)
                together = []
            together.append(chunk)
        yield from self._offer(together)

    def _offer(self, chunks: list[list[StorageRange]]) -> list[list[StorageRange]]:
        if self._shared is None or not chunks:
            return chunks
        pieces = [piece for chunk in chunks for piece in chunk]
        try:
            locations = self._shared.locations(self._tensors(pieces))
        except DeviceError:  # memory of a kind that the driver does not share
            self._shared = None
            return chunks
        segments = {location.handle: location.size for location in locations}
        number = {handle: index for index, handle in enumerate(segments)}
        self._shared.synchronize()
        self._tell_changed(pieces)
        values: list[Value] = []
        for piece, location in zip(pieces, locations, strict=True):
            values += [*flat([piece]), number[location.handle], location.offset]
        self._say("copy", [[handle, size] for handle, size in segments.items()], *values)
        answer, _ = self._hear("copied", "cannot")
        if answer == "copied":
            return []
        self._shared = None
        return chunks

"""How the bytes of storages get from one process to another: through the socket, or from GPU to GPU of one host.

Through the socket they go in parcels, by way of pinned memory on both sides: while one is sent the GPU fills the next.
Between GPUs of one host the source says where the storages lie, and the destination's GPU reads them there (over NVLink
where there is one); what cannot be read so goes through the socket.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from warpbus.cuda.ipc import IpcLocation, IpcMapping, Shared
from warpbus.errors import DeviceError
from warpbus.pool.protocol.wire import Value
from warpbus.pool.tenant.parcels import checksum, flat
from warpbus.pool.tenant.precopy import MOST_PIECES, Piece
from warpbus.pool.tenant.staging import Staging

# At 2 GB/s, and at 100.
_BUDGETS = {"sockets": 16 * 2**20, "GPU to GPU": 256 * 2**20}


class Lying(Protocol):
    """Where storages are (`warpbus.pool.tenant.storages.Storages`)."""

    device: torch.device

    def raw(self, handle: int) -> Tensor:
        """A storage as uint8 `[nbytes]`."""


class Sharing(Protocol):
    """Memory that others read (`warpbus.cuda.ipc.Shared`)."""

    def synchronize(self) -> None: ...
    def places(self, tensors: list[Tensor]) -> list[IpcLocation]: ...


class Reading(Protocol):
    """Memory that others share (`warpbus.cuda.ipc.IpcMapping`)."""

    def copy(self, parts: list[tuple[Tensor, IpcLocation]]) -> None: ...
    def close(self) -> None: ...


def this_host() -> str:
    """What processes of one running system have in common, and those of no other have."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def sharing(device: torch.device) -> Sharing | None:
    """What shares the memory of a device, if that can be shared."""
    return Shared(device) if device.type == "cuda" else None


def reading(device: torch.device) -> Reading | None:
    """What reads other processes' memory into that of a device, if anything can."""
    return IpcMapping(device) if device.type == "cuda" else None


class Outgoing:
    """The source's side.

    Args:
        storages: whose bytes go.
        say: sends a STATE frame: what is said, its values, `raw`.
        hear: the destination's next word and its values; one of those given.
        shared: where the destination can read this memory itself, else None.

    Attributes:
        path: "GPU to GPU" or "sockets".
        budget: bytes that go in a few milliseconds, or little more.
    """

    def __init__(
        self,
        storages: Lying,
        say: Callable[..., None],
        hear: Callable[..., tuple[str, list[Value]]],
        shared: Sharing | None,
    ) -> None:
        self._storages = storages
        self._say = say
        self._hear = hear
        self._shared = shared
        self._staging = Staging(storages.device)

    @property
    def path(self) -> str:
        return "sockets" if self._shared is None else "GPU to GPU"

    @property
    def budget(self) -> int:
        return _BUDGETS[self.path]

    def send(self, parcels: Iterator[list[Piece]]) -> None:
        """Send pieces of storages."""
        remaining = ((pieces, self._tensors(pieces)) for pieces in self._not_read(parcels))
        for pieces, views in self._staging.read(remaining):
            self._say("bytes", checksum(views), *flat(pieces), raw=views)

    def _tensors(self, pieces: Sequence[Piece]) -> list[Tensor]:
        raw = self._storages.raw
        return [raw(each.handle)[each.offset : each.offset + each.length] for each in pieces]

    def _not_read(self, parcels: Iterator[list[Piece]]) -> Iterator[list[Piece]]:
        """Have the destination read what it can; what it did not read."""
        if self._shared is None:
            yield from parcels
            return
        together: list[list[Piece]] = []
        for parcel in parcels:
            if sum(map(len, together)) + len(parcel) > MOST_PIECES:
                yield from self._offer(together)
                together = []
            together.append(parcel)
        yield from self._offer(together)

    def _offer(self, parcels: list[list[Piece]]) -> list[list[Piece]]:
        if self._shared is None or not parcels:
            return parcels
        pieces = [piece for parcel in parcels for piece in parcel]
        try:
            places = self._shared.places(self._tensors(pieces))
        except DeviceError:  # memory of a kind that the driver does not share
            self._shared = None
            return parcels
        segments = {place.handle: place.size for place in places}
        number = {handle: index for index, handle in enumerate(segments)}
        self._shared.synchronize()
        values: list[Value] = []
        for piece, place in zip(pieces, places, strict=True):
            values += [*flat([piece]), number[place.handle], place.offset]
        self._say("copy", [[handle, size] for handle, size in segments.items()], *values)
        answer, _ = self._hear("copied", "cannot")
        if answer == "copied":
            return []
        self._shared = None
        return parcels

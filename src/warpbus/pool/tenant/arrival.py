"""The data that has arrived of a lease that migrates here, and whether it is complete.

The source is trusted as little as a client: sizes are compared with the quota before memory is taken, every byte has to
lie inside its storage, and the lease is only taken on if its manifest says that nothing is missing or left over.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warpbus.cuda.ipc import IpcLocation
from warpbus.errors import DeviceError, PoolError, ProtocolError
from warpbus.pool.protocol.wire import Value, decode
from warpbus.pool.tenant.migration_messages import ENTRY, MAX_STATE, check, malformed, numbers
from warpbus.pool.tenant.precopy import StorageRange
from warpbus.pool.tenant.staging import ByteStaging
from warpbus.pool.tenant.storages import MAX_STORAGES
from warpbus.pool.tenant.transport import MemoryReader

if TYPE_CHECKING:
    from warpbus.pool.tenant.execution import Executor


class Arrival:
    """Fills an empty executor.

    Args:
        executor: of the lease's quota.
        reading: a reader of the memory that the source shares, or None.

    Raises (all methods):
        ProtocolError: the source's data is malformed, damaged or does not fit.
        torch.OutOfMemoryError: it is more than the quota.
    """

    def __init__(self, executor: "Executor", reading: MemoryReader | None) -> None:
        self._executor = executor
        self._storages = executor.storages
        self._reading = reading
        self._staging = ByteStaging(executor.storages.device)
        self._received: dict[int, tuple[int, int]] = {}  # by storage: the version that comes, and how much of it came
        self._ends: dict[int, tuple[int, int]] = {}  # by storage: a version of which a part comes, and the part's end
        self._state = bytearray()
        self._manifest = bytearray()

    @property
    def reads(self) -> bool:
        """Whether memory that the source shares can be read."""
        return self._reading is not None

    def take(self, what: str, values: list[Value], raw: memoryview) -> None:
        """Take in anything but a `copy` and the `end`."""
        if what == "bytes" and values:
            self._bytes(values[0], [StorageRange(*row) for row in numbers(values[1:], 4)], raw)
        elif what == "changed":
            for row in numbers(values, 5):
                self._changed(*row)
        elif what == "create":
            for handle, nbytes in numbers(values, 2):
                self._storages.create(handle, nbytes, zeros=False)  # `end` checks that all has come
                self._received[handle] = -1, 0
                self._ends.pop(handle, None)  # of an earlier storage with this handle
        elif what == "drop":
            for (handle,) in numbers(values, 1):
                self._known(handle)
                self._storages.free(handle)
                del self._received[handle]
        elif what == "define" and len(values) == 1 and type(values[0]) is int:
            self._executor.foresee(values[0], raw)
        elif what in ("state", "manifest") and len(values) == 1:
            check(values[0], raw, f"the lease's {what}")
            blob, most = (self._state, MAX_STATE) if what == "state" else (self._manifest, MAX_STORAGES * ENTRY.size)
            if len(blob) + len(raw) > most:
                raise ProtocolError(f"the lease's {what} has more than {most:,} bytes, which is too much to be moved")
            blob += raw
        else:
            raise malformed(f"{what[:40]!a} with {len(values)} values")

    def copy(self, values: list[Value]) -> str:
        """Read pieces from the memory that the source shares; why that is impossible, or ""."""
        segments = values[0] if values else None
        if self._reading is None or not isinstance(segments, list):
            raise malformed("'copy', which was not agreed upon")
        shared = [_segment(segment) for segment in segments]
        rows = numbers(values[1:], 6)
        if any(row[4] >= len(shared) for row in rows):
            raise malformed("a piece of memory that it does not share")
        pieces = [StorageRange(*row[:4]) for row in rows]
        places = [IpcLocation(*shared[segment], offset) for _, _, _, _, segment, offset in rows]
        before = {piece.handle: self._known(piece.handle) for piece in pieces}
        try:
            self._reading.copy(list(zip(self._targets(pieces), places, strict=True)))
        except (DeviceError, PoolError) as error:
            self._received.update(before)
            return str(error)
        return ""

    def end(self, values: list[Value], raw: memoryview) -> None:
        """Check that all is here, and give the executor its state."""
        if len(values) != 3 or values[1:] != [len(self._state), len(self._manifest) // ENTRY.size] or len(raw):
            raise malformed(
                f"an end of {str(values)[:80]} after {len(self._state)} bytes of state and {len(self._manifest)} of "
                "the manifest"
            )
        entries = list(ENTRY.iter_unpack(self._manifest)) if len(self._manifest) % ENTRY.size == 0 else []
        if len(entries) != len(self._received):
            raise malformed(f"a manifest of {len(entries)} storages, with {len(self._received)} that were made")
        sizes = self._storages.sizes()
        for handle, nbytes, version in entries:
            got = self._received.get(handle)
            if got is None or sizes[handle] != nbytes or (nbytes and got != (version, nbytes)):
                raise ProtocolError(
                    f"storage {handle} of {nbytes:,} bytes did not arrive in full: move the lease again"
                )
        self._executor.restore(_state(decode(self._state)))
        if self._executor.executed != values[0]:
            raise malformed(f"the state after batch {self._executor.executed}, and said it was {str(values[0])[:20]}")
        self._state, self._manifest = bytearray(), bytearray()
        if self._storages.device.type == "cuda":
            torch.cuda.synchronize(self._storages.device)

    def drop(self) -> None:
        """Free all that has arrived."""
        for handle in self._received:
            self._storages.free(handle)
        self._received.clear()

    def close(self) -> None:
        """Let go of the source's memory, in a thread: the lease need not wait for that."""
        reading, self._reading = self._reading, None
        if reading is not None:
            threading.Thread(target=_close, args=(reading,), name="warpbus-arrival", daemon=True).start()

    @torch.inference_mode()  # as the storages' tensors were made
    def _bytes(self, crc: Value, pieces: list[StorageRange], raw: memoryview) -> None:
        if sum(piece.length for piece in pieces) != len(raw):
            raise malformed(f"{len(raw)} bytes for pieces of {sum(piece.length for piece in pieces)}")
        check(crc, raw, "a part of the lease's storages")
        parts, at = [], 0
        for piece, target in zip(pieces, self._targets(pieces), strict=True):
            parts.append((target, raw[at : at + piece.length]))
            at += piece.length
        self._staging.write(parts)

    def _changed(self, handle: int, since: int, version: int, start: int, end: int) -> None:
        """Of a version that differs from one that is here, bytes `[start, end)` will come."""
        known, nbytes = self._known(handle), self._storages.sizes()[handle]
        again = known == (version, start) and self._ends.get(handle) == (version, end)  # they could not be read
        if not start < end <= nbytes or not (again or known == (since, nbytes)):
            raise malformed(f"bytes {start} to {end} that differ from version {since} of storage {handle}")
        self._received[handle], self._ends[handle] = (version, start), (version, end)

    def _targets(self, pieces: Sequence[StorageRange]) -> list[Tensor]:
        """Where pieces belong, which are noted as arrived."""
        targets = []
        for piece in pieces:
            version, came = self._known(piece.handle)
            expected = came if version == piece.version else 0
            target = self._storages.raw(piece.handle)[piece.offset : piece.offset + piece.length]
            if piece.offset != expected or len(target) != piece.length:
                raise malformed(f"{piece} where byte {expected} was to follow")
            came = piece.offset + piece.length
            if self._ends.get(piece.handle) == (piece.version, came):
                came = self._storages.sizes()[piece.handle]
            self._received[piece.handle] = piece.version, came
            targets.append(target)
        return targets

    def _known(self, handle: int) -> tuple[int, int]:
        if handle not in self._received:
            raise malformed(f"storage {handle}, which it has not made")
        return self._received[handle]


def _close(reading: MemoryReader) -> None:
    # The source has ended, or ends: its memory goes with it.
    with suppress(DeviceError):
        reading.close()


def _segment(value: Value) -> tuple[bytes, int]:
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], bytes) and type(value[1]) is int:
        return value[0], value[1]
    raise malformed("shared memory without a handle and a size")


def _state(value: Value) -> dict[str, Value]:
    if not isinstance(value, dict):
        raise malformed("a state that is no dict")
    return value

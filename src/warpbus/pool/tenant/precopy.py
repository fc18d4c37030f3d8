"""Chooses the bytes of a lease's storages to copy next while the lease executes, by their versions and sizes.

The method is the pre-copy of live migration of virtual machines (Clark et al., NSDI 2005), with storages in place of
pages. Each round copies the storages that were written since they were copied, until few bytes are left or they are
written as fast as they are copied. A storage that is written during a round is skipped until the next one, because it
would have to be copied again. So a training step, which writes all parameters, soon leaves nothing to copy ahead.

A storage that is written in a part, such as a cache, is copied meanwhile; then only that part is copied again.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from warpbus.pool.tenant.staging import CHUNK

LITTLE = 2**20
"""Bytes: if at most this many are left, they are copied in the pause, in about a millisecond through a socket."""

SHRINKS = 0.8
"""Another round follows only if the last one left at most this fraction of the bytes before it."""

ROUNDS = 8
"""The most rounds."""

LEAST = 2**20
"""The bytes of a range ahead of the pause, unless fewer are left of the storage."""

MOST_PIECES = 4096
"""The most ranges in one message."""


class Versions(Protocol):
    """Versions and sizes of storages (`warpbus.pool.tenant.storages.Storages`)."""

    def sizes(self) -> Mapping[int, int]:
        """The bytes of each live storage, by handle."""

    def version(self, handle: int) -> int:
        """A number that grows with every write and is unique among all writes to all storages."""

    def changed(self, handle: int, since: int) -> tuple[int, int]:
        """A range of bytes `[start, end)` that has all that were written since a version; all bytes if that is not
        known."""

    def forget_writes(self, handle: int) -> None:
        """`changed` will not be asked for versions before the present one."""


@dataclass(frozen=True, slots=True)
class StorageRange:
    """Bytes `[offset, offset + length)` of a version of a storage; ranges of a version are contiguous.

    Attributes:
        since: in the first range of a version that differs from an earlier one, which was copied in full, only in
            `[offset, end)`: that earlier version; else -1.
        end: the end of the last range of the version.
    """

    handle: int
    version: int
    offset: int
    length: int
    since: int = -1
    end: int = -1


def follows(piece: StorageRange, before: list[StorageRange]) -> bool:
    """Whether the piece is of a change of a version whose last piece is the last of those before it, so that it has to
    be reported after these have been sent."""
    return piece.since >= 0 and before[-1].handle == piece.handle


@dataclass
class _Sent:
    """The copied version of a storage: the byte up to which it was copied, and the one at which it is complete."""

    version: int
    at: int
    end: int


class Precopy:
    """Chooses ranges of storages to copy.

    Args:
        storages: of the lease.
        little: no further round begins if at most this many bytes are left.

    Attributes:
        rounds: the number of rounds that have begun.
        stop_reason: the reason to stop the lease and copy the rest, or "" while there is more to copy ahead.
        sent: bytes chosen so far, including bytes that were copied again.
    """

    def __init__(self, storages: Versions, little: int = LITTLE) -> None:
        self._storages = storages
        self._little = little
        self._known: dict[int, int] = {}  # bytes of the storages that were announced to the destination, by handle
        self._sent: dict[int, _Sent] = {}
        self._seen: dict[int, int] = {}  # versions when the round began
        self._queue: deque[int] = deque()
        self._left = sum(storages.sizes().values())
        self.rounds = 0
        self.stop_reason = ""
        self.sent = 0

    def gone(self) -> list[int]:
        """Handles of storages that the destination has to free."""
        sizes = self._storages.sizes()
        gone = [handle for handle, nbytes in self._known.items() if sizes.get(handle) != nbytes]
        for handle in gone:
            del self._known[handle]
            self._sent.pop(handle, None)
        return gone

    def fresh(self) -> list[tuple[int, int]]:
        """Handles and sizes of storages that the destination has to create. Call `gone` before."""
        fresh = [(handle, nbytes) for handle, nbytes in self._storages.sizes().items() if handle not in self._known]
        self._known.update(fresh)
        return fresh

    def left(self) -> int:
        """The bytes that would have to be copied if the lease stopped now."""
        return sum(map(self._left_of, self._storages.sizes()))

    def ahead(self, budget: int) -> Iterator[list[StorageRange]]:
        """Pieces to copy now, about `budget` bytes and at least a piece, in chunks of `CHUNK` bytes, until there is a
        `stop_reason`.

        The lease must not execute while this is iterated.
        """
        return self._chunks(self._cold(), budget)

    def rest(self) -> Iterator[list[StorageRange]]:
        """Pieces of all that is left, the lease having stopped."""
        return self._chunks(iter(list(self._storages.sizes())), None)

    def _cold(self) -> Iterator[int]:
        """Storages that were not written since the round began, or in a part; the least recently written first."""
        while not self.stop_reason:
            sizes = self._storages.sizes()
            while self._queue:
                handle = self._queue[0]
                if handle in sizes and not self._is_rewritten(handle):
                    yield handle
                if self._queue and self._queue[0] == handle:
                    self._queue.popleft()
            self._look()

    def _look(self) -> None:
        """Begin a round, unless the last one shows that another is of no use."""
        sizes = self._storages.sizes()
        versions = {handle: self._storages.version(handle) for handle in sizes}
        left = self.left()
        if left <= self._little:
            self.stop_reason = f"{left:,} bytes are left"
        elif self.rounds and left > SHRINKS * self._left:
            self.stop_reason = f"{left:,} bytes are left, which are written as fast as they are copied"
        elif self.rounds == ROUNDS:
            self.stop_reason = f"{left:,} bytes are left after {ROUNDS} rounds"
        else:
            self.rounds += 1
            self._left, self._seen = left, versions
            known = self._known  # of the others the destination has nothing yet
            dirty = [handle for handle in sizes if handle in known and self._left_of(handle)]
            self._queue = deque(sorted(dirty, key=versions.__getitem__))

    def _left_of(self, handle: int) -> int:
        """The bytes of a storage that the other side does not have as they are now."""
        sent, nbytes = self._sent.get(handle), self._storages.sizes()[handle]
        if sent is None:
            return nbytes
        if sent.version == self._storages.version(handle):
            return sent.end - sent.at
        start, end = self._storages.changed(handle, sent.version)
        return nbytes if end - start == nbytes else sent.end - sent.at + end - start

    def _is_rewritten(self, handle: int) -> bool:
        """Whether all of a storage may have been written since the round began."""
        seen = self._seen.get(handle, -1)
        if self._storages.version(handle) == seen:
            return False
        start, end = self._storages.changed(handle, seen)
        return end - start == self._storages.sizes()[handle]

    def _chunks(self, handles: Iterator[int], budget: int | None) -> Iterator[list[StorageRange]]:
        chunk: list[StorageRange] = []
        size = total = 0
        for handle in handles:
            for piece in self._pieces(handle, CHUNK if budget is None else max(LEAST, min(budget, CHUNK))):
                full = size + piece.length > CHUNK or len(chunk) == MOST_PIECES
                if chunk and (full or follows(piece, chunk)):
                    yield chunk
                    chunk, size = [], 0
                chunk.append(piece)
                size += piece.length
                total += piece.length
                self.sent += piece.length
                self._sent[handle] = _Sent(piece.version, piece.offset + piece.length, piece.end)
                if budget is not None and total >= budget:
                    yield chunk
                    return
        if chunk:
            yield chunk

    def _pieces(self, handle: int, most: int) -> Iterator[StorageRange]:
        """All pieces of a storage that are left. Each has to be noted in `_sent` before the next one is asked for."""
        while self._left_of(handle):
            yield self._next_piece(handle, most)

    def _next_piece(self, handle: int, most: int) -> StorageRange:
        storages, sent = self._storages, self._sent.get(handle)
        nbytes, version, since = storages.sizes()[handle], storages.version(handle), -1
        start, end = (0, nbytes) if sent is None else storages.changed(handle, sent.version)
        known = sent is not None and (sent.version == version or end - start < nbytes)
        if sent is not None and known and sent.at < sent.end:
            # Of the version whose copy has begun. What was written since then follows as a change of it.
            version, start, end = sent.version, sent.at, sent.end
        else:
            since = sent.version if sent is not None and known else -1
            storages.forget_writes(handle)
        return StorageRange(handle, version, start, min(most, end - start), since, end)

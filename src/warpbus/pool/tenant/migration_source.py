"""Live migration of a lease to another process, on the same host or on another one: the side that the lease leaves.

The source's process drives the migration between batches:

    source = MigrationSource(executor, channel, migration_token=migration_token)
    source.ask()
    while not source.is_accepted():
        ...                                   # execute batches
    while not source.copy_ahead().stop_reason:
        ...                                   # execute batches
    ...                                       # tell the client: MOVED(final=False), "if I vanish, ask there"
    report = source.finish()                  # the pause
    ...                                       # MOVED(final=True), and free everything

`migration_destination` is the other side.

If a method of the source raises, the lease stays there unchanged. If the client knows the destination, it has to
learn that the move failed before anything else is executed. Once the source begins to send COMMIT it never executes
again, even if the message is lost: the destination takes over when COMMIT arrives, or when the client claims the lease.
So at most one side executes; if the side that has to continue dies, the lease is lost, with a reason.

This module opens no connections and starts no processes. `migration_messages` lists the messages, `precopy` chooses the
bytes to copy ahead, and `transport` transfers them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from warpbus.errors import ConnectionLostError, DeviceError, PeerTimeoutError, PoolError, StateError
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.failures import sent_error
from warpbus.pool.protocol.frames import PROTOCOL, Frame, Kind
from warpbus.pool.protocol.messages import decode_dict
from warpbus.pool.protocol.wire import Value, encode
from warpbus.pool.tenant import migration_messages
from warpbus.pool.tenant.migration_messages import ENTRY
from warpbus.pool.tenant.precopy import LEAST, LITTLE, MOST_PIECES, Precopy
from warpbus.pool.tenant.staging import CHUNK
from warpbus.pool.tenant.transport import MemoryExporter, Outgoing, memory_exporter, this_host

if TYPE_CHECKING:
    from warpbus.pool.tenant.execution import Executor

ANSWER = 60.0
"""Seconds within which the destination has to answer."""

# Seconds between two batches, when there is nothing to do but to wait for the destination.
_NAP = 0.001

_PIECE_SECONDS = 0.004  # that a batch waits for a piece that is copied ahead, about

# Seconds: the client waits meanwhile to learn where the lease is.
_CONFIRMATION = 2.0


class SourceState(Enum):
    """The states of a migration on the source's side."""

    NEW = "nothing was said"
    COPYING = "the destination wants it; it executes on"
    STOPPED = "it executes nothing until it is known where it goes on"
    STAYS = "it did not move, and executes on"
    MOVED = "it never executes here again"


@dataclass(frozen=True)
class MigrationProgress:
    """The progress of the pre-copy phase.

    Attributes:
        copied: bytes sent, including bytes that were sent again.
        total: bytes of the storages that exist now.
        rounds: copying rounds that have begun.
        stop_reason: the reason to call `finish` now, or "".
        waits: nothing was copied, because the destination prepares what it was sent.
    """

    copied: int
    total: int
    rounds: int
    stop_reason: str
    waits: bool


@dataclass(frozen=True)
class MigrationReport:
    """The figures of a completed migration.

    Attributes:
        ahead: bytes copied while the lease executed.
        paused: bytes copied in the pause, storages and state.
        pause: seconds from the stop to COMMIT.
        seconds: from `ask` to COMMIT.
        rounds: of copying ahead.
        stop_reason: why copying ahead ended.
        path: "sockets" or "GPU to GPU".
        confirmed: the destination has said that it lives. If not, the client's claim decides.
    """

    ahead: int
    paused: int
    pause: float
    seconds: float
    rounds: int
    stop_reason: str
    path: str
    confirmed: bool


class MigrationSource:
    """The source of a migration. Used by the thread that executes the lease.

    Args:
        executor: the lease's state.
        channel: to the destination; closed when the migration ends, in any way.
        migration_token: the secret by which the destination recognizes the source.
        timeout: seconds within which the destination has to answer.
        little: the pre-copy phase ends once at most this many bytes are left for the pause.
        shared: exports this device's memory to a destination on the same host; returns None if that is impossible.
        clock: returns seconds.

    Attributes:
        state: batches may be executed unless it is STOPPED or MOVED.

    Raises (all methods):
        DeviceError, PoolError: the move failed; the message says why. The lease stays.
    """

    def __init__(
        self,
        executor: "Executor",
        channel: Channel,
        *,
        migration_token: bytes,
        timeout: float = ANSWER,
        little: int = LITTLE,
        shared: Callable[[torch.device], MemoryExporter | None] = memory_exporter,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.state = SourceState.NEW
        self._executor = executor
        self._channel = channel
        self._migration_token = migration_token
        self._timeout = timeout
        self._shared = shared
        self._clock = clock
        self._precopy = Precopy(executor.storages, little)
        self._foreseen: dict[int, bytes] = {}
        self._awaited = 0  # answers that the destination is ready for what it was sent
        self._piece = CHUNK  # bytes that are copied ahead at once
        self._exporter: MemoryExporter | None = None
        self._until = 0.0
        self._number = 0
        self._began = 0.0

    def ask(self) -> None:
        """Ask the destination to accept the lease. `is_accepted` tells when it has."""
        self._expect(SourceState.NEW)
        with self._staying():
            self._began = self._clock()
            storages = self._executor.storages
            self._exporter = self._shared(storages.device)
            hello: dict[str, Value] = {
                "protocol": PROTOCOL,
                "migration_token": self._migration_token,
                "device": storages.device.type,
                "used": storages.used,
                "shared": None if self._exporter is None else this_host(),
            }
            self._channel.send(Kind.HELLO, 0, encode(hello))
            self._until = time.monotonic() + self._timeout

    def is_accepted(self, timeout: float = 0.0) -> bool:
        """Whether the destination has accepted the lease, or does within `timeout` seconds."""
        self._expect(SourceState.NEW)
        with self._staying():
            frame = self._channel.receive(timeout)
            if frame is None:
                if time.monotonic() > self._until:
                    raise self._silent()
                return False
            _raise_refusal(frame)
            if frame.kind is not Kind.WELCOME:
                raise migration_messages.malformed(f"a {frame.kind.name} frame where WELCOME was expected")
            answer = decode_dict(frame.payload)
            shared = self._exporter if answer.get("reads") is True else None
            self._outgoing = Outgoing(self._executor.storages, self._say, self._hear, shared)
            self._executor.storages.writes = {}
            self.state = SourceState.COPYING
            return True

    def copy_ahead(self, budget: int | None = None) -> MigrationProgress:
        """Copy about `budget` bytes of storages that are not being written, and at least one range of a storage.

        While the destination prepares what it was sent, nothing is copied: the bytes would wait there, and the next
        batch here. None is what keeps the next batch waiting for a few milliseconds.
        """
        self._expect(SourceState.COPYING)
        with self._staying():
            precopy, waited = self._precopy, self._awaited > 0
            if self._is_ready(0.0) and not waited:
                self._tell_storages(ask=True)
                self._tell_definitions()
            stop_reason, before = "", precopy.sent
            if self._is_ready(_NAP if precopy.stop_reason else 0.0):
                self._copy_piece(budget)
                stop_reason = precopy.stop_reason if self._is_ready(_NAP if precopy.stop_reason else 0.0) else ""
            waits = self._awaited > 0 and precopy.sent == before
            return MigrationProgress(precopy.sent, self._executor.storages.used, precopy.rounds, stop_reason, waits)

    def _copy_piece(self, budget: int | None) -> None:
        """Copy about `budget` bytes; None is what took a few milliseconds the last times."""
        began, sent = self._clock(), self._precopy.sent
        self._outgoing.send(self._precopy.ahead(min(self._piece, self._outgoing.budget) if budget is None else budget))
        took, sent = self._clock() - began, self._precopy.sent - sent
        if took > _PIECE_SECONDS:
            self._piece = max(LEAST, self._piece // 2)
        elif took < _PIECE_SECONDS / 2 and sent >= self._piece:
            self._piece = min(2 * self._piece, self._outgoing.budget)

    def finish(self) -> MigrationReport:
        """Stop the lease, copy the rest, and commit. The state is MOVED afterwards."""
        self._expect(SourceState.COPYING)
        with self._staying():
            self.state = SourceState.STOPPED
            stopped, ahead = self._clock(), self._precopy.sent
            self._tell_storages()
            # The state first: while it is made the device may still be at work on the last batches.
            state = self._blob("state", encode(self._executor.state()))
            self._outgoing.send(self._precopy.rest())
            sizes, version = self._executor.storages.sizes(), self._executor.storages.version
            manifest = b"".join(ENTRY.pack(handle, nbytes, version(handle)) for handle, nbytes in sizes.items())
            self._blob("manifest", manifest)
            self._say("end", self._executor.executed, state, len(sizes))
            self._hear("prepared")
            paused = self._precopy.sent - ahead + state
            self.state = SourceState.MOVED
        # From here on nothing can be taken back: the word may arrive even if sending it fails.
        with suppress(PoolError, OSError):
            self._say("commit")
        now, confirmed = self._clock(), False
        with suppress(PoolError, OSError):
            self._timeout = min(self._timeout, _CONFIRMATION)
            confirmed = self._hear("living")[0] == "living"
        self._channel.close()
        precopy, path = self._precopy, self._outgoing.path
        return MigrationReport(
            ahead,
            paused,
            now - stopped,
            now - self._began,
            precopy.rounds,
            precopy.stop_reason or "asked",
            path,
            confirmed,
        )

    def _tell_storages(self, *, ask: bool = False) -> None:
        """Tell the destination which storages are new or gone; with `ask` let it say when it has made large ones."""
        gone = self._precopy.gone()
        for start in range(0, len(gone), MOST_PIECES):
            self._say("drop", *gone[start : start + MOST_PIECES])
        fresh = self._precopy.fresh()
        for start in range(0, len(fresh), MOST_PIECES):
            self._say("create", *(number for pair in fresh[start : start + MOST_PIECES] for number in pair))
        if ask and sum(nbytes for _, nbytes in fresh) > CHUNK:
            self._ask_ready()

    def _ask_ready(self) -> None:
        self._say("ready")
        self._awaited += 1

    def _tell_definitions(self) -> None:
        """The destination prepares calls while the lease executes: PyTorch may take seconds to learn what they give."""
        found = {number: each.encoded for number, each in self._executor.definitions.items()}
        fresh = [number for number, encoded in found.items() if self._foreseen.get(number) is not encoded]
        for number in fresh:
            self._say("define", number, raw=[memoryview(found[number])])
        if fresh:
            self._foreseen.update({number: found[number] for number in fresh})
            self._ask_ready()

    def _is_ready(self, timeout: float) -> bool:
        """Whether the destination has prepared what it was sent, or has within so many seconds."""
        while self._awaited:
            frame = self._channel.receive(timeout)
            if frame is None:
                return False
            _raise_refusal(frame)
            self._heard(frame, "ready")
        return True

    def _heard(self, frame: Frame, *expected: str) -> tuple[str, list[Value]] | None:
        """The content of a frame; None if the destination is ready and something else is expected."""
        what, values, _ = migration_messages.heard(frame)
        if what == "ready" and self._awaited:
            self._awaited -= 1
            return (what, values) if what in expected else None
        if what not in expected:
            raise migration_messages.malformed(f"{what[:40]!a} where {' or '.join(expected)} was expected")
        return what, values

    def _blob(self, what: str, data: bytes) -> int:
        view = memoryview(data)
        for start in range(0, len(data), CHUNK):
            part = view[start : start + CHUNK]
            self._say(what, migration_messages.checksum([part]), raw=[part])
        return len(data)

    def _say(self, what: str, *values: Value, raw: "list[memoryview] | tuple[()]" = ()) -> None:
        self._number += 1
        try:
            migration_messages.say(self._channel, self._number, what, *values, raw=raw)
        except ConnectionLostError:
            self._explain()
            raise

    def _explain(self) -> None:
        """Raise the destination's reason for closing the connection, if it has sent one."""
        with suppress(ConnectionLostError):
            while (frame := self._channel.receive(0.0)) is not None:
                _raise_refusal(frame)

    def _hear(self, *expected: str) -> tuple[str, list[Value]]:
        while (said := self._heard(self._frame(), *expected)) is None:
            pass
        return said

    def _frame(self) -> Frame:
        frame = self._channel.receive(self._timeout)
        if frame is None:
            raise self._silent()
        _raise_refusal(frame)
        return frame

    def _silent(self) -> PeerTimeoutError:
        return PeerTimeoutError(f"the destination has not answered for {self._timeout:.0f} seconds")

    def _expect(self, state: SourceState) -> None:
        if self.state is not state:
            raise StateError(f"this move is {self.state.name} ({self.state.value}), not {state.name}: begin another")

    @contextmanager
    def _staying(self) -> Iterator[None]:
        """If the block raises, cancel the migration."""
        try:
            yield
        except BaseException:
            self._stay()
            raise

    def _stay(self) -> None:
        self.state = SourceState.STAYS
        self._executor.storages.writes = None
        with suppress(PoolError, OSError):
            self._say("cancel")
        self._channel.close()


def _raise_refusal(frame: Frame) -> None:
    """Raise the error that a REFUSED or ERROR frame carries."""
    if frame.kind in (Kind.REFUSED, Kind.ERROR):
        raise DeviceError(f"the destination refuses the lease: {sent_error(decode_dict(frame.payload))}")

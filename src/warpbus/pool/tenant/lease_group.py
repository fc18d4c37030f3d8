"""A group that a lease is in, and the steps that it does with the other leases of the group.

Processes of a group have a connection for each pair of them, a `Channel`, which the daemons have opened. Bytes between
two ranks go in messages of DATA frames, each with the number of the message between the two, what the program called
and the size of the message, so that ranks that do not do the same get an error and not each other's bytes. On one
machine the bytes lie in memory that both processes share (`LinkMemory`), and a frame says how many came. Between two
GPUs of one machine a frame may announce the message, and the GPUs do the rest in streams of their own (`DeviceLink`, if
the daemon has the option `gpu_links`): a process waits neither for its GPU nor for the other ranks' announcements,
which are checked later (`Announcements`), and operators that do not use the step's storages go on. A rank that is gone,
or fails, ends the group for all: each tells the others why, and every later step fails with this reason.
"""

import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from warpbus.errors import ConnectionLostError, PeerTimeoutError, PoolError, ProtocolError, StateError
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.failures import CallFailure, PoisonedError
from warpbus.pool.protocol.frames import Frame, Kind
from warpbus.pool.protocol.group_steps import ExchangeStep, GroupPlace, ReduceStep, Region
from warpbus.pool.protocol.link_memory import SLOT, LinkMemory
from warpbus.pool.protocol.sockets import hung_up
from warpbus.pool.protocol.wire import decode, encode
from warpbus.pool.tenant.announcements import Announcements, ExpectedMessage
from warpbus.pool.tenant.combine import combine
from warpbus.pool.tenant.device_link import DeviceLink
from warpbus.pool.tenant.pending_steps import PendingStep, StepFailure, StepStream, StepTimes, StepWatch
from warpbus.pool.tenant.slot_copies import SlotCopies
from warpbus.pool.tenant.staging import CHUNK, ByteStaging
from warpbus.pool.tenant.storages import Storages

_HEAD = struct.Struct("<IQ")  # a hash of the label, the bytes of the message
_IN_SLOT = struct.Struct("<I")  # bytes of the message in a slot of shared memory
_DIRECTLY = b"d"  # in place of bytes: they come from the other GPU
_MOST = _HEAD.size + CHUNK
_PIECE = 16 << 20
"""Bytes of a share that are combined at once: what a rank holds of each other rank's."""
_LOOKED_EVERY = 0.1
_MAX_REASON = 1000
_SECONDS_TO_DRAIN = 10.0


class _NeverComputedError(PoisonedError):
    """One rank's data for another was never computed; both know why, and the group goes on."""


class LeaseGroup:
    """A group that the lease is in.

    Args:
        membership: the lease's place.
        storages: of the lease.
        attend: called from time to time while it waits for another rank. What it raises ends the wait and the group.
        times: to which the steps' are added.
    """

    def __init__(
        self, membership: GroupPlace, storages: Storages, attend: Callable[[], None], times: StepTimes
    ) -> None:
        self.membership = membership
        self._storages = storages
        self._attend = attend
        self._times = times
        self._channels: dict[int, Channel] = {}
        self._memories: dict[int, LinkMemory] = {}
        self._direct: dict[int, DeviceLink] = {}
        self._streams: tuple[StepStream, StepStream] | None = None  # outgoing and incoming, if a link is direct
        self._kept: list[Tensor] = []  # the tensors of a step with streams
        self._clock = 0  # of `storages`, when such a step began
        self.watch = StepWatch(self._release, self._gone, self._cannot_complete)
        self.announcements = Announcements(self._channels, _MOST, self._differs)
        self._lock = threading.Lock()
        self._sent: Counter[int] = Counter()  # messages to each rank
        self._taken: Counter[int] = Counter()  # from each rank
        self._broken: str | None = None
        self._takes_only = False  # this rank waits for one other in this step, and no rank for this one
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="group")
        # One for each thread.
        self._outgoing, self._incoming = ByteStaging(storages.device), ByteStaging(storages.device)
        self._to_slots, self._from_slots = SlotCopies(storages.device), SlotCopies(storages.device)

    @property
    def linked(self) -> list[int]:
        """The ranks that there is a connection to."""
        return sorted(self._channels)

    def link(
        self,
        rank: int,
        channel: Channel,
        memory: LinkMemory | None,
        direct: DeviceLink | None = None,
        streams: Callable[[], tuple[StepStream, StepStream]] | None = None,
    ) -> None:
        """Take over a connection to another rank, from any thread. Raises StateError if there is one or cannot be.

        Args:
            memory: shared with that rank's process, which uses it too; None if there is none.
            direct: slots on the GPUs of both, which are open; None if there are none.
            streams: makes the two streams in which steps go from GPU to GPU.
        """
        with self._lock:
            if self._broken is not None or rank in self._channels or not 0 <= rank < self.membership.size:
                raise StateError(f"rank {rank} of the group is connected already, or the group has ended")
            channel.peer = f"rank {rank} of the group"
            self._channels[rank] = channel
            if memory is not None:
                self._memories[rank] = memory
            if direct is not None and streams is not None:
                self._direct[rank] = direct
                self._streams = self._streams or streams()

    def close(self, why: str) -> None:
        """End the group: say why to the other ranks that can hear it now, and close the connections."""
        with self._lock:
            if self._broken is not None:
                return
            self._broken = why
            channels = list(self._channels.values())
        for channel in channels:
            with suppress(PoolError):
                channel.offer(Kind.ERROR, 0, why[:_MAX_REASON].encode())
            channel.close()
        self._sender.shutdown(wait=False)
        self.watch.end()

    def unlink(self) -> list[DeviceLink]:
        """After `close`: the links of GPUs, of which nothing is in use any more, or none while that is not known."""
        with suppress(PoolError):
            self.watch.drain(self._attend, 0, _SECONDS_TO_DRAIN)
        return [] if self.watch.has_pending else list(self._direct.values())

    def drain(self) -> None:
        """Wait until nothing is under way: the others may need what this rank sends."""
        with suppress(PoolError):
            self.watch.drain(self._attend, 0, _SECONDS_TO_DRAIN)
        self.announcements.check()

    def keep_pace(self, seconds: float) -> None:
        """Wait until each rank has come to all steps that were launched here so many seconds ago, or earlier."""
        if self.announcements.behind(seconds) is None:
            return
        began = time.monotonic()
        self._catch_up(seconds)
        waited = time.monotonic() - began
        self._times.waited += waited
        self._times.seconds += waited

    def _catch_up(self, seconds: float) -> None:
        while (found := self.announcements.behind(seconds)) is not None:
            rank, message = found
            if self.announcements.next(rank, _LOOKED_EVERY):
                continue
            try:
                self._look(message.since + self.membership.seconds, f"rank {rank} does not come to {message.label}")
            except Exception as error:
                self.announcements.fail(message, str(error))

    def run(self, step: ExchangeStep | ReduceStep) -> None:
        """Do a step.

        Raises:
            StateError: the ranks do not do the same, another rank is gone or has failed, or the group had ended before.
            PeerTimeoutError: another rank does not do its part in time. The group has ended.
            PoisonedError: the data to send was never computed. If only this rank sends in the step, the others get the
                same error, and the group goes on; else it has ended, since they wait for the bytes.
            ProtocolError: as `Storages`; the group has ended.
        """
        if self._broken is not None:
            raise StateError(f"{step.label}: the group has ended: {self._broken}")
        began = time.perf_counter()
        try:
            if self._streams is None:
                self._do(step)
            else:
                self._launch(step, self._streams)
        except _NeverComputedError:
            raise  # the other rank knows
        except Exception as error:
            reason, first = f"{step.label}: {error}", self._broken
            self.close(f"rank {self.membership.rank}: {reason}")
            if first is not None:  # what the other thread met
                raise StateError(f"{step.label}: {first}") from None
            if isinstance(error, ConnectionLostError):  # to the client this would mean its own connection
                raise StateError(reason) from None
            raise
        finally:
            self._times.steps += 1
            self._times.launched += self._streams is not None
            self._times.seconds += time.perf_counter() - began

    def _do(self, step: ExchangeStep | ReduceStep) -> None:
        if isinstance(step, ExchangeStep):
            self._exchange(step)
        else:
            self._reduce(step)

    def _launch(self, step: ExchangeStep | ReduceStep, streams: tuple[StepStream, StepStream]) -> None:
        """Do a step in streams. All that goes from GPU to GPU is only launched."""
        self.watch.drain(self._attend)
        storages = self._storages
        clock = self._clock = storages.clock
        outgoing, incoming = streams
        handles = {region.handle for region in step.regions if region.nbytes}
        if not handles:
            self._do(step)
            return
        for stream in streams:
            stream.follow()
            for pending in storages.pending_steps(handles):
                stream.after(pending.mark)
        self._kept = []
        try:
            with incoming.current():
                self._do(step)
        finally:
            incoming.after(outgoing.mark())
            until = time.monotonic() + self.membership.seconds
            pending = PendingStep(step.label, incoming, incoming.mark(), clock, until, self._kept)
            self.watch.add(pending)
            storages.mark_pending(handles, pending)

    def _exchange(self, step: ExchangeStep) -> None:
        head = zlib.crc32(step.label.encode())
        for rank, _ in (*step.sends, *step.receives):
            self._channel(rank)
        self._takes_only = not step.sends and len(step.receives) == 1
        try:
            messages = [(rank, self._bytes(region)) for rank, region in self._in_turn(step.sends, 1)]
        except PoisonedError as error:
            if step.receives:
                raise
            for rank, _ in step.sends:  # they wait for nothing else
                self._sent[rank] += 1
                self._channel(rank).send(Kind.ERROR, self._sent[rank], encode(error.failure.plain()))
            raise _NeverComputedError(error.failure) from None
        sending = self._send(head, messages)
        for rank, region in self._in_turn(step.receives, -1):
            self._receive(head, step.label, rank, self._bytes(region))
        self._finish(sending)

    def _reduce(self, step: ReduceStep) -> None:
        me, size = self.membership.rank, self.membership.size
        if len(step.shares) != size or step.shares[me].nbytes != step.result.nbytes:
            raise ProtocolError(f"{len(step.shares)} shares in a group of {size} ranks, or a result of another size")
        head, self._takes_only = zlib.crc32(step.label.encode()), False
        # The result may lie in this rank's shares: nothing of a piece is written before all ranks have the piece.
        for start in range(0, max(share.nbytes for share in step.shares) or 1, _PIECE):
            pieces = [_piece(share, start) for share in step.shares]
            others = [(rank, piece) for rank, piece in enumerate(pieces) if rank != me and piece.nbytes]
            sending = self._send(head, [(rank, self._bytes(piece)) for rank, piece in self._in_turn(others, 1)])
            shares = [self._bytes(pieces[me])] * size
            if pieces[me].nbytes:
                for rank, piece in self._in_turn([(r, pieces[me]) for r in range(size) if r != me], -1):
                    shares[rank] = torch.empty(piece.nbytes, dtype=torch.uint8, device=self._storages.device)
                    self._receive(head, step.label, rank, shares[rank])
            self._finish(sending)
            if self._streams is not None:  # the result may lie in what is sent
                self._streams[1].after(self._streams[0].mark())
            if pieces[me].nbytes:
                combine(step, self._bytes(_piece(step.result, start)), shares)

    def _in_turn(self, transfers: Sequence[tuple[int, Region]], direction: int) -> list[tuple[int, Region]]:
        """Transfers in an order in which no rank waits for one that waits for it: each rank sends to the next one
        first (1), and receives from the one before it first (-1)."""
        me, size = self.membership.rank, self.membership.size
        return sorted(transfers, key=lambda transfer: direction * (transfer[0] - me) % size)

    def _send(self, head: int, messages: list[tuple[int, Tensor]]) -> "Future[None] | None":
        numbered, streams = [], self._streams
        direct = {} if streams is None else {rank: link for rank, link in self._direct.items() if link.sends}
        for rank, source in messages:
            self._sent[rank] += 1
            self._times.nbytes += len(source)
            if streams is not None and rank in direct:
                begin = _HEAD.pack(head, len(source))
                self._channels[rank].send(Kind.DATA, self._sent[rank], begin, _DIRECTLY if len(source) else b"")
                if len(source):  # nothing is one piece, too, and would take a slot
                    direct[rank].send(streams[0], source)
            else:
                numbered.append((rank, self._sent[rank], source))
        if not numbered:
            return None
        self._to_slots.follow()  # in this thread: the stream of what has computed the bytes is its own
        return self._sender.submit(self._send_all, head, numbered)

    def _send_all(self, head: int, messages: list[tuple[int, int, Tensor]]) -> None:
        try:
            for rank, number, source in messages:
                begin = _HEAD.pack(head, len(source))
                if not len(source):
                    self._channels[rank].send(Kind.DATA, number, begin)
                    continue
                if rank in self._memories:
                    self._send_in_slots(rank, number, begin, source)
                    continue
                for _, parts in self._outgoing.read((None, [piece]) for piece in source.split(CHUNK)):
                    self._channels[rank].send(Kind.DATA, number, begin, *parts)
        except Exception as error:
            self.close(str(error))  # wakes the thread that receives
            raise

    def _send_in_slots(self, rank: int, number: int, begin: bytes, source: Tensor) -> None:
        channel = self._channels[rank]
        slots = ((self._to_fill(rank), piece) for piece in source.split(SLOT))
        for nbytes in self._to_slots.copy((slot[: len(piece)], piece) for slot, piece in slots):
            channel.send(Kind.DATA, number, begin, _IN_SLOT.pack(nbytes))

    def _to_fill(self, rank: int) -> Tensor:
        while (slot := self._memories[rank].to_fill(_LOOKED_EVERY)) is None:
            if self._broken is not None:
                raise ConnectionLostError(self._broken)
        return slot

    def _finish(self, sending: "Future[None] | None") -> None:
        """Wait until everything is sent that this process has to send."""
        if sending is None:
            return
        until = time.monotonic() + self.membership.seconds
        while not wait([sending], _LOOKED_EVERY).done:
            self._look(until, "another rank does not take in what is sent to it")
        sending.result()

    def _receive(self, head: int, label: str, rank: int, target: Tensor) -> None:
        self._taken[rank] += 1
        expected = (self._taken[rank], head, len(target))
        came, memory, direct = 0, self._memories.get(rank), self._direct.get(rank)
        if direct is not None and direct.both and len(target) and not self._takes_only and self._streams is not None:
            # The GPU waits for the bytes. A rank that sends nothing in this step waits here: the other one may say that
            # there is nothing to send.
            check = partial(_check_announced, rank, expected)
            self.announcements.expect(rank, ExpectedMessage(label, self._clock, time.monotonic(), check))
            direct.receive(self._streams[1], target)
            return
        while True:
            frame = self._next(rank, label)
            found, announced, data = _parsed(frame)
            nbytes = len(data)
            whole = direct is not None and direct.receives and data == _DIRECTLY
            if whole:
                nbytes = announced
            elif memory is not None and nbytes == _IN_SLOT.size:
                (nbytes,) = _IN_SLOT.unpack(data)
                nbytes = nbytes if nbytes <= SLOT else announced + 1
            if (frame.number, found, announced) != expected or came + nbytes > announced:
                raise _other_step(rank, announced, len(target))
            if whole and direct is not None and self._streams is not None:
                direct.receive(self._streams[1], target)
            elif nbytes and memory is not None:
                if not came:
                    self._from_slots.follow()
                self._from_slots.take(target[came : came + nbytes], memory.filled(), memory.empty)
            elif nbytes:
                self._incoming.write([(target[came : came + nbytes], data)])
            came += nbytes
            if came == announced:
                self._from_slots.finish()
                return

    def _next(self, rank: int, label: str) -> Frame:
        channel, began = self._channel(rank), time.monotonic()
        self._catch_up(0.0)
        if self._broken is not None:
            raise StateError(self._broken)
        with self.announcements.reading:
            while (frame := channel.receive(_LOOKED_EVERY, most=_MOST)) is None:
                self._look(began + self.membership.seconds, f"rank {rank} does not come to {label}")
        self._times.waited += time.monotonic() - began
        if frame.kind is Kind.ERROR and frame.number == self._taken[rank] and self._takes_only:
            raise _NeverComputedError(CallFailure.read(decode(frame.payload)))
        _check_kind(rank, frame)
        return frame

    def _look(self, until: float, what: str) -> None:
        self._attend()
        if time.monotonic() > until:
            raise PeerTimeoutError(f"{what}: waited {self.membership.seconds:g} s")

    def _channel(self, rank: int) -> Channel:
        channel = self._channels.get(rank)
        if channel is None:
            raise StateError(f"rank {rank} is not connected: the group has {self.membership.size} ranks")
        return channel

    def _bytes(self, region: Region) -> Tensor:
        """The bytes of a region, uint8 [n]."""
        if not region.nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self._storages.device)
        if self._streams is None:
            return self._storages.slice(region.handle, region.offset, region.nbytes)
        found = self._storages.slice(region.handle, region.offset, region.nbytes, join=False)
        self._kept.append(found)
        return found

    def _release(self) -> None:
        for link in list(self._direct.values()):
            link.release()

    def _gone(self) -> str | None:
        """Why a rank will not do its part, or None."""
        self.announcements.check(wait=False)
        if self._broken is not None:
            return self._broken
        gone = [rank for rank in self._direct if hung_up(self._channels[rank])]
        return f"rank {gone[0]} of the group has left it, or its process has ended" if gone else None

    def _cannot_complete(self, why: str) -> None:
        self.close(f"rank {self.membership.rank}: {why}")

    def _differs(self, failure: StepFailure) -> None:
        first = self._broken
        why = failure.why if first is None else first
        self.watch.fail(StepFailure(failure.label, failure.clock, why))
        self.close(f"rank {self.membership.rank}: {failure.label}: {why}")


def _parsed(frame: Frame) -> tuple[int, int, memoryview]:
    """The hash of the label, the bytes of the message, and what comes with the frame."""
    found, announced = _HEAD.unpack_from(frame.payload) if len(frame.payload) >= _HEAD.size else (0, 0)
    return found, announced, frame.payload[_HEAD.size :]


def _check_kind(rank: int, frame: Frame) -> None:
    if frame.kind is Kind.ERROR:
        raise ConnectionLostError(bytes(frame.payload[:_MAX_REASON]).decode(errors="replace"))
    if frame.kind is not Kind.DATA:
        raise ProtocolError(f"rank {rank} of the group sent a {frame.kind.name} frame")


def _check_announced(rank: int, expected: tuple[int, int, int], frame: Frame) -> None:
    """Check that a frame announces a message from GPU to GPU with this number, hash of the label and size."""
    _check_kind(rank, frame)
    found, announced, data = _parsed(frame)
    if (frame.number, found, announced) != expected or data != _DIRECTLY:
        raise _other_step(rank, announced, expected[2])


def _other_step(rank: int, announced: int, nbytes: int) -> StateError:
    return StateError(
        f"rank {rank} does something else, or with {announced} bytes where {nbytes} were expected: "
        "all ranks have to call the same operations in the same order, with tensors of the same size"
    )


def _piece(region: Region, start: int) -> Region:
    return Region(region.handle, region.offset + start, max(0, min(_PIECE, region.nbytes - start)))

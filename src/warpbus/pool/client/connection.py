"""A client's connection to its lease: sends batches and questions, reconnects, and follows a lease that moves.

The connection keeps each batch until the tenant acknowledges it and sends it again after a reconnection; the tenant
skips batches that it has executed. If the lease has moved, the connection follows it. If the source of a migration
vanishes midway, the connection claims the copy at the destination, which decides that the copy lives; it never goes
back.
"""

import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from warpbus.errors import ConnectionLostError, FrameError, LeaseLostError, NotListeningError, StateError
from warpbus.pool.client.swap_history import SwapHistory
from warpbus.pool.protocol.address import Address, address
from warpbus.pool.protocol.channel import Channel, connect
from warpbus.pool.protocol.failures import CallFailure, sent_error
from warpbus.pool.protocol.frames import PROTOCOL, READ, Frame, Kind
from warpbus.pool.protocol.wire import Value, decode, encode

PATIENCE_SECONDS = 30.0
"""Seconds for which a broken connection is retried."""
REFUSED_SECONDS = 1.0
"""Seconds after which a machine that refuses all connections has lost the lease: leases end with their daemon."""

_KEPT_BYTES = 256 << 20
_LOOKED_EVERY = 8
_READ, _ERROR = Kind.READ, Kind.ERROR  # looking up a member of an enumeration takes half a microsecond
_ANSWERS = (Kind.ANSWER, Kind.DATA, Kind.ERROR)
_RETRY_SECONDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0)


class Welcome(NamedTuple):
    """The report of a tenant's process when it accepts a connection."""

    executed: int
    device: str
    name: str
    gpu: str
    capability: tuple[int, int] | None


class _Moving(NamedTuple):
    address: str
    final: bool


class PendingRead:
    """An asynchronous read of bytes of a storage; other requests may be sent before its data has arrived.

    A reconnection may repeat the read after later batches were executed, so the storage must not be written any more.
    The connection holds a weak reference: a read that nobody references is dropped.
    """

    def __init__(self, number: int, payload: bytes, data: bytearray | memoryview) -> None:
        self.number = number
        self.payload = payload
        self.data = data
        self.filled = 0
        self.failure: CallFailure | None = None

    @property
    def arrived(self) -> bool:
        return self.filled == len(self.data) or self.failure is not None

    def take(self, frame: Frame) -> None:
        """Take in one frame of the answer."""
        if frame.kind is Kind.ERROR:
            self.failure = CallFailure.read(decode(frame.payload))
            return
        end = self.filled + len(frame.payload)
        if end > len(self.data):
            raise FrameError("the pool sent more bytes than were asked for")
        self.data[self.filled : end] = frame.payload
        self.filled = end


class Connection:
    """The connection to a lease. Not thread-safe.

    Args:
        where: the daemon of the machine that has the lease.
        lease: the id of the lease, 16 bytes.
        key: the secret of the lease.
        patience: seconds for which a lost connection is retried.

    Attributes:
        swaps: when the lease was in host memory, as far as it is known here.
    """

    def __init__(self, where: Address, lease: bytes, key: bytes, *, patience: float = PATIENCE_SECONDS) -> None:
        self._where = where
        self._lease = lease
        self._key = key
        self.patience = patience
        self._kept: deque[tuple[int, bytearray]] = deque()
        self._kept_bytes = 0
        self._sent = 0
        self._question = 0
        self._readings: WeakValueDictionary[int, PendingRead] = WeakValueDictionary()
        self._moving: _Moving | None = None
        self._failures: deque[CallFailure] = deque()
        self._abandoned: str | None = None
        self._may_return = False  # a daemon has said that the lease is suspended, or on its way
        self.reconnections = 0
        self.swaps = SwapHistory(lease.hex())
        self._channel, self.welcome = self._open(where, claim=False)

    def send(self, payload: bytearray, *, more: bool = False) -> None:
        """Send a batch; with `more` together with the question that follows.

        Raises the error of a call in an earlier batch, if one failed.
        """
        self._sent += 1
        self._kept.append((self._sent, payload))
        self._kept_bytes += len(payload)
        try:
            self._channel.send(Kind.BATCH, self._sent, payload, more=more and self._kept_bytes <= _KEPT_BYTES)
            if self._sent % _LOOKED_EVERY == 0:
                self._look()
            while self._kept_bytes > _KEPT_BYTES:
                self._take(self._channel.receive())
        except ConnectionLostError as lost:
            self._reconnect(lost)
        self._raise()

    def ask(self, question: list[Value]) -> Value:
        """Ask a question and return its answer, once everything sent before has been executed."""
        return decode(self._answer(Kind.ASK, encode(question)))

    def read(self, handle: int, offset: int, into: memoryview) -> None:
        """Fill `into` with bytes of a storage."""
        self.wait_for(self._request(READ.pack(handle, offset, len(into)), into))

    def read_little(self, handle: int, offset: int, nbytes: int) -> memoryview:
        """As many bytes of a storage as one frame has, `MAX_DATA` at most."""
        data = self._answer(_READ, READ.pack(handle, offset, nbytes))
        if len(data) != nbytes:
            raise FrameError(f"the pool sent {len(data)} bytes: {nbytes} were asked for")
        return data

    def ask_for(self, handle: int, offset: int, nbytes: int) -> PendingRead:
        """Request bytes of a storage, as they are after everything sent before; `wait_for` returns them."""
        return self._request(READ.pack(handle, offset, nbytes), bytearray(nbytes))

    def _request(self, payload: bytes, data: bytearray | memoryview) -> PendingRead:
        """Request bytes of a storage as `READ` packs it, to be put into `data`."""
        self._question += 1
        reading = PendingRead(self._question, payload, data)
        self._readings[reading.number] = reading
        try:
            self._channel.send(Kind.READ, reading.number, reading.payload)
        except ConnectionLostError as lost:
            self._reconnect(lost)
        return reading

    def wait_for(self, reading: PendingRead) -> bytearray | memoryview:
        """Wait for the data of a read."""
        while not reading.arrived:
            try:
                self._take(self._channel.receive())
            except ConnectionLostError as lost:
                self._reconnect(lost)
        if reading.failure is not None:
            self._failures.clear()  # what led to this one, most likely
            raise reading.failure.exception()
        self._raise()
        return reading.data

    def watch(self) -> None:
        """Handle frames that arrived unasked, and reconnect if the connection is broken. Otherwise it does not wait.

        Raises:
            LeaseLostError: the lease is gone.
        """
        try:
            self._look()
        except ConnectionLostError as lost:
            self._reconnect(lost)

    def close(self) -> None:
        """Send BYE and close the connection."""
        with suppress(ConnectionLostError):
            self._channel.send(Kind.BYE)
        self._channel.close()

    def abandon(self, why: str) -> None:
        """In a forked child: close the child's copy of the socket and leave the connection to the parent. Sending and
        asking raise StateError with `why` from now on."""
        self._abandoned = why
        self._channel.abandon(why)

    def _answer(self, kind: Kind, question: bytes) -> memoryview:
        """The payload of the frame that answers a question."""
        number = self._question = self._question + 1
        while True:
            channel = self._channel
            try:
                channel.send(kind, number, question)
                while (frame := channel.receive()) is None or frame.number != number or frame.kind not in _ANSWERS:
                    self._take(frame)
            except ConnectionLostError as lost:
                self._reconnect(lost)
                continue
            if frame.kind is _ERROR:
                self._failures.clear()  # what led to this one, most likely
                raise CallFailure.read(decode(frame.payload)).exception()
            if self._failures:
                self._raise()
            return frame.payload

    def _look(self) -> None:
        while self._channel.pending():
            self._take(self._channel.receive())

    def _take(self, frame: Frame | None) -> None:
        """Handle a frame that does not answer the current question."""
        if frame is None:
            return
        if frame.kind in _ANSWERS and frame.number:
            reading = self._readings.get(frame.number)
            if reading is not None:  # else of a question that was interrupted
                reading.take(frame)
            return
        if frame.kind is Kind.ACK:
            while self._kept and self._kept[0][0] <= frame.number:
                self._kept_bytes -= len(self._kept.popleft()[1])
        elif frame.kind is Kind.ERROR:
            self._failures.append(CallFailure.read(decode(frame.payload)))
        elif frame.kind is Kind.MOVED:
            self._moving = _moving(frame)
            if self._moving.final:
                raise ConnectionLostError(f"the lease has moved to {self._moving.address}")
        elif frame.kind is Kind.SWAP:
            self.swaps.heard(frame)
        elif frame.kind is Kind.BYE:
            raise ConnectionLostError("the pool has ended the connection")
        else:
            raise FrameError(f"the pool sent a {frame.kind.name} frame in the middle of a session")

    def _raise(self) -> None:
        if self._failures:
            raise self._failures.popleft().exception()

    def _reconnect(self, lost: ConnectionLostError) -> None:
        """Reconnect to the lease, and send again what may not have arrived.

        Raises:
            LeaseLostError: the lease is gone, or cannot be reached within `patience` seconds; or for `REFUSED_SECONDS`
                nothing listened where it can be.
            StateError: the connection belongs to the parent process.
        """
        if self._abandoned is not None:
            raise StateError(self._abandoned) from None
        self._channel.close()
        self._may_return = False
        begun = answered = time.monotonic()
        attempt = 0
        last: Exception = lost
        while True:
            for where, claim in self._candidates():
                try:
                    self._channel, self.welcome = self._open(where, claim=claim)
                    self._where, self._moving = where, None
                    self._resend()
                    self.reconnections += 1
                    return
                except NotListeningError as error:
                    last = error
                except ConnectionLostError as error:
                    last = error
                    answered = time.monotonic()
            now = time.monotonic()
            if now - begun >= self.patience:
                raise LeaseLostError(f"the remote GPU is lost: {last}; what was on it is gone, connect again") from None
            if now - answered >= REFUSED_SECONDS and not self._may_return:
                raise LeaseLostError(
                    f"the remote GPU {self.welcome.gpu} is lost: nothing listens at {self._where}, so its daemon has "
                    "ended, and its leases with it; start the daemon and connect again"
                ) from None
            time.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
            attempt += 1

    def _candidates(self) -> list[tuple[Address, bool]]:
        """The addresses to try, each with whether to claim the copy there: the source first, then the destination."""
        if self._moving is None:
            return [(self._where, False)]
        # Other machines know nothing of the files of this one.
        target = replace(address(self._moving.address), ca=self._where.ca)
        return [(target, False)] if self._moving.final else [(self._where, False), (target, True)]

    def _open(self, where: Address, *, claim: bool) -> tuple[Channel, Welcome]:
        channel = connect(where, self._lease, self._key)
        try:
            hello: dict[str, Value] = {
                "protocol": PROTOCOL,
                "torch": str(torch.__version__),
                "key": self._key,
                "claim": claim,
                # Failures of later batches are reported again.
                "acknowledged": self._kept[0][0] - 1 if self._kept else self._sent,
            }
            channel.send(Kind.HELLO, 0, encode(hello))
            frame = channel.receive(timeout=self.patience)
            if frame is None:
                raise ConnectionLostError(f"{where} does not answer")
            if frame.kind is Kind.MOVED:
                self._moving = _moving(frame)
                raise ConnectionLostError(f"the lease has moved to {self._moving.address}")
            value: Any = decode(frame.payload)
            if frame.kind is Kind.REFUSED:
                error = sent_error(value)
                self._may_return = isinstance(error, ConnectionLostError)
                raise error
            if frame.kind is not Kind.WELCOME:
                raise FrameError(f"{where} greets with a {frame.kind.name} frame")
        except BaseException:
            channel.close()
            raise
        capability = value.get("capability")
        return channel, Welcome(
            value["executed"],
            value["device"],
            value["name"],
            value["gpu"],
            tuple(capability) if capability else None,
        )

    def _resend(self) -> None:
        while self._kept and self._kept[0][0] <= self.welcome.executed:
            self._kept_bytes -= len(self._kept.popleft()[1])
        for number, payload in self._kept:
            self._channel.send(Kind.BATCH, number, payload)
        for number, reading in sorted(self._readings.items()):
            if not reading.arrived:
                reading.filled = 0
                self._channel.send(Kind.READ, number, reading.payload)


def _moving(frame: Frame) -> _Moving:
    value: Any = decode(frame.payload)
    return _Moving(str(value["address"]), bool(value["final"]))

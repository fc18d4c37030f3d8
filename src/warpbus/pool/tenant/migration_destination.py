"""Live migration of a lease to another process: the side that the lease comes to.

Its process has an empty executor with the same quota:

    destination = MigrationDestination(executor, migration_token=migration_token)
    destination.admit(channel, hello)         # for the connection whose HELLO has the migration token
    while destination.step(timeout) not in ENDS:
        ...                                   # and claim(), when the client asks for it

`migration_source` is the other side and says which of the two executes when. `arrival` checks what arrives.
"""

import hmac
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING

import torch

from warpbus.errors import ConnectionLostError, DeviceError, LeaseLostError, PoolError
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.failures import error_value
from warpbus.pool.protocol.frames import PROTOCOL, Frame, Kind
from warpbus.pool.protocol.wire import Value, encode
from warpbus.pool.tenant import migration_messages
from warpbus.pool.tenant.acceptor import refuse
from warpbus.pool.tenant.arrival import Arrival
from warpbus.pool.tenant.transport import MemoryReader, memory_reader, this_host

if TYPE_CHECKING:
    from warpbus.pool.tenant.execution import Executor

SILENCE = 600.0
"""Seconds after which the destination gives up a silent source, or a client that does not claim the lease."""


class DestinationState(Enum):
    """The states of a migration on the destination's side."""

    WAITING = "for a source that has the migration token"
    RECEIVING = "the source copies"
    PREPARED = "all is here; it executes when the source says so or the client claims it"
    LIVING = "it executes here"
    DISCARDED = "nothing of it is here"


ENDS = (DestinationState.LIVING, DestinationState.DISCARDED)


class MigrationDestination:
    """The destination of a migration. Not thread-safe.

    Args:
        executor: empty, with the lease's quota.
        migration_token: the secret of the source, valid for one connection.
        silence: seconds without a word from the source, or when all is here from the client, after which nothing is
            kept.
        reads: a reader of the memory that a source on this host shares; None if there is none.
        clock: seconds.

    Attributes:
        state: where it stands; batches may be executed once it is LIVING.
        reason: why nothing of the lease is here, once it is DISCARDED.
    """

    def __init__(
        self,
        executor: "Executor",
        *,
        migration_token: bytes,
        silence: float = SILENCE,
        reads: Callable[[torch.device], MemoryReader | None] = memory_reader,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = DestinationState.WAITING
        self.reason = ""
        self._executor = executor
        self._migration_token = migration_token
        self._silence = silence
        self._clock = clock
        self._channel: Channel | None = None
        self._arrival = Arrival(executor, reads(executor.storages.device))
        self._answers = 0
        self._claimed = False
        self._heard = clock()

    def admit(self, channel: Channel, hello: Mapping[str, Value]) -> bool:
        """Answer the HELLO of a connection with a migration token. Returns whether it is the source.

        One that is not is refused and closed, and changes nothing.
        """
        refusal = self._refusal(hello)
        if refusal:
            refuse(channel, DeviceError(refusal))
            return False
        self._channel, self._heard = channel, self._clock()
        self.state = DestinationState.RECEIVING
        reads = self._arrival.reads and hello.get("shared") == this_host()
        with self._discarding():
            channel.send(Kind.WELCOME, 0, encode({"protocol": PROTOCOL, "reads": reads}))
        return True

    def step(self, timeout: float) -> DestinationState:
        """Handle the source's next frame, if one arrives within `timeout` seconds.

        What the source does wrong discards what is here, unless it was PREPARED already.
        """
        if self.state in ENDS:
            return self.state
        patience = self._heard + self._silence - self._clock()
        if patience < 0:
            self._discard(f"nothing was heard for {self._silence:.0f} seconds ({self.state.value})")
        elif self._channel is None:
            time.sleep(min(patience, timeout))
        else:
            with self._discarding():
                frame = self._channel.receive(min(patience, timeout))
                if frame is not None:
                    self._heard = self._clock()
                    self._deal(frame)
        return self.state

    def claim(self) -> bool:
        """Claim the lease for a client that lost the source for good. Returns whether the lease runs here.

        False while the source is still copying: then it does as soon as all is here, and can be asked for again.

        Raises:
            LeaseLostError: nothing of it is here.
        """
        if self.state is DestinationState.DISCARDED:
            raise LeaseLostError(f"this lease is lost: it was being moved, and did not arrive: {self.reason}")
        self._claimed = True
        if self.state is DestinationState.PREPARED:
            self._live()
        return self.state is DestinationState.LIVING

    def fileno(self) -> int | None:
        """The file descriptor that becomes readable when the source sends a frame."""
        return None if self._channel is None else self._channel.fileno()

    def pending(self) -> bool:
        """Whether a frame, or a part of one, is buffered already, so that the descriptor may not become readable."""
        return self._channel is not None and self._channel.pending()

    def _refusal(self, hello: Mapping[str, Value]) -> str:
        migration_token, storages = hello.get("migration_token"), self._executor.storages
        if not isinstance(migration_token, bytes) or not hmac.compare_digest(migration_token, self._migration_token):
            return "this is not the migration token of the lease that is expected here"
        if self.state is not DestinationState.WAITING:
            return "this migration token was used before: ask for another move"
        if hello.get("protocol") != PROTOCOL:
            return f"protocol {hello.get('protocol')!r} is not {PROTOCOL}: install one version of Warpbus"
        if hello.get("device") != storages.device.type:
            return f"the lease executes on {hello.get('device')!r}, this is {storages.device.type}: choose another GPU"
        used = hello.get("used")
        if type(used) is not int or used > storages.memory:
            return f"the lease holds {used!r} bytes, {storages.memory:,} are reserved for it here"
        return ""

    def _deal(self, frame: Frame) -> None:
        if self.state is DestinationState.PREPARED:
            self._decide(frame)
            return
        what, values, raw = migration_messages.heard(frame)
        if what == "cancel":
            self._discard("the source went on with it")
        elif what == "copy":
            why = self._arrival.copy(values)
            self._answer("cannot", why) if why else self._answer("copied")
        elif what == "ready":
            self._answer("ready")
        elif what == "end":
            self._arrival.end(values, raw)
            self._answer("prepared", self._executor.executed)
            self.state = DestinationState.PREPARED
            if self._claimed:
                self._live()
        else:
            self._arrival.take(what, values, raw)

    def _decide(self, frame: Frame) -> None:
        what, _, _ = migration_messages.heard(frame)
        if what == "commit":
            self._live()
        elif what == "cancel":
            self._discard("the source went on with it")

    def _live(self) -> None:
        self.state = DestinationState.LIVING
        with suppress(PoolError, OSError):
            self._answer("living")
        self._hang_up()

    def _answer(self, what: str, *values: Value) -> None:
        if self._channel is not None:
            self._answers += 1
            migration_messages.say(self._channel, self._answers, what, *values)

    def _hang_up(self) -> None:
        self._arrival.close()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        """An error discards the copy if it is incomplete; later errors only close the connection to the source."""
        try:
            yield
        except Exception as error:
            if self.state is DestinationState.PREPARED:
                self._hang_up()
                return
            with suppress(PoolError, OSError):
                if self._channel is not None and not isinstance(error, ConnectionLostError):
                    self._channel.send(Kind.ERROR, 0, encode(error_value(DeviceError(str(error)))))
            self._discard(str(error))
            if not isinstance(error, DeviceError | PoolError | torch.OutOfMemoryError):
                raise

    def _discard(self, reason: str) -> None:
        self.state, self.reason = DestinationState.DISCARDED, reason
        self._arrival.drop()
        self._hang_up()

"""The client side of a control connection to a daemon, for the command line, clients and other daemons."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from warpbus.errors import ConnectionLostError, FrameError, UsageError
from warpbus.pool.protocol import wire
from warpbus.pool.protocol.address import Address
from warpbus.pool.protocol.channel import connect
from warpbus.pool.protocol.failures import sent_error
from warpbus.pool.protocol.frames import PROTOCOL, Kind

_SECONDS = 10.0
_WATCH_SECONDS = 0.2

Tell = Callable[[dict[str, Any]], None]
"""Called with the answers that report progress before the final one."""


class ControlChannel:
    """A control connection. It carries one request at a time.

    Args:
        to: the address of the daemon.
        token: of the tenant; None for a pool without tokens.

    Attributes:
        to: the address of the daemon.
        welcome: the daemon's answer to HELLO: "tenant", "role", "host", and "tokens", whether the pool uses tokens.

    Raises:
        ConnectionLostError: no daemon answers at the address.
        FrameError: the answer is not of the pool's protocol.
        TokenError: the pool does not accept the token.
        AuthorizationError: its certificate is not trusted.
    """

    def __init__(self, to: Address, token: str | None) -> None:
        self.to = to
        self._channel = connect(to, timeout=_SECONDS)
        self._number = 0
        try:
            self._channel.send(Kind.HELLO, 0, wire.encode({"protocol": PROTOCOL, "token": token}))
            kind, _, said = self._receive(_SECONDS)
            if kind in (Kind.REFUSED, Kind.ERROR):
                raise sent_error(said)
            if kind is not Kind.WELCOME:
                raise FrameError(f"{self._channel.peer} answers with {kind.name}: it speaks another protocol")
        except BaseException:
            self.close()
            raise
        self.welcome = said

    def ask(
        self,
        question: Mapping[str, Any],
        tell: Tell | None = None,
        *,
        timeout: float | None = None,
        watch: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Send a request and return its final answer.

        Args:
            question: the request; "do" names the operation.
            tell: gets the answers that report progress.
            timeout: seconds until the next answer; None waits as long as it takes. With a `watch` it has no effect.
            watch: called several times per second while there is no answer. What it raises ends the wait; the
                connection is of no use afterwards, because the answer may still come.

        Raises:
            WarpbusError: the error that the daemon answered with.
            ConnectionLostError: the daemon is gone or silent.
            FrameError: the answer is not of the pool's protocol.
        """
        self._number += 1
        self._channel.send(Kind.ASK, self._number, wire.encode(dict(question)))
        while True:
            kind, number, said = self._receive(timeout, watch)
            if kind is Kind.ERROR:
                raise sent_error(said)
            if kind is not Kind.ANSWER or number != self._number:
                raise FrameError(f"{self._channel.peer} answers with {kind.name}: it speaks another protocol")
            if is_final(said):
                return said
            if tell is not None:
                tell(said)

    def close(self) -> None:
        """Close the connection. A call of `ask` in another thread raises `ConnectionLostError`."""
        self._channel.close()

    def abandon(self, why: str) -> None:
        """In a forked child: leave the connection to the parent; `ask` raises `ConnectionLostError` with `why`."""
        self._channel.abandon(why)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(
        self, timeout: float | None, watch: Callable[[], None] | None = None
    ) -> tuple[Kind, int, dict[str, Any]]:
        frame = self._channel.receive(timeout if watch is None else _WATCH_SECONDS)
        while frame is None and watch is not None:
            watch()
            frame = self._channel.receive(_WATCH_SECONDS)
        if frame is None:
            raise ConnectionLostError(f"{self._channel.peer} did not answer within {timeout:g} s: is it stopped?")
        said = wire.decode(frame.payload)
        if not isinstance(said, dict):
            raise FrameError(f"{self._channel.peer} sent what is no answer: it speaks another protocol")
        return frame.kind, frame.number, said


def is_final(answer: Mapping[str, Any]) -> bool:
    """Whether an answer is final: progress reports have "queued" or "phase"."""
    return "queued" not in answer and "phase" not in answer


def need(question: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """A field of a request, checked.

    Raises:
        UsageError: the field is missing or of none of these types.
    """
    value = question.get(name)
    # True is an int to Python, and to nobody else.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in kinds)
        raise UsageError(f"{question.get('do')}: {name} is {value!r:.100}: give {wanted}")
    return value

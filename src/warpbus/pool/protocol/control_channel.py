"""The client side of a control connection to a daemon, for the command line, clients and other daemons."""

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from warpbus.errors import ConnectionLostError, FrameError
from warpbus.pool.protocol.address import Address
from warpbus.pool.protocol.channel import connect
from warpbus.pool.protocol.failures import sent_error
from warpbus.pool.protocol.frames import PROTOCOL, Frame, Kind
from warpbus.pool.protocol.messages import decode_answer, decode_dict, encode_request
from warpbus.pool.protocol.wire import encode

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
            self._channel.send(Kind.HELLO, 0, encode({"protocol": PROTOCOL, "token": token}))
            self.welcome = decode_dict(self._receive(Kind.WELCOME, _SECONDS).payload)
        except ConnectionLostError as error:
            self.close()
            if to.transport != "plain" or isinstance(error, FrameError):
                raise
            raise type(error)(f"{error}; if it has a certificate, give its address as warpbuss://") from None
        except BaseException:
            self.close()
            raise

    def ask(
        self,
        operation: str,
        arguments: Mapping[str, Any] | None = None,
        tell: Tell | None = None,
        *,
        timeout: float | None = None,
        watch: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Send a request and return its final answer.

        Args:
            operation: its name in the table `operations.DAEMON`.
            arguments: of the operation.
            tell: gets the answers that report progress.
            timeout: seconds until the next answer; None waits as long as it takes.
            watch: called several times per second while there is no answer. What it raises ends the wait; the
                connection is of no use afterwards, because the answer may still come.

        Raises:
            WarpbusError: the error that the daemon answered with.
            ConnectionLostError: the daemon is gone or silent.
            FrameError: the answer is not of the pool's protocol.
        """
        self._number += 1
        self._channel.send(Kind.ASK, self._number, encode_request(operation, arguments or {}))
        while True:
            answer, final = decode_answer(self._receive(Kind.ANSWER, timeout, watch).payload)
            if final:
                return answer
            if tell is not None:
                tell(answer)

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

    def _receive(self, expected: Kind, timeout: float | None, watch: Callable[[], None] | None = None) -> Frame:
        """The next frame, which has to be of this kind. Raises the error that was sent instead."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        frame = self._channel.receive(timeout if watch is None else _WATCH_SECONDS)
        while frame is None and watch is not None and time.monotonic() < until:
            watch()
            frame = self._channel.receive(_WATCH_SECONDS)
        if frame is None:
            raise ConnectionLostError(f"{self._channel.peer} did not answer within {timeout:g} s: is it stopped?")
        if frame.kind in (Kind.REFUSED, Kind.ERROR):
            raise sent_error(decode_dict(frame.payload))
        if frame.kind is not expected or frame.number != self._number:
            raise FrameError(f"{self._channel.peer} answers with {frame.kind.name}: it speaks another protocol")
        return frame

"""The daemon's side of a control connection, for asyncio: frames after the preamble, with limits of size and time.

The client sends HELLO and gets WELCOME or REFUSED. Then each ASK gets one or more ANSWERs, the last of which is final,
or an ERROR.
"""

import asyncio
import socket
import ssl
from contextlib import suppress

from warpbus.errors import ConnectionLostError
from warpbus.pool.protocol.frames import HEADER, Frame, Kind, pack_header, parse_header
from warpbus.pool.protocol.wire import Value, encode

MOST = 1 << 20
"""The most bytes of a request."""


class _LimitedReader(asyncio.StreamReader):
    """A reader that detects the end of the connection without being read."""

    def __init__(self) -> None:
        super().__init__(limit=1 << 16)
        self.gone = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.gone.set()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self.gone.set()


class ControlConnection:
    """A connection after its preamble and TLS. For one task at a time.

    Args:
        peer: the other side, in messages.
        patience: seconds that the other side gets to take what is sent.
    """

    def __init__(
        self, reader: _LimitedReader, writer: asyncio.StreamWriter, peer: str, *, patience: float = 30.0
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._patience = patience
        self.peer = peer

    @classmethod
    async def accept(
        cls, sock: socket.socket, peer: str, tls: ssl.SSLContext | None, *, timeout: float
    ) -> "ControlConnection":
        """Speak on a socket that somebody has connected to, from after the preamble on.

        Raises:
            ConnectionLostError: TLS does not come about in time.
        """
        loop = asyncio.get_running_loop()
        reader = _LimitedReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=tls, ssl_handshake_timeout=timeout if tls else None
            )
        except (OSError, ValueError) as error:
            sock.close()
            raise ConnectionLostError(f"{peer} did not begin TLS ({error})") from None
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop), peer)

    async def send(self, kind: Kind, number: int, payload: bytes) -> None:
        """Send a frame.

        Raises:
            ConnectionLostError: the other side is gone, or takes nothing in.
        """
        try:
            async with asyncio.timeout(self._patience):
                self._writer.write(pack_header(kind, number, len(payload)) + payload)
                await self._writer.drain()
        except (OSError, TimeoutError) as error:
            raise self._lost(error) from None

    async def receive(self, timeout: float | None, most: int = MOST) -> Frame:
        """The next frame, with a payload of at most `most` bytes.

        Raises:
            ConnectionLostError: the other side is gone, or silent for `timeout` seconds.
            FrameError: it sends something that is no frame.
        """
        try:
            async with asyncio.timeout(timeout):
                header = await self._reader.readexactly(HEADER.size)
            size, kind, number = parse_header(memoryview(header), self.peer, most)
            async with asyncio.timeout(self._patience):
                payload = await self._reader.readexactly(size)
        except (OSError, EOFError, TimeoutError) as error:
            raise self._lost(error) from None
        return Frame(kind, number, memoryview(payload))

    async def gone(self) -> None:
        """Return when the other side has gone."""
        await self._reader.gone.wait()

    def close(self) -> None:
        """Close the connection; data that was sent is still delivered."""
        self._writer.close()

    def _lost(self, error: BaseException) -> ConnectionLostError:
        why = {asyncio.IncompleteReadError: "closed", TimeoutError: "silent for too long"}.get(type(error), str(error))
        return ConnectionLostError(f"the connection to {self.peer} is lost ({why})")


async def hang_up(conversation: ControlConnection, kind: Kind, value: Value) -> None:
    """Send a last value, and close; the other side may have gone."""
    with suppress(ConnectionLostError):
        await conversation.send(kind, 0, encode(value))
    conversation.close()

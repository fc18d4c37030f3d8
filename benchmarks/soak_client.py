"""A client of HTTP/1.1 over bare streams, for `soak.py`: it can break off anywhere, and send what is no HTTP."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

_HEAD_BYTES = 1 << 16


class CutShortError(Exception):
    """The server closed the connection before an answer had ended."""


@dataclass(frozen=True)
class Head:
    """A response's status and its headers, whose names are in small letters."""

    status: int
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Address:
    """Where the server listens, and the key that it asks for."""

    host: str
    port: int
    key: str | None

    @classmethod
    def of(cls, url: str, key: str | None) -> Self:
        """From a URL http://HOST:PORT."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise SystemExit(f"--url {url}: give http://HOST:PORT")
        return cls(parts.hostname, parts.port or 80, key)


class Connection:
    """One connection; several requests may follow each other on it.

        async with await Connection.open(address) as connection:
            await connection.ask("POST", "/v1/completions", {"model": ...})
            head = await connection.head()
            async for data in connection.pieces():
                ...

    Leaving the block closes it, whatever is under way. Raises CutShortError where the server closes it first.
    """

    def __init__(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """See `open`."""
        self._address = address
        self._reader = reader
        self._writer = writer
        self._last: Head | None = None

    @classmethod
    async def open(cls, address: Address, *, receive_buffer: int | None = None) -> Self:
        """Connect. `receive_buffer`: bytes that the kernel may hold for a client that does not read."""
        wanted = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            wanted.setblocking(False)
            if receive_buffer is not None:
                wanted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            await asyncio.get_running_loop().sock_connect(wanted, (address.host, address.port))
            reader, writer = await asyncio.open_connection(sock=wanted, limit=receive_buffer or _HEAD_BYTES)
        except BaseException:
            wanted.close()
            raise
        return cls(address, reader, writer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()

    async def ask(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str | None] | None = None
    ) -> None:
        """Send a request. `body` is bytes, or goes as JSON; `headers` replace those that are usual, None leaves out."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        usual: dict[str, str | None] = {
            "host": f"{self._address.host}:{self._address.port}",
            "content-type": "application/json",
            "content-length": str(len(data)),
            "authorization": None if self._address.key is None else f"Bearer {self._address.key}",
        }
        named = {name: value for name, value in (usual | dict(headers or {})).items() if value is not None}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items()), "", ""]
        await self.send("\r\n".join(lines).encode("latin-1") + data)

    async def send(self, data: bytes) -> None:
        """Send bytes, whatever they are."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except ConnectionError:
            pass  # what the server has said before it closed can still be read

    async def head(self) -> Head:
        """The next response's head."""
        try:
            raw = await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise CutShortError("before the head of an answer") from error
        first, *lines = raw.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        self._last = Head(int(first.split()[1]), headers)
        return self._last

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, as it comes."""
        assert self._last is not None, "a head comes first"
        headers = self._last.headers
        try:
            if headers.get("transfer-encoding") == "chunked":
                while size := int(await self._reader.readuntil(b"\r\n"), 16):
                    yield (await self._reader.readexactly(size + 2))[:-2]
                await self._reader.readexactly(2)
            elif length := int(headers.get("content-length", "0")):
                yield await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise CutShortError("within an answer") from error

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([piece async for piece in self.pieces()])

    def reset(self) -> None:
        """Close it at once, so that the server sees an error and no orderly end."""
        linger = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.transport.abort()

    async def leave(self) -> None:
        """Close it in an orderly way."""
        self._writer.close()


async def events(connection: Connection) -> AsyncIterator[Any]:
    """The data of the server-sent events of an answer, JSON decoded; the last one is None, for [DONE]."""
    held = b""
    async for piece in connection.pieces():
        *whole, held = (held + piece).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: "):
                yield None if event == b"data: [DONE]" else json.loads(event[len(b"data: ") :])
    if held:
        raise CutShortError("within an event")

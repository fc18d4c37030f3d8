"""One file from a hub to the disk: it goes on where it stopped, and only what has the right hash gets its name."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from io import BufferedRandom
from pathlib import Path
from threading import Event
from typing import Protocol
from urllib.error import HTTPError

from warpbus.errors import DownloadError
from warpbus.formats.files import storage_error
from warpbus.formats.hub.http import Connection, one_line, reason_of

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before the next try after none, one, ... that brought nothing; then it is given up."""

_PIECE = 2**18
_RETRIED = (408, 429, 500, 502, 503, 504)


class _Hash(Protocol):
    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class RemoteFile:
    """A file as its hub lists it.

    Attributes:
        name: a plain name.
        path: where the hub has it, below its endpoint.
        size: in bytes.
        key: the SHA-256 of the content, 64 hexadecimal digits, or, for small files of Hugging Face, Git's SHA-1, 40.
    """

    name: str
    path: str
    size: int
    key: str

    def hash(self) -> _Hash:
        """What computes `key`."""
        if len(self.key) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


class Stopped(Exception):  # noqa: N818 - no error: somebody else had one
    """The transfer was not wanted any more."""


class Transfer:
    """Brings a file. What an earlier transfer has left of it beside its place is gone on with.

    Args:
        connection: the hub.
        refused: what to raise where it does not give the file.
        file: what is wanted.
        target: where it is to be.
        arrived: called with the number of bytes that are there more, or fewer, than at the call before.
        stop: set when it is not wanted any more.
    """

    def __init__(
        self,
        connection: Connection,
        refused: Callable[[HTTPError], DownloadError],
        file: RemoteFile,
        target: Path,
        arrived: Callable[[int], None],
        stop: Event,
    ) -> None:
        self._connection = connection
        self._refused = refused
        self._file = file
        self._target = target
        self._partial = partial_of(target)
        self._arrived = arrived
        self._stop = stop
        self._digest = file.hash()
        self._have = 0

    def run(self) -> None:
        """Until the file is there.

        Raises:
            DownloadError: the hub does not give it, or sends something else than it lists.
            StorageError: it cannot be written.
            Stopped: it was not wanted any more.
        """
        self._buffer = memoryview(bytearray(_PIECE))
        try:
            # The file is there already, or is made here; either way what is in it stays.
            with open(os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as stream:
                self._read_partial(stream)
                continued = self._have > 0
                self._fill(stream)
                if continued and not self._is_right():
                    # What was there may have been damaged when the machine went down.
                    self._restart(stream)
                    self._fill(stream)
                stream.flush()
                os.fsync(stream.fileno())
            if not self._is_right():
                self._partial.unlink()
                raise DownloadError(
                    f"{self._file.name}: what {self._connection.host} sends has not the hash that it lists, so "
                    "it was not kept: try again, or another source"
                )
            self._partial.replace(self._target)
        except OSError as error:
            raise storage_error(self._target, error, needed=self._file.size - self._have) from error

    def _is_right(self) -> bool:
        return self._digest.hexdigest() == self._file.key

    def _read_partial(self, stream: BufferedRandom) -> None:
        if os.fstat(stream.fileno()).st_size > self._file.size:
            stream.truncate(0)
        while count := stream.readinto(self._buffer):
            self._take(count)

    def _restart(self, stream: BufferedRandom) -> None:
        self._arrived(-self._have)
        self._digest, self._have = self._file.hash(), 0
        stream.seek(0)
        stream.truncate(0)

    def _take(self, count: int) -> None:
        self._digest.update(self._buffer[:count])
        self._have += count
        self._arrived(count)

    def _fill(self, stream: BufferedRandom) -> None:
        """Ask for what is missing until nothing is."""
        idle = 0
        while self._have < self._file.size:
            before = self._have
            reason = self._ask(stream)
            if self._have > before:
                idle = 0
            elif idle == len(PAUSES):
                raise DownloadError(
                    f"{self._file.name}: {self._connection.host} does not go on with it ({reason}): check the network "
                    "and run the same command again, which continues where this one stopped"
                )
            if self._have < self._file.size:
                if self._stop.wait(PAUSES[idle]):
                    raise Stopped
                idle += 1

    def _ask(self, stream: BufferedRandom) -> str:
        """Take what one request brings; why there is no more of it."""
        try:
            response = self._connection.get(self._file.path, offset=self._have)
        except HTTPError as error:
            with error:
                if error.code == 416 and self._have:
                    self._restart(stream)
                elif error.code not in _RETRIED:
                    raise self._refused(error) from None
                return f"{error.code} {one_line(error.reason)}"
        except (OSError, HTTPException) as error:
            return reason_of(error)
        with response:
            self._check(response, stream)
            while self._have < self._file.size:
                if self._stop.is_set():
                    raise Stopped
                try:
                    count = response.readinto(self._buffer[: self._file.size - self._have])
                except (OSError, HTTPException) as error:
                    return reason_of(error)
                if not count:
                    return "the connection was cut"
                stream.write(self._buffer[:count])
                self._take(count)
        return ""

    def _check(self, response: HTTPResponse, stream: BufferedRandom) -> None:
        """Look at the head of an answer: a server may begin anew, or have something else."""
        begins = response.headers.get("Content-Range", "").startswith(f"bytes {self._have}-")
        if self._have and not (response.status == 206 and begins):
            self._restart(stream)
            if response.status == 206:
                raise DownloadError(
                    f"{self._file.name}: {self._connection.host} sends other bytes than it was asked for"
                )
        if response.length is not None and self._have + response.length != self._file.size:
            raise DownloadError(
                f"{self._file.name}: {self._connection.host} lists {self._file.size:,} bytes and sends "
                f"{self._have + response.length:,}: try again, or another source"
            )


def partial_of(target: Path) -> Path:
    """Where a file is until all of it has arrived."""
    return target.with_name(f"{target.name}.warpbus.incomplete")

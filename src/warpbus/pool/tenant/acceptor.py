"""Accepts new connections of a lease: each gets a thread and a time limit for its HELLO, so none delays another.

The daemon has checked the proof of each client that it has the lease's key: see `warpbus.pool.protocol.preamble`.
"""

import os
import queue
import socket
import threading
from contextlib import suppress
from typing import Any

from warpbus.errors import FrameError, PoolError, WarpbusError
from warpbus.pool.protocol import link_memory
from warpbus.pool.protocol.channel import HANDSHAKE_SECONDS, Channel
from warpbus.pool.protocol.failures import error_value
from warpbus.pool.protocol.frames import MAX_HELLO, Kind
from warpbus.pool.protocol.messages import decode_dict
from warpbus.pool.protocol.wire import encode

_MOST = 16


class Acceptor:
    """Reads the HELLO of new connections.

    Args:
        seconds: the time limit of a HELLO.
        most: the most connections that may wait for their HELLO at once; others are closed.
    """

    def __init__(self, seconds: float = HANDSHAKE_SECONDS, most: int = _MOST) -> None:
        self._seconds = seconds
        self._places = threading.Semaphore(most)
        self._come: queue.SimpleQueue[tuple[Channel, dict[str, Any], list[int]]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor that becomes readable when a connection has sent HELLO."""
        return self._wake

    def accept(self, sock: socket.socket, shared: list[int]) -> None:
        """Take over a socket, with the descriptors of `link_memory` or none, and wait for its HELLO in a thread."""
        if not self._places.acquire(blocking=False):
            sock.close()
            link_memory.close(shared)
            return
        threading.Thread(target=self._accept, args=(sock, shared), name="acceptor", daemon=True).start()

    def come(self) -> tuple[Channel, dict[str, Any], list[int]] | None:
        """The next connection that has sent HELLO, with that message and the descriptors; None if there is none."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        try:
            return self._come.get_nowait()
        except queue.Empty:
            return None

    def _accept(self, sock: socket.socket, shared: list[int]) -> None:
        try:
            channel = Channel(sock)
        except OSError:  # it has gone
            sock.close()
            link_memory.close(shared)
            self._places.release()
            return
        try:
            frame = channel.receive(self._seconds, most=MAX_HELLO)
            if frame is None or frame.kind is not Kind.HELLO:
                raise FrameError(f"{channel.peer} does not say HELLO")
            self._come.put((channel, decode_dict(frame.payload), shared))
            os.eventfd_write(self._wake, 1)
        except WarpbusError:
            channel.close()
            link_memory.close(shared)
        finally:
            self._places.release()


def refuse(channel: Channel, error: Exception) -> None:
    """Send REFUSED with the error, and close the connection."""
    with suppress(PoolError):
        channel.send(Kind.REFUSED, 0, encode(error_value(error)))
    channel.close()

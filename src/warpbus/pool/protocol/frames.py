"""Frames: the pieces that client, daemon and tenant process exchange.

A frame is a header of 16 bytes, little endian, and its payload:

    u32 bytes of the payload, at most `MAX_FRAME`    u8 kind    3 bytes unused    u64 number

What the number and the payload mean depends on the kind; values in payloads are `warpbus.pool.protocol.wire`'s.
"""

from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from warpbus.errors import FrameError, ProtocolError

PROTOCOL = 6
"""The version of the protocol, in every HELLO; a side refuses another version."""

HEADER = Struct("<IBxxxQ")
READ = Struct("<QQQ")
"""The payload of a READ frame: the handle of a storage, its first byte that is wanted, and how many are."""
MAX_DATA = 4 * 2**20  # bytes of a storage in one frame
MAX_FRAME = 16 * 2**20 + 4096  # bytes of a payload
MAX_HELLO = 4096
"""Bytes of the first frame's payload: all that is read and decoded of a client that has not shown its key or token."""


class Kind(IntEnum):
    """The kinds of frames."""

    HELLO = 1  # the side that connected says who it is
    WELCOME = 2  # and is let in
    REFUSED = 3  # or not
    BATCH = 4  # instructions, numbered without gaps
    ACK = 5  # batches up to this number were executed
    ASK = 6  # a question
    ANSWER = 7  # its answer: a value
    DATA = 8  # its answer: bytes of a storage
    ERROR = 9  # its answer, or what a batch met: an error
    MOVED = 10  # the lease moves to another address
    BYE = 11  # the connection ends as it was meant
    STATE = 12  # a part of a lease that moves
    SWAP = 13  # the lease's memory went to host memory, waits there for room, or is back
    READ = 14  # asks for bytes of a storage, as `READ` packs its numbers; DATA frames answer


class Frame(NamedTuple):
    """A frame that came; the payload is its own memory and stays as it is."""

    kind: Kind
    number: int
    payload: memoryview


def read_request(frame: Frame) -> tuple[int, int, int]:
    """The handle, the first byte and the number of bytes of a READ frame."""
    if len(frame.payload) != READ.size:
        raise ProtocolError(f"a READ frame of {len(frame.payload)} bytes: expected {READ.size}")
    return READ.unpack(frame.payload)


def pack_header(kind: Kind, number: int, nbytes: int) -> bytes:
    """The header of a frame whose payload has `nbytes`. ProtocolError if that is more than `MAX_FRAME`."""
    if nbytes > MAX_FRAME:
        raise ProtocolError(f"a frame of {nbytes} bytes cannot be sent to the pool: at most {MAX_FRAME}")
    return HEADER.pack(nbytes, kind, number)


def parse_header(data: memoryview, peer: str, most: int = MAX_FRAME, at: int = 0) -> tuple[int, Kind, int]:
    """Bytes of the payload, kind and number that the header at `at` announces.

    Raises:
        ConnectionLostError: `peer` announces a kind that there is not, or more than `most` bytes.
    """
    nbytes, kind, number = HEADER.unpack_from(data, at)
    if kind not in _KINDS:
        raise FrameError(f"{peer} sent a frame of unknown kind {kind}: it speaks another protocol, or without TLS")
    if nbytes > most:
        raise FrameError(f"{peer} announced a frame of {nbytes} bytes: at most {most} are allowed")
    return nbytes, _KINDS[kind], number


_KINDS = {int(kind): kind for kind in Kind}

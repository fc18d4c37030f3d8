"""The messages between the two sides of a migration, in STATE frames.

A frame's payload is the length of a header (u32), the header (a list that begins with the name of the message, encoded
by `wire`) and raw bytes. Messages of the source, where S is the handle of a storage:

    drop      S...                                   free these storages
    create    S, nbytes...                           create these storages
    bytes     crc32, (S, version, offset, length)... raw: the bytes of these ranges
    changed   (S, earlier version, version, start, end)...   the storages, which arrived in full in the earlier version,
                                                     differ from it in these bytes, whose ranges follow
    copy      segments, (S, version, offset, length, segment, place)...   copy these ranges from the GPU's memory
    define    number                                 raw: a definition of the executor, to be prepared
    ready                                            answer when all earlier messages have been handled
    state     crc32                                  raw: the next bytes of the executor's state
    manifest  crc32                                  raw: the next entries (S, nbytes, version as u64) of all storages
    end       executed, bytes of the state, entries of the manifest       everything was sent: check it
    commit                                           the destination takes over
    cancel                                           the lease stays at the source

The destination answers `ready`, `copied` (after `copy`) or `cannot` with a reason, `prepared` executed (after `end`),
and `living` (after `commit`). If it refuses another message, it sends the reason in an ERROR frame.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import cast

from warpbus.errors import ProtocolError
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.frames import Frame, Kind
from warpbus.pool.protocol.wire import Value, decode, encode
from warpbus.pool.tenant.precopy import MOST_PIECES, StorageRange

MAX_STATE = 256 * 2**20
"""The most bytes of an executor's state without its storages."""

ENTRY = struct.Struct("<QQQ")
"""An entry of the manifest: handle, bytes, version."""

_LENGTH = struct.Struct("<I")


def say(channel: Channel, number: int, what: str, *values: Value, raw: Sequence[memoryview | bytes] = ()) -> None:
    """Send a STATE frame."""
    header = encode([what, *values])
    channel.send(Kind.STATE, number, _LENGTH.pack(len(header)), header, *raw)


def heard(frame: Frame) -> tuple[str, list[Value], memoryview]:
    """The name of the message in a STATE frame, its values, and its raw bytes.

    Raises:
        ProtocolError: it is not a STATE frame, or malformed.
    """
    if frame.kind is not Kind.STATE or len(frame.payload) < _LENGTH.size:
        raise malformed(f"a {frame.kind.name} frame of {len(frame.payload)} bytes")
    end = _LENGTH.size + int(_LENGTH.unpack_from(frame.payload)[0])
    if end > len(frame.payload):
        raise malformed(f"a header up to byte {end} of {len(frame.payload)}")
    header = decode(frame.payload[_LENGTH.size : end])
    if not isinstance(header, list) or not header or not isinstance(header[0], str):
        raise malformed("a header that says nothing")
    return header[0], header[1:], frame.payload[end:]


def numbers(values: Sequence[Value], each: int, *, most: int = MOST_PIECES) -> list[tuple[int, ...]]:
    """Groups of `each` non-negative integers.

    Raises:
        ProtocolError: they are something else, or more than `most` groups.
    """
    if len(values) % each or len(values) > each * most or any(type(value) is not int or value < 0 for value in values):
        raise malformed(f"{len(values)} values where groups of {each} numbers were expected")
    plain = cast("Sequence[int]", values)
    return [tuple(plain[start : start + each]) for start in range(0, len(plain), each)]


def flat(pieces: Sequence[StorageRange]) -> list[Value]:
    """Pieces as `numbers` reads them."""
    return [number for each in pieces for number in (each.handle, each.version, each.offset, each.length)]


def checksum(raw: Sequence[memoryview | bytes]) -> int:
    """The CRC-32 of several parts of bytes, in order."""
    crc = 0
    for part in raw:
        crc = zlib.crc32(part, crc)
    return crc


def check(crc: Value, raw: memoryview, what: str) -> None:
    """Raises ProtocolError unless `raw` has this CRC-32."""
    if crc != zlib.crc32(raw):
        raise ProtocolError(f"{what} arrived damaged: its checksum is wrong; move the lease again")


def malformed(what: str) -> ProtocolError:
    """The error of a message that does not follow this protocol."""
    return ProtocolError(
        f"a migration cannot go on: the other side sent {what}; it may have another version of Warpbus"
    )

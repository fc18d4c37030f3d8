"""The instructions of a batch. Little endian, no padding:

    NEW     handle u64, bytes u64                          a storage of zeros
    FREE    count u32, handles u64...
    DEFINE  number u32, length u32, signature              a kind of call, see `signature`
    CALL    number u32, inputs u64..., numbers 8 bytes each (i64, f64, or u64 0 and 1), results u64...
    WRITE   handle u64, offset u64, length u32, bytes      at most 4 MiB
    KNOWN   handle u64, offset u64, length u64, sha256     filled from what an earlier upload left behind
    SEED    u64
    RECORD  program u32                                    calls up to STOP are a program; they do not run now
    STOP
    RUN     program u32
    DROP    program u32
    RANDOM  length u32, bytes                              the state of the generator, at most 64 KiB
    GROUP   length u32, step                               together with other leases, see `group_steps`

How much a CALL carries follows from its definition. All handles are chosen by the client.

The low 16 bits of a definition's number are its place, which the next definition with this place takes over. The others
are a checksum: a CALL by the number of another definition in this place is refused, and not parsed as one of this.
"""

import functools
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import TypeAlias

from warpbus.errors import ProtocolError

MAX_WRITE = 4 << 20
MAX_SIGNATURE = 4 << 20
MAX_DEFINITIONS = 1 << 16
SHA256_BYTES = 32
MAX_RANDOM_STATE = 1 << 16
MAX_STEP = 1 << 20


class Instruction(IntEnum):
    """The first byte of each."""

    NEW = 1
    FREE = 2
    DEFINE = 3
    CALL = 4
    WRITE = 5
    KNOWN = 6
    SEED = 7
    RECORD = 8
    STOP = 9
    RUN = 10
    DROP = 11
    RANDOM = 12
    GROUP = 13


Counts: TypeAlias = Callable[[int], struct.Struct]
"""From the number of a definition to the layout of what its calls carry; raises ProtocolError where there is none."""

Done: TypeAlias = Callable[[memoryview, int], int]
"""From a place in a batch to a later one, or the same: the calls in between are done."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_NEW = struct.Struct("<QQ")
_DEFINE = struct.Struct("<II")
_WRITE = struct.Struct("<QQI")
_KNOWN = struct.Struct(f"<QQQ{SHA256_BYTES}s")

_CALL = int(Instruction.CALL)  # compared in the hot path, where a member of an enumeration takes longer

_NUMBERS = {"int": "q", "float": "d", "bool": "Q"}


def layout(inputs: int, numbers: Sequence[str], results: int) -> struct.Struct:
    """The layout of a call's data after the number of its definition."""
    return struct.Struct("<" + "Q" * inputs + "".join(_NUMBERS[kind] for kind in numbers) + "Q" * results)


class Writer:
    """Instructions, appended to a buffer. Not for several threads at once."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.count = 0

    def take(self) -> bytearray:
        """The data written since the last call."""
        taken, self.buffer, self.count = self.buffer, bytearray(), 0
        return taken

    def new(self, handle: int, nbytes: int) -> None:
        self._write(Instruction.NEW, _NEW.pack(handle, nbytes))

    def free(self, handles: Sequence[int]) -> None:
        self._write(Instruction.FREE, struct.pack(f"<I{len(handles)}Q", len(handles), *handles))

    def define(self, number: int, signature: bytes) -> None:
        self._write(Instruction.DEFINE, _DEFINE.pack(number, len(signature)) + signature)

    def call(self, encoded: bytes) -> None:
        """A call, whole: what a `call_packer` makes."""
        self.buffer += encoded
        self.count += 1

    def write(self, handle: int, offset: int, data: bytes | memoryview) -> None:
        self._write(Instruction.WRITE, _WRITE.pack(handle, offset, len(data)))
        self.buffer += data

    def known(self, handle: int, offset: int, nbytes: int, sha256: bytes) -> None:
        self._write(Instruction.KNOWN, _KNOWN.pack(handle, offset, nbytes, sha256))

    def seed(self, seed: int) -> None:
        self._write(Instruction.SEED, _U64.pack(seed))

    def random(self, state: bytes | memoryview) -> None:
        self._write(Instruction.RANDOM, _U32.pack(len(state)))
        self.buffer += state

    def group(self, step: bytes) -> None:
        self._write(Instruction.GROUP, _U32.pack(len(step)) + step)

    def record(self, program: int) -> None:
        self._write(Instruction.RECORD, _U32.pack(program))

    def stop(self) -> None:
        self._write(Instruction.STOP, b"")

    def run(self, program: int) -> None:
        self._write(Instruction.RUN, _U32.pack(program))

    def drop(self, program: int) -> None:
        self._write(Instruction.DROP, _U32.pack(program))

    def _write(self, instruction: Instruction, operands: bytes) -> None:
        self.buffer.append(instruction)
        self.buffer += operands
        self.count += 1


def definition_number(place: int, signature: bytes) -> int:
    """The number of a definition in a place below `MAX_DEFINITIONS`."""
    return place | zlib.crc32(signature) % (1 << 16) * MAX_DEFINITIONS


def call_prefix(number: int) -> bytes:
    """The bytes of a CALL before what its layout packs."""
    return bytes([Instruction.CALL]) + _U32.pack(number)


def call_packer(number: int, form: struct.Struct) -> Callable[..., bytes]:
    """A function that encodes a CALL of a definition from its operands; kept for the client's hot path."""
    prefix = call_prefix(number)
    return functools.partial(struct.Struct(f"<{len(prefix)}s{form.format.removeprefix('<')}").pack, prefix)


def parse(payload: memoryview, counts: Counts, done: Done | None = None) -> Iterator[tuple]:  # type: ignore[type-arg]
    """The instructions of a batch, each as a tuple of its kind and its operands. Those that `done` does are left out.

    A CALL's operands are its definition's number and the tuple that its layout unpacks; bytes are views of `payload`.
    Lazily: a definition must take effect before the calls of the same batch are reached.

    Raises:
        ProtocolError: an unknown instruction, one that ends after the batch does, or one above a limit.
    """
    at, end = 0, len(payload)
    kind = 0
    number_of = _U32.unpack_from
    try:
        while at < end:
            kind = payload[at]
            if kind == _CALL and done is not None and (after := done(payload, at)) > at:
                at = after
                continue
            at += 1
            if kind == _CALL:
                (number,) = number_of(payload, at)
                form = counts(number)
                yield (kind, number, form.unpack_from(payload, at + 4))
                at += 4 + form.size
            elif kind == Instruction.FREE:
                (count,) = _U32.unpack_from(payload, at)
                yield (kind, _handles(payload, at + 4, count))
                at += 4 + 8 * count
            elif kind == Instruction.NEW:
                yield (kind, *_NEW.unpack_from(payload, at))
                at += _NEW.size
            elif kind == Instruction.DEFINE:
                number, length = _DEFINE.unpack_from(payload, at)
                at += _DEFINE.size
                yield (kind, number, _bytes(payload, at, length, MAX_SIGNATURE))
                at += length
            elif kind == Instruction.WRITE:
                handle, offset, length = _WRITE.unpack_from(payload, at)
                at += _WRITE.size
                yield (kind, handle, offset, _bytes(payload, at, length, MAX_WRITE))
                at += length
            elif kind == Instruction.KNOWN:
                yield (kind, *_KNOWN.unpack_from(payload, at))
                at += _KNOWN.size
            elif kind == Instruction.SEED:
                yield (kind, *_U64.unpack_from(payload, at))
                at += 8
            elif kind in (Instruction.RANDOM, Instruction.GROUP):
                (length,) = _U32.unpack_from(payload, at)
                at += _U32.size
                limit = MAX_RANDOM_STATE if kind == Instruction.RANDOM else MAX_STEP
                yield (kind, _bytes(payload, at, length, limit))
                at += length
            elif kind == Instruction.STOP:
                yield (kind,)
            elif kind in (Instruction.RECORD, Instruction.RUN, Instruction.DROP):
                yield (kind, *_U32.unpack_from(payload, at))
                at += 4
            else:
                raise ProtocolError(f"byte {at - 1} of a batch is no instruction: {kind}")
    except struct.error:
        raise ProtocolError(f"a batch ends inside an instruction of kind {kind}") from None


def _handles(payload: memoryview, at: int, count: int) -> tuple[int, ...]:
    if count > (len(payload) - at) // 8:
        raise ProtocolError(f"a batch ends inside a list of {count} handles")
    return struct.unpack_from(f"<{count}Q", payload, at)


def _bytes(payload: memoryview, at: int, length: int, limit: int) -> memoryview:
    if length > limit or at + length > len(payload):
        raise ProtocolError(f"{length} bytes in a batch: at most {min(limit, len(payload) - at)} can stand there")
    return payload[at : at + length]

"""Reads the header of a GGUF file (version 3 or 2), and writes files of version 3.

    "GGUF", u32 version, u64 tensors, u64 keys
    keys:     a string, u32 type, the value; a string is a u64 length and UTF-8
    tensors:  a string, u32 dimensions, u64 sizes with the columns first, u32 type, u64 offset from the data
    data:     aligned to `general.alignment`, as is each tensor in it

A header is untrusted: every count and length is compared with a limit and with what is left of the file before
anything of that size is allocated.
"""

import mmap
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from warpbus.errors import CheckpointError
from warpbus.formats.gguf.blocks import BY_NUMBER, BlockType
from warpbus.formats.safetensors_io import raw_bytes

MAGIC = b"GGUF"
SUFFIX = ".gguf"
_VERSION = 3
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32

_MAX_TENSORS = 2**17
_MAX_KEYS = 2**16
_MAX_NAME = 2**16 - 1  # bytes of a key or of a tensor's name
_MAX_STRING = 2**24  # bytes of a value
_MAX_ITEMS = 2**23  # of an array
_MAX_HEADER = 2**29
_MAX_ELEMENTS = 2**44
_MAX_ALIGNMENT = 2**20

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_BOOL, _UINT32, _INT32, _FLOAT32, _UINT64 = 7, 4, 5, 6, 10

Value = bool | int | float | str | list[Any]
"""A value of the metadata. A list has one type of numbers, or strings."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF file.

    Attributes:
        file: where it is.
        name: in the file.
        shape: in PyTorch's order, rows before columns.
        kind: how its numbers are stored.
        offset: of its first byte in the file.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: BlockType
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.row_bytes * self.rows

    @property
    def rows(self) -> int:
        """The product of all sizes but the last."""
        return _product(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.shape[-1] // self.kind.size * self.kind.nbytes

    def read_rows(self, start: int, stop: int) -> Tensor:
        """The bytes of rows, uint8 `[stop - start, row_bytes]`.

        Raises:
            CheckpointError: the file cannot be read, or is shorter than when its header was read.
        """
        data = bytearray((stop - start) * self.row_bytes)
        try:
            with self.file.open("rb") as file:
                file.seek(self.offset + start * self.row_bytes)
                count = file.readinto(data)
        except OSError as error:
            raise CheckpointError(f"{self.file}: cannot be read: {error.strerror or error}") from error
        if count != len(data):
            raise CheckpointError(f"{self.file}: changed while it was being read: start again")
        return torch.frombuffer(data, dtype=torch.uint8).view(stop - start, self.row_bytes)


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a GGUF file: its metadata and its tensors, by name."""

    file: Path
    metadata: dict[str, Value]
    tensors: dict[str, GGUFTensor]


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file: a file that begins as one, or that has the suffix."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return path.suffix == SUFFIX or file.read(4) == MAGIC
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_header(file: Path) -> GGUFHeader:
    """The metadata of a GGUF file and its tensors, none of which is read.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or has a tensor of a type that is not supported.
    """
    try:
        size = file.stat().st_size
        if size < len(MAGIC):
            raise _damaged(file, f"it has {size} bytes")
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(file, data)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error


class _Cursor:
    """Reads the fields of a header one after the other, never past the end of the file."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file = file
        self.position = 0
        self._data = data
        self._end = min(len(data), _MAX_HEADER)

    def take(self, count: int) -> bytes:
        if count > self._end - self.position:
            raise _damaged(self.file, f"its header goes past byte {self._end:,}")
        self.position += count
        return self._data[self.position - count : self.position]

    def number(self, kind: int) -> Any:
        code = _NUMBERS[kind]
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, what: str, limit: int) -> int:
        """A u64 of at most `limit`."""
        found: int = self.number(_UINT64)
        if found > limit:
            raise _damaged(self.file, f"it says {found:,} {what}, expected {limit:,} at most")
        return found

    def text(self, limit: int) -> str:
        raw = self.take(self.count("bytes of a string", limit))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise _damaged(self.file, f"the string at byte {self.position - len(raw):,} is not UTF-8") from None

    def value(self, key: str) -> Value:
        kind = self.number(_UINT32)
        if kind == _STRING:
            return self.text(_MAX_STRING)
        if kind == _ARRAY:
            return self._items(key)
        if kind not in _NUMBERS:
            raise _damaged(self.file, f"key {key!a:.80} has the unknown type {kind}")
        found: Value = self.number(kind)
        return found

    def _items(self, key: str) -> list[Any]:
        kind = self.number(_UINT32)
        count = self.count(f"items of {key!a:.80}", _MAX_ITEMS)
        if kind == _STRING:
            return [self.text(_MAX_STRING) for _ in range(count)]
        if kind not in _NUMBERS:
            raise _damaged(self.file, f"key {key!a:.80} is an array of the unsupported type {kind}")
        code = f"<{count}{_NUMBERS[kind]}"
        return list(struct.unpack(code, self.take(struct.calcsize(code))))


def _parse(file: Path, data: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(file, data)
    if cursor.take(4) != MAGIC:
        raise _damaged(file, "it does not begin with GGUF")
    version = cursor.number(_UINT32)
    if version not in (2, _VERSION):
        raise CheckpointError(f"{file}: GGUF version {version} is not supported: expected version 3 in little-endian")
    tensors = cursor.count("tensors", _MAX_TENSORS)
    keys = cursor.count("keys", _MAX_KEYS)
    metadata: dict[str, Value] = {}
    for _ in range(keys):
        key = cursor.text(_MAX_NAME)
        if key in metadata:
            raise _damaged(file, f"key {key!a:.80} occurs twice")
        metadata[key] = cursor.value(key)
    described = [_describe(cursor) for _ in range(tensors)]
    start = _aligned(cursor.position, _alignment(file, metadata))
    found: dict[str, GGUFTensor] = {}
    end = start
    for name, shape, kind, offset in sorted(described, key=lambda each: each[3]):
        tensor = GGUFTensor(file, name, shape, kind, start + offset)
        if name in found:
            raise _damaged(file, f"tensor {name!a:.80} occurs twice")
        if tensor.offset < end:
            raise _damaged(file, f"tensor {name!a:.80} overlaps another one")
        end = tensor.offset + tensor.nbytes
        if end > len(data):
            raise _damaged(file, f"tensor {name!a:.80} ends at byte {end:,}, the file has {len(data):,}")
        found[name] = tensor
    return GGUFHeader(file, metadata, found)


def _describe(cursor: _Cursor) -> tuple[str, tuple[int, ...], BlockType, int]:
    """The name, shape, type and offset of a tensor."""
    name = cursor.text(_MAX_NAME)
    dimensions = cursor.number(_UINT32)
    if not 1 <= dimensions <= 4:
        raise _damaged(cursor.file, f"tensor {name!a:.80} has {dimensions} dimensions")
    sizes = [cursor.count(f"elements of {name!a:.80}", _MAX_ELEMENTS) for _ in range(dimensions)]
    number, offset = cursor.number(_UINT32), cursor.number(_UINT64)
    kind = BY_NUMBER.get(number)
    if kind is None:
        supported = ", ".join(each.name for each in BY_NUMBER.values())
        raise CheckpointError(
            f"{cursor.file}: tensor {name!a:.80} has type {number}, which is not supported: use a file of {supported}"
        )
    if 0 in sizes or _product(sizes) > _MAX_ELEMENTS or sizes[0] % kind.size:
        raise _damaged(cursor.file, f"tensor {name!a:.80} of type {kind.name} has the impossible shape {sizes}")
    return name, tuple(reversed(sizes)), kind, offset


def _alignment(file: Path, metadata: Mapping[str, Value]) -> int:
    found = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if type(found) is not int or not 1 <= found <= _MAX_ALIGNMENT:
        raise _damaged(file, f"{_ALIGNMENT} is {found!a:.40}")
    return found


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _product(sizes: Iterable[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file}: not a GGUF file, or damaged: {why}: download it again")


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write.

    Attributes:
        shape: in PyTorch's order.
        kind: how its numbers are stored.
        make: its bytes, computed when it is written: any tensor whose memory is what the file is to hold.
    """

    shape: tuple[int, ...]
    kind: BlockType
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return _product(self.shape) // self.kind.size * self.kind.nbytes


def write_file(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, PlannedTensor],
    written: Callable[[str, bytes | memoryview], object],
) -> None:
    """Write a GGUF file of version 3.

    Args:
        metadata: integers are written as 32 bits, floats as float32.
        tensors: written in this order.
        written: called with the name and the bytes of each tensor.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_text(key) + _value(value))
        offset = 0
        for name, tensor in tensors.items():
            sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
            file.write(_text(name) + sizes + struct.pack("<IQ", tensor.kind.number, offset))
            offset = _aligned(offset + tensor.nbytes, _DEFAULT_ALIGNMENT)
        _pad(file)
        for name, tensor in tensors.items():
            data = raw_bytes(tensor.make())
            assert len(data) == tensor.nbytes, name
            file.write(data)
            _pad(file)
            written(name, data)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _DEFAULT_ALIGNMENT))


def _text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _kind(value: Value) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        return _INT32 if value < 0 else _UINT32
    return _STRING if isinstance(value, str) else _FLOAT32


def _value(value: Value) -> bytes:
    if not isinstance(value, list):
        kind = _kind(value)
        return struct.pack("<I", kind) + (_text(str(value)) if kind == _STRING else _packed(kind, [value]))
    kind = _kind(value[0]) if value else _INT32
    if kind == _UINT32:
        kind = _INT32
    head = struct.pack("<IIQ", _ARRAY, kind, len(value))
    return head + (b"".join(map(_text, value)) if kind == _STRING else _packed(kind, value))


def _packed(kind: int, values: list[Any]) -> bytes:
    return struct.pack(f"<{len(values)}{_NUMBERS[kind]}", *values)

"""Safetensors files: read by the `safetensors` library after a check of the header, and written here.

A file is an 8-byte little-endian length, a JSON header of that length, and the bytes of the tensors.

**Reading.** The header is checked completely before the library opens the file, so that a damaged or hostile file ends
in a one-line error. The library then maps the file privately: pages are read from the disk on access, and writing to a
tensor does not change the file. A map keeps all accessed pages until its last tensor is freed, and opening a file of
2,000 tensors takes milliseconds. Therefore one map serves reads of up to `MAPPED_BYTES`, which bounds the memory for
reading a model tensor by tensor.

**Writing** does not use the library: its tensor order depends on its version, and a checksum would need a second pass
over the file. The bytes of a file depend only on its tensors.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from warpbus.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference implementation
MAX_DIMENSIONS = 64
MAPPED_BYTES = 2**25
"""Maximum bytes of tensors read through one map of a file."""
COPIED_BYTES = 2**16
"""Tensors of up to so many bytes are copied, so that a norm that is kept does not keep a whole map."""
CHUNK_BYTES = 2**20
"""Bytes that `Entry.chunks` reads at a time. The heap keeps larger ones, once for each thread that hashes."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class MappedFile:
    """A file whose header was checked, mapped when a tensor is read.

    Args:
        path: of the file.
        nbytes: its size when the header was checked.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self._nbytes = nbytes
        self._map: Any = None
        self._read = 0

    def tensor(self, name: str, nbytes: int) -> Tensor:
        """Read a tensor. Raises CheckpointError if the file is gone, or its size has changed."""
        try:
            # Accessing a map beyond the end of its file kills the process (SIGBUS).
            if self.path.stat().st_size != self._nbytes:
                raise CheckpointError(f"{self.path}: changed while it was being read: start again")
            mapped = self._map
            if mapped is None or self._read + nbytes > MAPPED_BYTES:
                mapped = self._map = safe_open(self.path, framework="pt")
                self._read = 0
            self._read += nbytes
            tensor: Tensor = mapped.get_tensor(name)
            if nbytes <= COPIED_BYTES:
                tensor = tensor.clone()
        except OSError as error:
            raise _unreadable(self.path, error) from error
        except SafetensorError as error:
            raise _damaged(self.path, str(error)) from error
        return tensor


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: `nbytes` bytes at `offset` from the beginning of the file."""

    file: MappedFile
    name: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        """The tensor, on the CPU, mapped from the file: writing to it does not change the file.

        Raises:
            CheckpointError: if the file is gone, or its size has changed since its header was read.
        """
        return self.file.tensor(self.name, self.nbytes)

    def chunks(self) -> Iterator[bytes]:
        """The tensor's bytes in order, at most `CHUNK_BYTES` at a time. They are read, not mapped, so that memory does
        not grow by the size of the tensor.

        Raises:
            CheckpointError: if the file cannot be read, or is shorter than when its header was read.
        """
        left = self.nbytes
        try:
            with self.file.path.open("rb") as stream:
                stream.seek(self.offset)
                while left:
                    chunk = stream.read(min(left, CHUNK_BYTES))
                    if not chunk:
                        raise CheckpointError(f"{self.file.path}: changed while it was being read: start again")
                    left -= len(chunk)
                    yield chunk
        except OSError as error:
            raise CheckpointError(f"{self.file.path}: cannot be read: {error.strerror or error}") from error


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, by name; no tensor is read.

    Raises:
        CheckpointError: if the file cannot be read, is truncated, or its header is not what the format asks for.
    """
    try:
        with file.open("rb") as stream:
            return read_entries(stream, file)
    except OSError as error:
        raise _unreadable(file, error) from error


def read_entries(stream: BinaryIO, file: Path) -> dict[str, Entry]:
    """As `read_header`, of a file that is open at its beginning.

    Args:
        file: its path, from which `Entry.read` and `Entry.chunks` read, and its name for messages.

    Raises:
        CheckpointError: as `read_header`.
        OSError: the file cannot be read.
    """
    file_bytes = os.fstat(stream.fileno()).st_size
    if file_bytes < 8:
        raise _truncated(file, 8, file_bytes)
    header_bytes = int.from_bytes(stream.read(8), "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(f"{file}: not a safetensors file: its header would have {header_bytes:,} bytes")
    if 8 + header_bytes > file_bytes:
        raise _truncated(file, 8 + header_bytes, file_bytes)
    text = stream.read(header_bytes)
    start = 8 + header_bytes
    mapped = MappedFile(file, file_bytes)
    entries = {
        name: _entry(file, mapped, start, name, described)
        for name, described in _parse(file, text).items()
        if name != "__metadata__"
    }
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise _damaged(file, f"tensor {shown(name)} begins at byte {entry.offset - start:,}, not {end - start:,}")
        end += entry.nbytes
    if end > file_bytes:
        raise _truncated(file, end, file_bytes)
    if end < file_bytes:
        raise _damaged(file, f"{file_bytes - end:,} bytes follow the last tensor")
    return entries


def write_file(file: Path, tensors: Mapping[str, Tensor], *, checksum: bool = False) -> int | None:
    """Write tensors to a new safetensors file and sync it to the disk.

    Args:
        file: where to write.
        tensors: contiguous CPU tensors.
        checksum: whether to compute a checksum, which takes as long as writing to a fast disk.

    Returns:
        the CRC-32 of the file, as `zlib.crc32`, or None without `checksum`.

    Raises:
        OSError: the file cannot be written; the caller removes the partial file.
    """
    # The largest elements first, so that every tensor is aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    beginning: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
    pieces = (raw_bytes(tensor) for _, tensor in ordered)
    crc = 0
    with file.open("wb") as stream:
        for piece in chain(beginning, pieces):
            stream.write(piece)
            crc = zlib.crc32(piece, crc) if checksum else 0
        stream.flush()
        os.fsync(stream.fileno())
    return crc if checksum else None


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    # Not reshape: a contiguous axis of length 1 may have any stride, which the view of bytes refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def can_store(dtype: torch.dtype) -> bool:
    """Whether the format has a name for `dtype`."""
    return dtype in _NAMES


def shown(name: str) -> str:
    """A tensor's name, escaped for a one-line message."""
    text = name if name.isprintable() and name else ascii(name)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):
            raise ValueError("a name appears twice")
        return names

    try:
        header = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise _damaged(file, f"its header is not JSON ({reason})") from error
    if not isinstance(header, dict):
        raise _damaged(file, "its header is not a JSON object")
    return header


def _entry(file: Path, mapped: MappedFile, start: int, name: str, described: object) -> Entry:
    label = f"tensor {shown(name)}"
    if not isinstance(described, dict) or not {"dtype", "shape", "data_offsets"} <= described.keys():
        raise _damaged(file, f"{label} lacks its dtype, shape or data_offsets")
    dtype = DTYPES.get(described["dtype"]) if isinstance(described["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(
            f"{file}: {label} has dtype {shown(str(described['dtype']))}, which is not supported: "
            f"expected one of {', '.join(DTYPES)}"
        )
    shape, offsets = described["shape"], described["data_offsets"]
    if not _sizes(shape) or len(shape) > MAX_DIMENSIONS or prod(max(size, 1) for size in shape) >= 2**63:
        raise _damaged(file, f"{label} has an impossible shape")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(file, f"{label} has impossible data_offsets")
    begin, end = offsets
    nbytes = prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise _damaged(file, f"{label} of shape {shape} needs {nbytes:,} bytes, its data_offsets give {end - begin:,}")
    return Entry(mapped, name, start + begin, nbytes, tuple(shape), dtype)


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{file}: cannot be read: {error.strerror or error}")


def _truncated(file: Path, promised: int, found: int) -> CheckpointError:
    return CheckpointError(
        f"{file}: truncated: its header promises {promised:,} bytes, the file has {found:,}: download it again"
    )


def _damaged(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{file}: damaged: {reason}: download it again")

"""A lease as a file, on disk or in main memory: suspended here, resumed later, on disk also by another process.

The file is of the safetensors format: each storage is a tensor of bytes, `storage.<handle>`. The tensor `lease` is a
CRC-32 (u32, little endian) and the header that it is of: the executor's state and the CRC-32s of the storages, encoded
by `wire`. The file is there complete or not at all, and only its owner can read it: it holds what the tenant
computed.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import IO, TYPE_CHECKING

import torch

from warpbus.errors import CheckpointError, DeviceError, ProtocolError, StorageError
from warpbus.formats.files import check_space, replace_file, sync
from warpbus.formats.safetensors_io import Entry, read_header
from warpbus.pool.protocol.wire import Value, decode, encode
from warpbus.pool.tenant.migration_messages import MAX_STATE
from warpbus.pool.tenant.staging import CHUNK, ByteStaging
from warpbus.pool.tenant.storages import MAX_STORAGES

if TYPE_CHECKING:
    from warpbus.pool.tenant.execution import Executor

VERSION = 2

_HEADER = "lease"
_CRC = Struct("<I")
_PREFIX = "storage."
_MOST_HEADER = MAX_STATE + 16 * MAX_STORAGES  # bytes


@dataclass(frozen=True)
class Suspended:
    """The facts in a file about the lease in it.

    Attributes:
        device: the kind of device that it executed on, and can be resumed on.
        executed: its last batch.
        used: bytes of its storages.
    """

    device: str
    executed: int
    used: int


@dataclass(frozen=True)
class _SuspendedLayout:
    """A lease's file before it is written: the header of safetensors, the state, bytes of each storage, and of all."""

    text: bytes
    state: bytes
    sizes: Mapping[int, int]
    nbytes: int


def suspend(executor: "Executor", path: Path) -> int:
    """Write a lease, which must not execute meanwhile, to a file; returns the file's bytes. The lease stays as it is.

    Raises:
        StorageError: it cannot be written; what was at `path` before is still there.
    """
    layout = _laid_out(executor)
    check_space(path, layout.nbytes)

    def write(partial: Path) -> None:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            _write(executor, layout, file)

    replace_file(path, write)
    sync(path.parent)
    return layout.nbytes


def suspend_to_memory(executor: "Executor", limit: int, step: Callable[[], None] = lambda: None) -> "SuspendedInMemory":
    """The same in main memory, which takes at most `limit` bytes.

    Args:
        executor: of the lease.
        limit: in bytes.
        step: called after each storage.

    Raises:
        StorageError: it does not fit there.
    """
    layout = _laid_out(executor)
    if layout.nbytes > limit:
        raise StorageError(
            f"host memory is full: the lease has {layout.nbytes:,} bytes, and {max(0, limit):,} are left for it: give "
            "warpbus pool serve more --swap-memory, or release leases"
        )
    descriptor = os.memfd_create("warpbus-lease", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", buffering=0, closefd=False) as file:
            _write(executor, layout, file, checked=False, step=step)
    except OSError as error:
        os.close(descriptor)
        raise StorageError(f"host memory: the lease cannot be written there ({error.strerror}): free memory") from None
    except BaseException:
        os.close(descriptor)
        raise
    return SuspendedInMemory(descriptor, layout.nbytes, executor.storages.used)


class SuspendedInMemory:
    """A lease in an anonymous file (memfd_create(2)), whose memory is freed with this process at the latest.

    Attributes:
        nbytes: of the file.
        used: bytes of the lease's storages.
    """

    def __init__(self, descriptor: int, nbytes: int, used: int) -> None:
        self._descriptor = descriptor
        self.nbytes = nbytes
        self.used = used

    def resume(self, executor: "Executor", step: Callable[[], None] = lambda: None) -> None:
        """As `resume` of a file. What is here stays."""
        resume(Path(f"/proc/self/fd/{self._descriptor}"), executor, checked=False, step=step)

    def close(self) -> None:
        """Free the memory."""
        os.close(self._descriptor)


def _laid_out(executor: "Executor") -> _SuspendedLayout:
    sizes = dict(executor.storages.sizes())
    state = encode(executor.state())
    # The checksums have a fixed size: so the header's place is known before they are.
    size = len(_typed_header(executor, state, [0] * len(sizes)))
    described: dict[str, object] = {"__metadata__": {"format": "warpbus-lease"}}
    end = 0
    for name, nbytes in (*((f"{_PREFIX}{handle}", nbytes) for handle, nbytes in sizes.items()), (_HEADER, size)):
        described[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _SuspendedLayout(text, state, sizes, 8 + len(text) + end)


def _write(
    executor: "Executor",
    layout: _SuspendedLayout,
    file: IO[bytes],
    *,
    checked: bool = True,
    step: Callable[[], None] = lambda: None,
) -> None:
    """Write the lease, with checksums of its storages if they are to be `checked`. Raises OSError."""
    _write_all(file, len(layout.text).to_bytes(8, "little") + layout.text)
    checksums = []
    for handle, nbytes in layout.sizes.items():
        crc = 0
        for part in executor.storages.stream(handle, 0, nbytes):
            _write_all(file, part)
            crc = zlib.crc32(part, crc) if checked else 0
        checksums.append(crc)
        step()
    _write_all(file, _typed_header(executor, layout.state, checksums))


def _write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """An unbuffered file may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def look(path: Path) -> Suspended:
    """The contents of a file of `suspend`, without reading its storages.

    Raises:
        StorageError: there is no such file, it is damaged, or of another version.
    """
    header, entries = _opened(path)
    return Suspended(str(header["device"]), _number(path, header["executed"]), sum(e.nbytes for e in entries.values()))


def resume(path: Path, executor: "Executor", *, checked: bool = True, step: Callable[[], None] = lambda: None) -> None:
    """Give an empty executor what was suspended. The file stays.

    Args:
        path: of the file.
        executor: the one to fill.
        checked: the checksums of storages are compared: the file may have been damaged.
        step: called after each storage.

    Raises:
        StorageError: there is no such file, it is damaged, or of another version; the executor is empty then.
        DeviceError: it is of another kind of device.
        torch.OutOfMemoryError: it is more than the executor's quota; nothing was read.
    """
    header, entries = _opened(path)
    storages = executor.storages
    if header["device"] != storages.device.type:
        raise DeviceError(
            f"{path}: a lease on {str(header['device'])[:20]!r} cannot be resumed on {storages.device.type}: choose "
            "another GPU"
        )
    used = sum(entry.nbytes for entry in entries.values())
    if used > storages.memory:
        raise torch.OutOfMemoryError(
            f"{path}: the lease holds {used:,} bytes, {storages.memory:,} are for it here: lease more memory"
        )
    staging, made = ByteStaging(storages.device), []
    try:
        for (handle, entry), crc in zip(entries.items(), _checksums(path, header, len(entries)), strict=True):
            storages.create(handle, entry.nbytes)
            made.append(handle)
            found = _fill(staging, storages.raw(handle), entry, checked=checked)
            if checked and found != crc:
                raise _damaged(path, f"storage {handle} has another checksum")
            step()
        state = decode(header["state"]) if isinstance(header["state"], bytes) else None
        if not isinstance(state, dict):
            raise _damaged(path, "it has no state")
        executor.restore(state)
        if storages.device.type == "cuda":
            torch.cuda.synchronize(storages.device)
    except BaseException:
        for handle in made:
            storages.free(handle)
        raise


@torch.inference_mode()  # as the storages' tensors were made
def _fill(staging: ByteStaging, target: torch.Tensor, entry: Entry, *, checked: bool) -> int:
    """Fill a storage, and return the checksum of what it was filled with, if that is to be `checked`."""
    crc = start = 0
    for chunk in entry.chunks():  # a map of the file would count as memory of this process, which has a limit
        crc = zlib.crc32(chunk, crc) if checked else 0
        for at in range(0, len(chunk), CHUNK):
            part = memoryview(chunk)[at : at + CHUNK]
            staging.write([(target[start : start + len(part)], part)])
            start += len(part)
    return crc


def _typed_header(executor: "Executor", state: bytes, checksums: list[int]) -> bytes:
    header = encode(
        {
            "version": VERSION,
            "device": executor.storages.device.type,
            "executed": executor.executed,
            "state": state,
            "checksums": b"".join(map(_CRC.pack, checksums)),
        }
    )
    return _CRC.pack(zlib.crc32(header)) + header


def _opened(path: Path) -> tuple[Mapping[str, Value], dict[int, Entry]]:
    """The typed header, and where the storages lie, by handle in the file's order."""
    if not path.is_file():
        raise StorageError(f"{path}: there is no suspended lease: see what is suspended with warpbus pool status")
    try:
        entries = read_header(path)
        place = entries.pop(_HEADER, None)
        if place is None or place.nbytes > _MOST_HEADER:
            raise _damaged(path, f"it has no tensor {_HEADER!r} that is one of Warpbus")
        data = b"".join(place.chunks())
        if len(data) < _CRC.size or _CRC.unpack_from(data)[0] != zlib.crc32(data[_CRC.size :]):
            raise _damaged(path, "its header has another checksum")
        header = decode(data[_CRC.size :])
    except (CheckpointError, ProtocolError) as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(header, dict) or header.keys() != {"version", "device", "executed", "state", "checksums"}:
        raise _damaged(path, "its header is another one")
    if header["version"] != VERSION:
        raise StorageError(
            f"{path}: version {header['version']!r} of suspended leases, this Warpbus reads {VERSION}: use the Warpbus "
            "that wrote it"
        )
    return header, dict(_storages(path, entries))


def _storages(path: Path, entries: Mapping[str, Entry]) -> Iterator[tuple[int, Entry]]:
    if len(entries) > MAX_STORAGES:
        raise _damaged(path, f"it has more than {MAX_STORAGES:,} storages")
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        number = name.removeprefix(_PREFIX)
        if name == number or not number.isdecimal() or entry.dtype != torch.uint8 or len(entry.shape) != 1:
            raise _damaged(path, f"it has a tensor {name[:40]!a}")
        yield int(number), entry


def _checksums(path: Path, header: Mapping[str, Value], count: int) -> list[int]:
    found = header["checksums"]
    if not isinstance(found, bytes) or len(found) != count * _CRC.size:
        raise _damaged(path, f"it has no checksums of its {count} storages")
    return [crc for (crc,) in _CRC.iter_unpack(found)]


def _number(path: Path, value: Value) -> int:
    if type(value) is not int:
        raise _damaged(path, "it does not say how far the lease was")
    return value


def _damaged(path: Path, why: str) -> StorageError:
    return StorageError(f"{path}: this suspended lease cannot be resumed: {why.removeprefix(f'{path.name}: ')}")

"""Evicted blocks of the KV cache in files: written and read by threads, found again after a restart.

A block is one file in a directory that this process alone uses: `DIR/FINGERPRINT/NUMBER/aa/aabb...`, named by the key
of the block. It begins with a header of fixed size, which has the key, the length of the content and its BLAKE2b
digest: a damaged or truncated file is not used, and deleted. Files are written under a temporary name and renamed.
"""

import hashlib
import logging
import os
import queue
import struct
from collections import OrderedDict, abc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile

from warpbus.errors import StorageError, UsageError
from warpbus.formats.files import FileLock

_log = logging.getLogger("warpbus.engine")

_MAGIC = b"warpbKV1"
_HEADER = struct.Struct("<8s32sQ16s")  # magic, key, bytes of the content, digest of the content
_KEY_BYTES = 32
_DIGEST_BYTES = 16
_READERS = 4  # threads; hashing and reading release the interpreter's lock
_MOST_PROCESSES = 1024


@dataclass(frozen=True)
class DiskSpace:
    """Where the blocks of an engine are kept.

    Attributes:
        directory: of all engines and models.
        nbytes: the limit of this process's files.
        fingerprint: of the model and all else that the content of a block depends on besides its key.
    """

    directory: Path
    nbytes: int
    fingerprint: str


@dataclass(frozen=True)
class DiskTransfer:
    """A file that was read or written.

    Attributes:
        slot: of main memory, which is not used any more.
        read: it was read; else written.
        good: the content was right, or the file is complete.
    """

    key: bytes
    slot: int
    read: bool
    good: bool


def check_limit(space: DiskSpace, block_bytes: int) -> None:
    """Raises UsageError if the limit is less than a block of `block_bytes` bytes needs."""
    needed = _HEADER.size + block_bytes
    if space.nbytes < needed:
        raise UsageError(f"kv_disk_size is {space.nbytes:,} bytes, a block of the cache needs {needed:,}: give more")


class DiskCache:
    """The files of one process, least recently used first. All methods are called by the engine's thread.

    Args:
        space: the directory, which is created if it is missing, and the limit.
        block_bytes: bytes per block.
        memory: the bytes of a slot of main memory, which threads read and write.
        copies_waiter: returns a function that waits for the copies to and from main memory begun so far. The threads
            of the disk call that function.

    Attributes:
        directory: of this process's files.
        written, read: blocks since the start.

    Raises:
        UsageError: the limit is less than a block.
        StorageError: the directory cannot be used.
    """

    def __init__(
        self,
        space: DiskSpace,
        block_bytes: int,
        memory: Callable[[int], memoryview],
        copies_waiter: Callable[[], Callable[[], None]],
    ) -> None:
        check_limit(space, block_bytes)
        self._file_bytes = _HEADER.size + block_bytes
        self._most = space.nbytes // self._file_bytes
        self._block_bytes, self._memory, self._copies_waiter = block_bytes, memory, copies_waiter
        self._lock: FileLock | None
        self.directory, self._lock = _own_directory(space.directory / space.fingerprint)
        self.written = self.read = 0
        self._broken = False  # nothing is written any more
        self._reported = False
        # One thread for writes and deletions, which keep their order.
        self._writer = ThreadPoolExecutor(1, "kv-disk-write")
        self._readers = ThreadPoolExecutor(_READERS, "kv-disk-read")
        self._finished: queue.SimpleQueue[DiskTransfer] = queue.SimpleQueue()
        self._pending: set[Future[None]] = set()
        self._files: OrderedDict[bytes, None] = OrderedDict((key, None) for key in self._found())
        self._make_room(0)
        if self._files:
            _log.info("KV cache on disk: %s blocks found in %s", f"{len(self._files):,}", self.directory)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, key: object) -> bool:
        return key in self._files

    def stats(self) -> dict[str, int]:
        """The fields of `Stats` for it."""
        return {
            "disk_bytes": len(self._files) * self._file_bytes,
            "disk_stored_bytes": self.written * self._block_bytes,
            "disk_loaded_bytes": self.read * self._block_bytes,
        }

    def use(self, key: bytes) -> None:
        """Make a block the most recently used one."""
        self._files.move_to_end(key)

    def write(self, key: bytes, slot: int) -> bool:
        """Begin to write the block of a slot, which must not change until this is `finished`.

        Returns:
            whether it is being written: not if it is on the disk already, or the disk is full.
        """
        if key in self._files:
            self.use(key)
            return False
        if self._broken:
            return False
        self._make_room(1)
        self._files[key] = None
        self._submit(self._writer, self._write, key, slot, self._copies_waiter())
        return True

    def load(self, key: bytes, slot: int) -> None:
        """Begin to read a block to a slot, which must not be used until this is `finished`."""
        self.use(key)
        self._submit(self._readers, self._read, key, slot, self._copies_waiter())

    def drop(self, key: bytes) -> None:
        """Forget a block, and delete its file."""
        if key in self._files:
            del self._files[key]
            self._submit(self._writer, self._delete, key)

    def finished(self) -> list[DiskTransfer]:
        """The files that were read or written since the last call."""
        found: list[DiskTransfer] = []
        with suppress(queue.Empty):
            while True:
                found.append(self._finished.get_nowait())
        for each in found:
            if each.good and each.read:
                self.read += 1
            elif each.good:
                self.written += 1
            else:
                self._files.pop(each.key, None)
        self._pending = {each for each in self._pending if not each.done()}
        return found

    def wait(self, seconds: float, *, all_of_them: bool = False) -> None:
        """Wait until something, or everything, that has begun is finished, but no longer than so many seconds."""
        wait_for(self._pending, timeout=seconds, return_when="ALL_COMPLETED" if all_of_them else "FIRST_COMPLETED")

    def close(self) -> None:
        """End the threads after what they have begun, and let another process have the directory."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[..., None], *arguments: object) -> None:
        self._pending.add(pool.submit(work, *arguments))

    def _make_room(self, blocks: int) -> None:
        """Delete the least recently used files, so that there is room for so many more."""
        while self._files and len(self._files) + blocks > self._most:
            key, _ = self._files.popitem(last=False)
            self._submit(self._writer, self._delete, key)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.directory / name[:2] / name

    def _write(self, key: bytes, slot: int, wait_for_copies: Callable[[], None]) -> None:
        path = self._path(key)
        temporary = path.with_suffix(".partial")
        good = False
        try:
            wait_for_copies()
            content = self._memory(slot)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with temporary.open("wb", buffering=0) as file:
                _write_all(file, _HEADER.pack(_MAGIC, key, len(content), _digest(content)))
                _write_all(file, content)
            temporary.replace(path)
            good = True
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            if not self._broken:
                self._broken = True
                _log.warning(
                    "KV cache on disk: %s cannot be written (%s): no more blocks are written; those that are there are "
                    "still found. Free space, or give a smaller kv_disk_size, and restart the server",
                    self.directory,
                    error.strerror or error,
                )
        finally:
            self._finished.put(DiskTransfer(key, slot, read=False, good=good))

    def _read(self, key: bytes, slot: int, wait_for_copies: Callable[[], None]) -> None:
        good = False
        try:
            wait_for_copies()
            good = self._read_file(self._path(key), key, self._memory(slot))
        finally:
            self._finished.put(DiskTransfer(key, slot, read=True, good=good))

    def _read_file(self, path: Path, key: bytes, content: memoryview) -> bool:
        """Whether a file has the block of a key; its content is read."""
        try:
            with path.open("rb", buffering=0) as file:
                header = file.read(_HEADER.size)
                count = 0
                while count < len(content) and (more := file.readinto(content[count:])):
                    count += more
                ends = not file.read(1)
            expected = _HEADER.pack(_MAGIC, key, len(content), _digest(content))
            if header == expected and count == len(content) and ends:
                os.utime(path)
                return True
            why = "it is damaged"
        except OSError as error:
            why = error.strerror or str(error)
        if not self._reported:
            self._reported = True
            _log.warning("KV cache on disk: %s is not used: %s; such blocks are computed again", path, why)
        with suppress(OSError):
            path.unlink()
        return False

    def _delete(self, key: bytes) -> None:
        with suppress(OSError):
            self._path(key).unlink()

    def _found(self) -> list[bytes]:
        """The keys of the files that are there, least recently used first. Others are deleted."""
        found: list[tuple[int, bytes]] = []
        for name, status, path in _files(self.directory):
            key = bytes.fromhex(name) if len(name) == 2 * _KEY_BYTES and _is_hex(name) else b""
            if key and status.st_size == self._file_bytes:
                found.append((status.st_mtime_ns, key))
            else:
                with suppress(OSError):
                    os.unlink(path)
        return [key for _, key in sorted(found)]


def _files(directory: Path) -> abc.Iterator[tuple[str, os.stat_result, str]]:
    """The files in the sub-directories that `DiskCache` makes."""
    for part in range(256):
        with suppress(OSError), os.scandir(directory / f"{part:02x}") as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    yield entry.name, entry.stat(follow_symlinks=False), entry.path


def _is_hex(name: str) -> bool:
    return not set(name) - set("0123456789abcdef")


def _digest(content: memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def check_writable(directory: Path) -> None:
    """Make the directory of the files if it is missing.

    Raises:
        StorageError: it cannot be made, or nothing can be written into it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise StorageError(
            f"kv_disk: {directory} cannot be written ({error.strerror or error}): give a directory that can be"
        ) from error


def _own_directory(parent: Path) -> tuple[Path, FileLock]:
    """The first of the directories 0, 1, 2, ... that no other process uses, and the lock that keeps others away."""
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"kv_disk: {parent} cannot be made ({error.strerror or error}): give a directory that can be written"
        ) from error
    for number in range(_MOST_PROCESSES):
        directory = parent / str(number)
        try:
            lock = FileLock(parent / f"{number}.lock", directory)
        except StorageError:
            continue
        directory.mkdir(mode=0o700, exist_ok=True)
        return directory, lock
    raise StorageError(f"kv_disk: {parent} has {_MOST_PROCESSES} users or cannot be locked: give another directory")

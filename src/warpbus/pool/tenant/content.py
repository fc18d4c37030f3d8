"""The earlier uploads of a lease's client by SHA-256, so that the same weights are sent only once.

Each lease has a directory of its own, so that nobody learns from an answer what another one has; it is removed with the
lease. A hash is of the bytes that came, as the pool has computed it; no client can say what a file is the content of.
"""

import hashlib
import itertools
import mmap
import os
import shutil
import stat
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Lock, Thread

from warpbus.errors import StorageError

LEAST = 1 << 20
"""Bytes of the smallest upload that is kept."""

_MAX_PROMISES = 4096
_MAX_OPEN = 4
_MAX_WAITING = 8  # writes, of 4 MiB at most
_MOMENT = 5.0


class ContentStore:
    """A lease's uploads on disk.

    Args:
        directory: is made if it is not there, for its owner alone; it must be of no use to anybody else.
        limit: bytes that are kept (the memory of the lease), but at most half of what the disk has free; the least
            recently used go first.

    Attributes:
        trouble: why uploads are not kept at present, or "".
        expected: hashes that were asked for and are not here: what a client asks for is what it uploads next.

    Raises:
        StorageError: the directory cannot be made, or others may write there.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.trouble = ""
        self.expected: OrderedDict[bytes, None] = OrderedDict()
        self._asked = Lock()
        self._promised: OrderedDict[bytes, int] = OrderedDict()
        self._last_promise = 0.0
        self._numbers = itertools.count()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.lstat()
            free = shutil.disk_usage(directory).free
        except OSError as error:
            raise StorageError(f"{directory}: uploads cannot be kept there: {error.strerror}") from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise StorageError(f"{directory}: uploads can be kept only in a directory of mode 700 of one's own")
        self._directory = directory
        self.limit = min(limit, free // 2)

    def promise(self, sha256: bytes) -> bool:
        """Whether the content is here; if so it stays until it is taken, or thousands of others are promised."""
        if sha256 in self._promised:
            self._promised.move_to_end(sha256)
            return True
        try:
            descriptor = os.open(self._directory / sha256.hex(), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            with self._asked:
                self.expected[sha256] = None
                if len(self.expected) > _MAX_PROMISES:
                    self.expected.popitem(last=False)
            return False
        with suppress(OSError):
            os.utime(descriptor)
        self._promised[sha256] = descriptor
        self._last_promise = time.monotonic()
        if len(self._promised) > _MAX_PROMISES:
            os.close(self._promised.popitem(last=False)[1])
        return True

    def expects(self, sha256: bytes) -> bool:
        """Whether a client has asked for a content that was not here. It is not expected any more then."""
        with self._asked:
            found = sha256 in self.expected
            self.expected.pop(sha256, None)
            return found

    @property
    def awaited(self) -> bool:
        """Somebody was promised a content a moment ago and will take it, here, any moment."""
        return bool(self._promised) and time.monotonic() - self._last_promise < _MOMENT

    def take(self, sha256: bytes) -> memoryview | None:
        """The content, if it is here; promised or not."""
        if not self.promise(sha256):
            return None
        descriptor = self._promised.pop(sha256)
        try:
            return memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)

    def incoming(self) -> "Incoming":
        """Begin to keep an upload. Raises OSError."""
        return Incoming(self, self._directory / f"incoming-{os.getpid()}-{next(self._numbers)}")

    def keep(self, temporary: Path, sha256: bytes) -> None:
        """Put a file under its hash, and make room for it. Raises OSError."""
        temporary.rename(self._directory / sha256.hex())
        files = []
        for path in self._directory.iterdir():
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
        used = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if used <= self.limit:
                break
            if not path.name.startswith("incoming-"):
                path.unlink(missing_ok=True)
                used -= size

    def close(self) -> None:
        """Forget what was promised."""
        while self._promised:
            os.close(self._promised.popitem()[1])


class Incoming:
    """An upload on its way into a store. It is begun by the thread that executes, and the rest is done by another one.

    Attributes:
        size: the bytes that came so far.
        failed: its data so far cannot be used.
    """

    def __init__(self, store: ContentStore, path: Path) -> None:
        self.size = 0
        self.failed = False
        self._store = store
        self._path = path
        self._hash = hashlib.sha256()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def write(self, data: memoryview) -> None:
        """The next bytes. Raises OSError."""
        self._hash.update(data)
        while data:
            data = data[os.write(self._file, data) :]

    def finish(self) -> bytes:
        """It is complete. Returns its hash; raises OSError."""
        digest = self._hash.digest()
        if self._store.expects(digest):
            os.close(self._file)
            self._store.keep(self._path, digest)
        else:
            self.abandon()
        return digest

    def abandon(self) -> None:
        """It is of no use."""
        self.failed = True
        with suppress(OSError):  # it was closed
            os.close(self._file)
        self._path.unlink(missing_ok=True)


class Uploads:
    """Finds uploads among the writes of a lease: those that fill a storage from its start to its end, in order.

    Only while the client has asked for something that is not here: batches of data come once, and are not looked at.
    A thread of its own hashes and writes them, and the lease goes on meanwhile; where it does not keep up, the lease
    waits for it.

    Args:
        store: that keeps them.
    """

    def __init__(self, store: ContentStore) -> None:
        self._store = store
        self._open: OrderedDict[int, Incoming] = OrderedDict()
        self._work: Queue[Callable[[], object]] = Queue(_MAX_WAITING)
        self._worker: Thread | None = None

    def wrote(self, handle: int, offset: int, data: memoryview, nbytes: int) -> None:
        """A storage of `nbytes` was written. What goes wrong here stops no upload; `trouble` of the store tells it.

        Args:
            data: it is looked at later: nobody may change it.
        """
        if nbytes < LEAST or nbytes > self._store.limit:
            return
        incoming = self._open.pop(handle, None)
        if incoming is not None and (incoming.failed or incoming.size != offset):
            self._later(incoming.abandon)
            incoming = None
        if incoming is None:
            if offset or not self._store.expected:
                return
            try:
                incoming = self._store.incoming()
            except OSError as error:
                self._store.trouble = f"uploads are not kept: {error}"
                return
        unfinished = sum(each.size for each in self._open.values()) + incoming.size + len(data)
        if unfinished > self._store.limit:  # a disk has room for them beside what is kept, and for no more
            self._later(incoming.abandon)
            return
        incoming.size += len(data)
        self._later(partial(self._take, incoming, data, incoming.size == nbytes))
        if incoming.size < nbytes:
            self._open[handle] = incoming
            if len(self._open) > _MAX_OPEN:
                self._later(self._open.popitem(last=False)[1].abandon)

    def settle(self) -> None:
        """Wait until what was written is kept, or is known to be of no use."""
        self._work.join()

    def _later(self, work: Callable[[], object]) -> None:
        if self._worker is None:
            self._worker = Thread(target=self._run, name="uploads", daemon=True)
            self._worker.start()
        self._work.put(work)

    def _run(self) -> None:
        while True:
            self._work.get()()
            self._work.task_done()

    def _take(self, incoming: Incoming, data: memoryview, last: bool) -> None:
        """In the worker: the next bytes of an upload."""
        if incoming.failed:
            return
        try:
            incoming.write(data)
            if last:
                incoming.finish()
                self._store.trouble = ""
        except OSError as error:
            self._store.trouble = f"uploads are not kept: {error}"
            incoming.abandon()

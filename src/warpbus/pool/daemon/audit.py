"""The audit log of a pool: one JSON object per line, never with a token or a key."""

import json
import logging
import os
import time
from pathlib import Path
from typing import Literal

from warpbus.errors import StorageError

_log = logging.getLogger(__name__)

Happening = Literal[
    "started", "ended", "connection", "refused", "lease", "release", "reclaimed", "lost", "migration", "received",
    "suspended", "resumed", "drain", "undrain", "checkpoint", "swapped out", "swapped in", "swap failed",
]  # fmt: skip
Detail = str | int | float | bool | None


class AuditLog:
    """Appends to a file that only its owner may read, and begins a new one when it is large.

    A line has `time` (seconds since the epoch), `what`, `tenant`, `address` (of who asked), and what else there is to
    say, such as `lease`. Names that could be secrets are not accepted.

    Args:
        path: of the file; older ones are `path.1` (the last) to `path.N`. None writes nothing.
        size: bytes after which a new file is begun.
        kept: how many older files are kept.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path | None, *, size: int = 16 << 20, kept: int = 4) -> None:
        self._path = path
        self._size = size
        self._kept = kept
        self._file = -1
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._open()
            except OSError as error:
                raise StorageError(f"audit log {path}: cannot be written ({error}); give another --audit-log") from None

    def note(
        self, what: Happening, *, tenant: str | None = None, address: str | None = None, **details: Detail
    ) -> None:
        """Write a line. If the disk takes no more, the program's own log says so, once per line."""
        if self._file < 0:
            return
        assert not {"token", "key", "migration_token"} & set(details)
        said = {"time": round(time.time(), 3), "what": what, "tenant": tenant, "address": address, **details}
        line = json.dumps({name: value for name, value in said.items() if value is not None}) + "\n"
        try:
            if os.fstat(self._file).st_size + len(line) > self._size:
                self._rotate()
            os.write(self._file, line.encode("ascii"))
        except OSError as error:
            _log.warning("the audit log takes no more lines: %s", error)

    def close(self) -> None:
        """Write no more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        assert self._path is not None
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _rotate(self) -> None:
        assert self._path is not None
        for number in range(self._kept, 0, -1):
            older = self._path if number == 1 else self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))
        before = self._file
        self._open()
        os.close(before)

    def _numbered(self, number: int) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}.{number}")

"""The checkpoints that a machine offers to its leases: safetensors files in directories that its owner names.

A client chooses among the listed names, so that no path of a client is ever used. The daemon opens the files, for
reading only, and hands the descriptors to the process of the lease, which could not open them itself
(`warpbus.pool.tenant.checkpoints`).
"""

import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warpbus.errors import StorageError, UsageError

SUFFIX = ".safetensors"
MOST_FILES = 512
MOST_CHECKPOINTS = 1000
_SECONDS = 10.0


@dataclass(frozen=True)
class OfferedCheckpoint:
    """A checkpoint that is listed.

    Attributes:
        host: the machine that has it.
        name: of its directory.
        files, nbytes: of its safetensors files.
    """

    host: str
    name: str
    files: int
    nbytes: int


class CheckpointFiles:
    """The checkpoints of a machine. A directory's own safetensors files are one, as are those of its subdirectories.

    Args:
        host: the machine's name.
        directories: of `--checkpoints`. Of two checkpoints with one name, that of the first directory counts.

    Raises:
        UsageError: one is no directory.
    """

    def __init__(self, host: str, directories: Iterable[Path]) -> None:
        self._host = host
        self._directories = [each.resolve() for each in directories]
        for each in self._directories:
            if not each.is_dir():
                raise UsageError(f"--checkpoints {each}: there is no such directory")

    def listed(self) -> list[dict[str, Any]]:
        """The current checkpoints: dicts of `OfferedCheckpoint`, by name."""
        found = sorted(self._found().items())[:MOST_CHECKPOINTS]
        return [asdict(OfferedCheckpoint(self._host, name, len(files), _bytes(files))) for name, files in found]

    @contextmanager
    def opened(self, name: str) -> Iterator[list[tuple[str, int]]]:
        """Names and descriptors of a checkpoint's files, which are closed afterwards.

        Raises:
            UsageError: it is not listed.
            StorageError: a file cannot be read.
        """
        files = self._found().get(name)
        if files is None:
            names = ", ".join(sorted(self._found())[:20]) or "none: start it with --checkpoints DIR"
            raise UsageError(f"{self._host} offers no checkpoint {name!r:.80}: it offers {names}")
        if len(files) > MOST_FILES:
            raise UsageError(f"checkpoint {name} has {len(files)} files: at most {MOST_FILES} can be loaded")
        opened: list[tuple[str, int]] = []
        try:
            for path in files:
                # A pipe in place of the file would block the daemon.
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                opened.append((path.name, descriptor))
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise StorageError(f"checkpoint {name}: {path.name} is no file")
            yield opened
        except OSError as error:
            raise StorageError(f"checkpoint {name}: cannot be read ({error.strerror or error})") from None
        finally:
            for _, descriptor in opened:
                os.close(descriptor)

    def _found(self) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for directory in self._directories:
            try:
                below = sorted(each for each in directory.iterdir() if each.is_dir() and each.name[0] != ".")
            except OSError:  # it has gone
                continue
            for each in (directory, *below):
                files = _safetensors(each)
                if files:
                    found.setdefault(each.name, files)
        return found


def send_files(to: socket.socket, files: Iterable[tuple[str, int]]) -> None:
    """Send a message with name and descriptor for each file, as `OfferedCheckpoints.receive` takes them."""
    to.settimeout(_SECONDS)
    with suppress(OSError):  # the process says itself that they did not come
        for name, descriptor in files:
            socket.send_fds(to, [os.fsencode(name)], [descriptor])


def _safetensors(directory: Path) -> list[Path]:
    try:
        return sorted(each for each in directory.iterdir() if each.name.endswith(SUFFIX) and each.is_file())
    except OSError:
        return []


def _bytes(files: Iterable[Path]) -> int:
    total = 0
    for path in files:
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total

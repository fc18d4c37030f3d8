"""The cache of compiled kernels: its directory, the names of its entries, and a lock per entry."""

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from warpbus.errors import DeviceError

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def cache_directory() -> Path:
    """Where compiled kernels are kept: `$XDG_CACHE_HOME/warpbus/kernels`, by default below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "warpbus" / "kernels"


def source_key(source: Path, root: Path, *deciding: object) -> str:
    """The name of a cache entry: a hash of a source with all files it includes, and of what else decides about it."""
    digest = hashlib.sha256("".join(f"{each}\n" for each in deciding).encode())
    for path in closure(source, root):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()[:40]


def closure(source: Path, root: Path) -> list[Path]:
    """The source and every file that it includes with quotes, directly or not, in a fixed order.

    Raises:
        DeviceError: a file that is included is not below `root`.
    """
    found = {source}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
            included = root / name
            if not included.is_file():
                raise DeviceError(f"{path.relative_to(root)} includes {name}, which is not below {root}")
            if included not in found:
                found.add(included)
                waiting.append(included)
    return sorted(found)


@contextmanager
def alone(entry: Path) -> Iterator[None]:
    """Let one process at a time compile an entry. The lock goes with the process that holds it, however it ends."""
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    locks = entry.parent / "locks"
    locks.mkdir(exist_ok=True)
    with open(locks / lock_name(entry), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lock_name(entry: Path) -> str:
    """The end of an entry's hash: entries that share it are compiled one after another."""
    return entry.stem[-2:]

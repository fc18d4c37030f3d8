"""Files and directories that are there complete or not at all: what reports, states and checkpoints share."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from warpbus.errors import CheckpointError, StorageError


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write a temporary sibling of `path`, then give it the name `path`; missing parents are made.

    Raises:
        StorageError: if it could not be written; what was at `path` before is still there then.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        # torch.save reports a failed write as a RuntimeError, to a file with what the system said as its context.
        if isinstance(error, OSError | RuntimeError):
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            reason = " ".join((getattr(cause, "strerror", None) or str(cause)).split())
            raise StorageError(
                f"{path}: cannot be written ({reason}): free some space or choose another path"
            ) from None
        raise


def write_new(path: Path, content: Path | bytes) -> None:
    if isinstance(content, bytes):
        replace_file(path, lambda partial: partial.write_bytes(content))
    elif content.is_file():
        replace_file(path, lambda partial: shutil.copyfile(content, partial))
    else:
        raise CheckpointError(f"{content}: there is no such file to copy")


def write_json(path: Path, content: object) -> None:
    write_new(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """What a JSON file holds; `None` if it is not there or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def check_target(directory: Path, *, overwrite: bool, configs: Sequence[str] = ("config.json",)) -> None:
    """Refuse a directory that a model, or an adapter, must not take the place of.

    Args:
        directory: where it is to be.
        overwrite: whether it may take the place of another one.
        configs: the files by which one of them is known.

    Raises:
        StorageError: if it exists and is not to be overwritten, or is no model directory.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise StorageError(f"{directory}: is a file: name a directory that does not exist yet")
    if not any(directory.iterdir()):
        return
    if not overwrite:
        raise StorageError(f"{directory}: exists and is not empty: name another directory, or pass --overwrite")
    if not any((directory / config).is_file() for config in configs):
        raise StorageError(
            f"{directory}: holds no model (no {' or '.join(configs)}), so it is not overwritten: name another directory"
        )


def put_in_place(written: Path, directory: Path, aside: Path) -> None:
    """Give a complete directory its name; one that has the name already goes `aside` first and is removed last.

    Raises:
        OSError: if a directory cannot be renamed; what was at `directory` is there again then.
    """
    exists = directory.exists()
    if exists:
        directory.rename(aside)
    try:
        written.rename(directory)
    except BaseException:
        if exists:
            aside.rename(directory)
        raise
    sync(directory.parent)
    if exists:
        shutil.rmtree(aside, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until the disk has a file, or a directory's list of names. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)


def free_space(path: Path) -> int:
    """Bytes that are free on the disk that a path is on, whether or not it is there yet."""
    path = path.resolve()
    return shutil.disk_usage(next(parent for parent in path.parents if parent.exists())).free


def check_space(path: Path, expected: int) -> None:
    """Raises StorageError if the disk that a path is on has not `expected` free bytes."""
    if free_space(path) < expected:
        raise disk_full(path, expected)


def storage_error(path: Path, error: OSError, *, needed: int) -> StorageError:
    """What to raise for a failed write of `needed` bytes to `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(path, needed)
    return StorageError(f"{path}: cannot be written: {error.strerror or error}")


def disk_full(path: Path, needed: int) -> StorageError:
    """The error that says how much is needed and how much is free."""
    return StorageError(
        f"{path}: disk full: needs at least {_size(needed)}, {_size(free_space(path))} free: "
        "make room or name a directory on another disk"
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


class FileLock:
    """What one process at a time can have, until `release` or until it ends, however it ends.

    Args:
        path: of an empty file, which is there as long as the lock is held, or until the next holder releases it.
        what: what is locked, for the message.
        wait: until another process that has it lets it go.

    Raises:
        StorageError: if another process has it and is not waited for, or the file system has no locks.
    """

    def __init__(self, path: Path, what: Path, *, wait: bool = False) -> None:
        self._path = path
        while True:
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise storage_error(what, error, needed=0) from error
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._descriptor)
                if isinstance(error, BlockingIOError):
                    raise StorageError(
                        f"{what}: another process is writing it: wait for it to end, or name another directory"
                    ) from None
                raise StorageError(
                    f"{path}: cannot be locked ({error.strerror or error}): name a directory on another disk"
                ) from error
            if self._is_current():
                return
            os.close(self._descriptor)

    def release(self) -> None:
        """Let others have it; the file goes away."""
        # Removed while it is held: whoever opened it before sees that it is gone, and opens it anew.
        with suppress(OSError):
            self._path.unlink()
        # Not only closed: a forked child may have the same descriptor.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)

    def _is_current(self) -> bool:
        """Whether the file that was locked is still the one of that name."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except FileNotFoundError:
            return False

"""Atomic writing of files and directories, for reports, training states and checkpoints."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from warpbus.errors import CheckpointError, StorageError, UsageError, WarpbusError


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write a temporary file next to `path`, then rename it to `path`; missing parents are created.

    Raises:
        StorageError: it could not be written; an existing file at `path` is kept.
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
        # torch.save reports a failed write as a RuntimeError, with the OSError as its context.
        if isinstance(error, OSError | RuntimeError) and not isinstance(error, WarpbusError):
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
    """The content of a JSON file; None if it does not exist or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def check_parent(path: Path) -> None:
    """Check, before work begins, that a file or directory can be created at `path` later.

    Raises:
        StorageError: one of its parents is a file, or the nearest that exists cannot be written.
    """
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise StorageError(f"{path}: cannot be created below {nearest}, which is a file: choose another path")
    if not os.access(nearest, os.W_OK):
        raise StorageError(f"{path}: no permission to write to {nearest}: choose another output")


def check_files(*paths: Path | None) -> None:
    """Check, before work begins, that the files that are not None can be written later, replacing earlier ones.

    Raises:
        StorageError: one of them is a directory, or see `check_parent`.
    """
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise StorageError(f"{path}: is a directory: give the name of a file")
        check_parent(path)


def check_target(directory: Path, *, overwrite: bool, configs: Sequence[str] = ("config.json",)) -> None:
    """Check that a model or adapter may be written to a directory.

    Args:
        directory: the output.
        overwrite: whether an existing model or adapter may be replaced.
        configs: the files that identify a model or adapter.

    Raises:
        StorageError: it exists and `overwrite` is not set, it is not a model directory, the current directory lies in
            it, or see `check_parent`.
    """
    check_parent(directory)
    if not directory.exists():
        return
    if _holds_current_directory(directory):
        # The output replaces the directory: a shell would go on in the old one, where nothing is.
        raise StorageError(f"{directory}: is the current directory, or one above it: name a new directory")
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


def _holds_current_directory(directory: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(directory.resolve())
    except FileNotFoundError:  # the current directory was removed
        return False


def check_kept(output: Path, *read: Path) -> None:
    """Check that the paths that are read remain when the output replaces what is at its path.

    Raises:
        UsageError: one of them is the output, or lies in it.
    """
    replaced = output.resolve()
    for path in read:
        found = path.resolve()
        if found == replaced or replaced in found.parents:
            raise UsageError(f"{output}: replacing it would delete {path}, which is read: name another output")


def put_in_place(written: Path, directory: Path, aside: Path) -> None:
    """Rename a complete directory to its final name; an existing one is moved `aside` first and removed last.

    Raises:
        OSError: a directory cannot be renamed; the existing one is moved back.
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
    """Flush a file, or the entries of a directory, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)


def free_space(path: Path) -> int:
    """Free bytes on the disk of a path, whether or not the path exists."""
    path = path.resolve()
    return shutil.disk_usage(next(parent for parent in path.parents if parent.exists())).free


def check_space(path: Path, expected: int) -> None:
    """Raise StorageError if the disk of a path has fewer than `expected` free bytes."""
    if free_space(path) < expected:
        raise disk_full(path, expected)


def storage_error(path: Path, error: OSError, *, needed: int) -> StorageError:
    """The error to raise for a failed write of `needed` bytes to `path`."""
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
    """A lock that one process at a time holds, until `release` or until the process ends for any reason.

    Args:
        path: of an empty lock file, which exists while the lock is held.
        what: the locked path, for messages.
        wait: wait until another process releases the lock.

    Raises:
        StorageError: another process holds it and `wait` is not set, or the file system has no locks.
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
        """Release the lock and remove its file."""
        # Removed while the lock is held: a process that has opened it already notices and opens it again.
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

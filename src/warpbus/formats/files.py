"""Single files that are there complete or not at all: reports, pictures, states of a training run."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from warpbus.errors import StorageError


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
        # torch.save reports a failed write as a RuntimeError.
        if isinstance(error, OSError | RuntimeError):
            reason = " ".join((getattr(error, "strerror", None) or str(error)).split())
            raise StorageError(
                f"{path}: cannot be written ({reason}): free some space or choose another path"
            ) from None
        raise

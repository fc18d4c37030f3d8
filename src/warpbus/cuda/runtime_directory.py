"""Where processes of one user on this machine meet: a directory that nobody else can enter."""

import os
import stat
from pathlib import Path

from warpbus.errors import StorageError

_PLACE = Path("/tmp")


def runtime_directory(*names: str, place: Path = _PLACE) -> Path:
    """The directory `names` within this user's own, `/tmp/warpbus-<uid>`, made with mode 700 where it is missing.

    Neither TMPDIR nor XDG_RUNTIME_DIR changes it: a program started by cron has to find what a login shell has started.

    Raises:
        StorageError: it cannot be made, or somebody else made it or may enter it.
    """
    path = place / f"warpbus-{os.getuid()}"
    for each in (path, *(path := path / name for name in names)):
        try:
            each.mkdir(mode=0o700, exist_ok=True)
            found = each.lstat()
        except OSError as error:
            raise StorageError(f"{each}: the directory cannot be made ({error}): remove what is there") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise StorageError(f"{each}: not a directory that only you may enter: remove it, or chmod 700 it")
    return path

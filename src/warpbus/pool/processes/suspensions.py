"""Records the suspended processes and their GPUs, because the driver reports neither.

One file a process, in this user's runtime directory. It is there before a process is taken off its GPU, so that one
whose mover was killed midway can be resumed.
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from warpbus.cuda.runtime_directory import runtime_directory
from warpbus.errors import StorageError
from warpbus.pool.processes.proc import Process

_LARGEST = 65_536  # bytes of a file that are read


@dataclass(frozen=True)
class Suspension:
    """A process that is off its GPU, or on its way.

    Attributes:
        started: clock ticks after the boot: another process may get the number later.
        gpu: UUID of the one that it was on.
        memory: bytes that it had there, where that is known.
        since: seconds since the epoch.
    """

    pid: int
    started: int
    gpu: str
    memory: int | None
    since: float


class Suspensions:
    """The files.

    Raises:
        StorageError: from every method, where they cannot be read or written.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or runtime_directory("suspended")

    def save(self, suspension: Suspension) -> None:
        """Save the record of a process, replacing an earlier one."""
        path = self._path(suspension.pid)
        unfinished = path.with_suffix(".tmp")
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                json.dump(asdict(suspension), file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written ({error})") from error

    def of(self, process: Process) -> Suspension | None:
        """The known facts of a process."""
        found = self._read(self._path(process.pid))
        return found if found is not None and found.started == process.started else None

    def all(self) -> list[Suspension]:
        """Every one, also of processes that have ended."""
        found = [self._read(path) for path in sorted(self._directory.glob("*.json"))]
        return [each for each in found if each is not None]

    def forget(self, pid: int) -> None:
        """It runs again, or has ended."""
        with suppress(FileNotFoundError):
            self._path(pid).unlink()

    def _path(self, pid: int) -> Path:
        return self._directory / f"{pid}.json"

    def _read(self, path: Path) -> Suspension | None:
        try:
            with path.open("rb") as file:
                values = json.loads(file.read(_LARGEST))
            return Suspension(
                pid=int(values["pid"]),
                started=int(values["started"]),
                gpu=str(values["gpu"]),
                memory=None if values["memory"] is None else int(values["memory"]),
                since=float(values["since"]),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{path}: not a file that Warpbus wrote ({error!r}): remove it") from error

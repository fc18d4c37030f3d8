"""The state of a process that is relevant for its GPUs, from Linux: mapped and open files, threads, sockets,
children."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from warpbus.errors import AuthorizationError, StateError

PROC = Path("/proc")

_DEVICE = re.compile(r"/dev/nvidia(\d+)$")
_SOCKET = re.compile(r"socket:\[(\d+)\]$")
_LARGEST = 64 * 2**20  # bytes of a file in /proc that are read


@dataclass(frozen=True)
class Process:
    """A process as /proc shows it.

    Attributes:
        started: clock ticks after the boot; with `pid` it names a process for good.
        name: of its program, at most 15 characters.
        command: its arguments; empty where it may not be read.
        parent: process id.
        environment: that it was started with; empty where it may not be read.
        mapped: bytes mapped of each file.
        threads: their names.
        files: the open files: paths, and `socket:[inode]`.
    """

    pid: int
    started: int
    name: str
    parent: int
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    mapped: Mapping[str, int] = field(default_factory=dict)
    threads: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()

    @property
    def uses_cuda(self) -> bool:
        """CUDA runs in it. A child that was forked off after CUDA had started has the mappings, but not the threads."""
        return any("/libcuda.so" in path for path in self.mapped) and any(
            name.startswith("cuda") for name in self.threads
        )

    @property
    def minors(self) -> frozenset[int]:
        """The numbers of the GPUs whose registers it has mapped: of those that it launches work on."""
        return frozenset(int(found[1]) for path in self.mapped if (found := _DEVICE.search(path)))

    @property
    def sockets(self) -> frozenset[int]:
        """Inodes of its sockets."""
        return frozenset(int(found[1]) for path in self.files if (found := _SOCKET.match(path)))


def read_process(pid: int, proc: Path = PROC) -> Process:
    """The known facts of a process.

    Raises:
        StateError: there is no such process.
        AuthorizationError: it belongs to another user.
    """
    directory = proc / str(pid)
    try:
        name, after = _stat((directory / "stat").read_text(errors="replace"))
        mapped = _mapped(_text(directory / "maps"))
        files = frozenset(_links(directory / "fd"))
    except PermissionError:
        raise AuthorizationError(f"process {pid} belongs to another user: become that user") from None
    except (FileNotFoundError, ProcessLookupError):
        raise StateError(f"process {pid} does not exist: give the process id of a program that runs") from None
    return Process(
        pid=pid,
        started=int(after[19]),
        name=name,
        parent=int(after[1]),
        command=tuple(_strings(directory / "cmdline")),
        environment=dict(each.split("=", 1) for each in _strings(directory / "environ") if "=" in each),
        mapped=mapped,
        threads=frozenset(_threads(directory / "task")),
        files=files,
    )


def process_ids(proc: Path = PROC) -> list[int]:
    """All processes that can be seen."""
    return sorted(int(path.name) for path in proc.iterdir() if path.name.isdigit())


def descendants(pid: int, proc: Path = PROC) -> list[int]:
    """The children of a process and theirs; a child whose parent has ended is nobody's."""
    children: dict[int, list[int]] = {}
    for other in process_ids(proc):
        with suppress(OSError):  # it has ended meanwhile
            _, after = _stat((proc / str(other) / "stat").read_text(errors="replace"))
            children.setdefault(int(after[1]), []).append(other)
    found, next_ones = [], [pid]
    while next_ones:
        next_ones = [child for parent in next_ones for child in children.get(parent, [])]
        found += next_ones
    return found


def unix_sockets(pid: int, proc: Path = PROC) -> dict[int, str]:
    """The names of the Unix sockets in a process's network, by inode; abstract ones begin with @."""
    found = {}
    with suppress(OSError):
        for line in _text(proc / str(pid) / "net" / "unix").splitlines()[1:]:
            fields = line.split(None, 7)
            if len(fields) == 8:
                found[int(fields[6])] = fields[7]
    return found


def _stat(text: str) -> tuple[str, list[str]]:
    """The name and the fields after it; a name may have spaces and parentheses of its own."""
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name, rest.split()


def _mapped(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in text.splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith("/"):
            start, end = (int(address, 16) for address in fields[0].split("-"))
            found[fields[5]] = found.get(fields[5], 0) + end - start
    return found


def _threads(directory: Path) -> Iterator[str]:
    for path in _listed(directory):
        with suppress(OSError):
            yield (path / "comm").read_text(errors="replace").rstrip("\n")


def _links(directory: Path) -> Iterator[str]:
    for path in directory.iterdir():
        with suppress(OSError):
            yield os.readlink(path)


def _listed(directory: Path) -> Iterable[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _strings(directory: Path) -> list[str]:
    try:
        return [each for each in _text(directory).split("\0") if each]
    except OSError:
        return []


def _text(directory: Path) -> str:
    with directory.open("rb") as file:
        return file.read(_LARGEST).decode(errors="replace")

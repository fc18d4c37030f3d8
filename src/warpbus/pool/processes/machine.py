"""The state of this machine for moving processes: its GPUs, its main memory, and their users."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from warpbus.cuda.devices import free_memory
from warpbus.cuda.inventory import InstalledGpu, Inventory
from warpbus.cuda.mps import ControlDaemon
from warpbus.errors import PoolError
from warpbus.pool.processes.proc import Process, descendants, process_ids, read_process, unix_sockets


class Machine(Protocol):
    """The state of the machine that decisions depend on."""

    def gpus(self) -> Sequence[InstalledGpu]:
        """All GPUs in the order of their numbers, with their current free memory."""

    def memory_on(self, gpu: InstalledGpu) -> Mapping[int, int | None]:
        """Bytes that each process on a GPU has of it, by process id; `None` where the driver does not say."""

    def process(self, pid: int) -> Process:
        """A process; StateError or AuthorizationError where there is none, or it is somebody else's."""

    def processes(self) -> Sequence[Process]:
        """All processes that this user may inspect."""

    def tree(self, pid: int) -> Sequence[Process]:
        """The descendants of a process."""

    def sockets(self, pid: int) -> Mapping[int, str]:
        """Names of Unix sockets by inode."""

    def mps_clients(self, pipes: Path) -> frozenset[int]:
        """Process ids of the clients of the MPS daemon with that pipe directory; none where none answers."""

    def main_memory(self) -> int | None:
        """Bytes of main memory that are free; `None` where the system does not say."""


class ThisMachine:
    """The machine that this process runs on.

    Raises:
        DeviceError: it has no NVIDIA driver.
    """

    def __init__(self) -> None:
        self._inventory = Inventory()

    def gpus(self) -> Sequence[InstalledGpu]:
        return self._inventory.gpus()

    def memory_on(self, gpu: InstalledGpu) -> Mapping[int, int | None]:
        return self._inventory.processes(gpu)

    def process(self, pid: int) -> Process:
        return read_process(pid)

    def processes(self) -> Sequence[Process]:
        return _readable(process_ids())

    def tree(self, pid: int) -> Sequence[Process]:
        return _readable(descendants(pid))

    def sockets(self, pid: int) -> Mapping[int, str]:
        return unix_sockets(pid)

    def mps_clients(self, pipes: Path) -> frozenset[int]:
        daemon = ControlDaemon(pipes, pipes)
        return daemon.clients() if daemon.running else frozenset()

    def main_memory(self) -> int | None:
        return free_memory(torch.device("cpu"))


def _readable(pids: Sequence[int]) -> list[Process]:
    found = []
    for pid in pids:
        with suppress(PoolError):  # it has ended meanwhile, or is somebody else's
            found.append(read_process(pid))
    return found

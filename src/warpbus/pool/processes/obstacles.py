"""Obstacles to moving a process off its GPU, detected before the process is changed.

The driver's checkpoint of what it cannot carry fails halfway, or never returns. So this looks first.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from warpbus.cuda import mps
from warpbus.cuda.inventory import InstalledGpu
from warpbus.cuda.memory_size import gigabytes
from warpbus.pool.processes.proc import Process

# Every program that uses CUDA maps some of this device's file for the driver's own semaphores.
_UVM = "/dev/nvidia-uvm"
_UVM_OF_DRIVER = 64 * 2**20  # bytes; an estimate
_NCCL_THREADS = ("pt_nccl", "NCCL")
_NCCL_SOCKET = "@/tmp/nccl-socket"
_NCCL_SHARED = "/dev/shm/nccl-"
_IPC_SHARED = "/dev/shm/cuda.shm."


@dataclass(frozen=True)
class Obstacle:
    """One reason.

    Attributes:
        name: of what cannot be carried.
        what: was found; one line.
        certain: False where it cannot be decided from outside: the driver may carry it all the same.
    """

    name: str
    what: str
    certain: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def obstacles(
    process: Process,
    *,
    tree: Sequence[Process],
    sockets: Mapping[int, str],
    mps_clients: Collection[int],
) -> list[Obstacle]:
    """Why a process cannot be taken off its GPU.

    Args:
        tree: its descendants.
        sockets: names of Unix sockets by inode, see `unix_sockets`.
        mps_clients: process ids of the clients of the MPS daemon that it would have, see `mps_pipes`.
    """
    using = [each for each in tree if each.uses_cuda]
    if not process.uses_cuda:
        which = " and ".join(str(each.pid) for each in using)
        return [Obstacle("no CUDA", f"it uses no GPU{f', but its child {which} does: give that' if which else ''}")]
    found = [
        Obstacle(
            "process tree", f"its child {each.pid} ({each.name}) uses CUDA too, and only one process can be carried"
        )
        for each in using
    ]
    if process.pid in mps_clients:
        found.append(Obstacle("MPS", "it is a client of MPS: start programs that shall move without limits"))
    if sign := _sign_of_nccl(process, sockets):
        found.append(Obstacle("NCCL", f"{sign}: end its process group (destroy_process_group) before"))
    if any("/dev/infiniband/" in path for path in process.files):
        found.append(Obstacle("RDMA", "a network card may write to its GPU memory (/dev/infiniband is open)"))
    if any(path.startswith(_IPC_SHARED) for path in process.mapped):
        found.append(
            Obstacle("CUDA IPC", f"it has {_IPC_SHARED}* mapped, as programs that share GPU memory do", certain=False)
        )
    managed = process.mapped.get(_UVM, 0)
    if managed > _UVM_OF_DRIVER:
        what = f"{gigabytes(managed)} of {_UVM} are mapped, as by cudaMallocManaged"
        found.append(Obstacle("managed memory", what, certain=False))
    return found


def obstacles_to_target(source: InstalledGpu, target: InstalledGpu, needed: int | None) -> list[Obstacle]:
    """Why a process on `source` that takes `needed` bytes, if that is known, cannot go to `target`."""
    found = []
    if (source.name, source.memory) != (target.name, target.memory):
        what = f"GPU {source.index} is {_model(source)}, GPU {target.index} is {_model(target)}: they have to be alike"
        found.append(Obstacle("model", what))
    found += [
        Obstacle("MIG", f"GPU {gpu.index} is cut into instances, which the driver does not carry")
        for gpu in dict.fromkeys((source, target))
        if gpu.mig
    ]
    if needed is not None and needed > target.free:
        found.append(
            Obstacle("memory", f"it takes {gigabytes(needed)}, GPU {target.index} has {gigabytes(target.free)} free")
        )
    return found


def mps_pipes(process: Process) -> Path:
    """The pipe directory of the MPS daemon whose client a process is, if there is such a daemon."""
    return Path(process.environment.get(mps.PIPES) or mps.DEFAULT_PIPES)


def _sign_of_nccl(process: Process, sockets: Mapping[int, str]) -> str | None:
    """Signs that NCCL connects it with others. That its library is mapped is none: torch always maps it."""
    for name in sorted(process.threads):
        if name.startswith(_NCCL_THREADS):
            return f"it has the thread {name!r}"
    for path in sorted(process.mapped):
        if path.startswith(_NCCL_SHARED):
            return f"it has {path} mapped"
    for inode in sorted(process.sockets):
        if sockets.get(inode, "").startswith(_NCCL_SOCKET):
            return f"it has the socket {sockets[inode]}"
    return None


def _model(gpu: InstalledGpu) -> str:
    return f"{gpu.name} with {gigabytes(gpu.memory)}"

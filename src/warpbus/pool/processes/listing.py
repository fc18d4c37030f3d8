"""Lists the processes that use this machine's GPUs, and their limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from warpbus.cuda import mps
from warpbus.cuda.inventory import InstalledGpu
from warpbus.pool.processes.machine import Machine
from warpbus.pool.processes.proc import Process
from warpbus.pool.processes.suspensions import Suspension, Suspensions
from warpbus.pool.processes.virtual import TENANT

_MPS_PROGRAMS = "nvidia-cuda-mps"  # the daemon and its servers, by the 15 characters that Linux keeps of a name


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses GPUs.

    Attributes:
        gpus: their numbers; of a suspended one, the GPU that it was on. Empty where it cannot be seen.
        memory: bytes that it has there, or had before it was suspended; `None` where the driver does not say.
        tenant: for whom `warpbus pool run` started it, or `None`.
        limits: of MPS: its share in percent and its memory, as in its environment; empty for a whole GPU.
        suspended: since when, in UTC, or `None`.
    """

    pid: int
    command: str
    gpus: tuple[int, ...]
    memory: int | None
    tenant: str | None
    limits: Mapping[str, str]
    suspended: datetime | None = None


def gpu_processes(machine: Machine, suspensions: Suspensions) -> list[GpuProcess]:
    """Those of this user (of every user, for root), in order of their process ids. What has ended is forgotten."""
    gpus = machine.gpus()
    memory = {gpu.uuid: machine.memory_on(gpu) for gpu in gpus}
    off = {each.pid: each for each in suspensions.all()}
    found = []
    for process in machine.processes():
        suspension = off.pop(process.pid, None)
        if suspension is not None and suspension.started == process.started:
            found.append(_suspended(process, suspension, gpus))
        elif process.uses_cuda and not process.name.startswith(_MPS_PROGRAMS):
            on = [gpu for gpu in gpus if process.pid in memory[gpu.uuid]]
            taken = [memory[gpu.uuid][process.pid] for gpu in on]
            known = [size for size in taken if size is not None]
            on = on or [gpu for gpu in gpus if gpu.minor in process.minors]
            found.append(_seen(process, on, sum(known) if known else None, None))
    for pid in off:
        suspensions.forget(pid)
    return found


def _suspended(process: Process, suspension: Suspension, gpus: Sequence[InstalledGpu]) -> GpuProcess:
    on = [gpu for gpu in gpus if gpu.uuid == suspension.gpu]
    return _seen(process, on, suspension.memory, datetime.fromtimestamp(suspension.since, UTC))


def _seen(process: Process, on: Sequence[InstalledGpu], memory: int | None, since: datetime | None) -> GpuProcess:
    return GpuProcess(
        pid=process.pid,
        command=" ".join(process.command) or process.name,
        gpus=tuple(gpu.index for gpu in on),
        memory=memory,
        tenant=process.environment.get(TENANT),
        limits={name: process.environment[name] for name in (mps.THREADS, mps.MEMORY) if name in process.environment},
        suspended=since,
    )

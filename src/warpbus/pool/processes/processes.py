"""Moving and suspending processes that know nothing of it, by the driver's checkpoint.

All that can be found out is found out before a process is touched. Whatever fails afterwards, it is brought back to the
GPU that it was on; where that fails too, the error says in which state it is and what can be done.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from warpbus.cuda.checkpoint import State
from warpbus.cuda.inventory import InstalledGpu
from warpbus.cuda.memory_size import gigabytes
from warpbus.errors import DeviceError, PoolError, StateError, UsageError, WarpbusError
from warpbus.pool.processes.machine import Machine
from warpbus.pool.processes.obstacles import Obstacle, mps_pipes, obstacles, obstacles_to_target
from warpbus.pool.processes.proc import Process
from warpbus.pool.processes.suspensions import Suspension, Suspensions

PATIENCE = 10.0
"""Seconds that a process gets to be locked in; it goes on as before if it is not by then."""


class CheckpointDriver(Protocol):
    """The interface of `warpbus.cuda.checkpoint.CudaCheckpoint`."""

    def state(self, pid: int) -> State: ...
    def lock(self, pid: int, seconds: float) -> None: ...
    def checkpoint(self, pid: int) -> None: ...
    def restore(self, pid: int, gpus: Mapping[str, str]) -> None: ...
    def unlock(self, pid: int) -> None: ...


@dataclass(frozen=True)
class ProcessHost:
    """Where the processes are."""

    machine: Machine
    driver: CheckpointDriver
    suspensions: Suspensions


@dataclass(frozen=True)
class Carried:
    """The result of moving a process.

    Attributes:
        source, target: the GPUs that it was and is on; `target` is `None` while it is suspended.
        seconds: of each step, by its name. From the first to the last its calls of CUDA waited.
        freed: bytes that became free on `source`, by the driver's account; 0 if it was suspended before.
    """

    pid: int
    source: InstalledGpu
    target: InstalledGpu | None
    seconds: Mapping[str, float]
    freed: int = 0

    @property
    def pause(self) -> float:
        """Seconds of all steps."""
        return sum(self.seconds.values())


def migrate_process(
    pid: int, to: int, host: ProcessHost, *, source: int | None = None, force: bool = False, patience: float = PATIENCE
) -> Carried:
    """Move a running process to another GPU of this machine. It notices a pause.

    Args:
        to: number of the GPU, as nvidia-smi counts.
        source: that of the GPU it is on, where this cannot be seen from outside.
        force: try it where it cannot be decided from outside whether the process can be carried.
        patience: seconds, see `PATIENCE`.

    Raises:
        UsageError: no such GPU, or it is there already.
        StateError: it cannot be moved; the message names every reason.
        DeviceError: a step failed; the message says in which state the process is.
    """
    target = _gpu(host, to)
    trip = _Trip.of_running(host, pid, source, force, target)
    with trip.returning():
        trip.run("lock", lambda: host.driver.lock(pid, patience))
        trip.checkpoint()
        trip.check_room(target)
        trip.aimed = target
        trip.run("restore", lambda: host.driver.restore(pid, _exchange(host, trip.source, target)))
        trip.run("unlock", lambda: host.driver.unlock(pid))
    return trip.arrived(target)


def suspend_process(
    pid: int, host: ProcessHost, *, source: int | None = None, force: bool = False, patience: float = PATIENCE
) -> Carried:
    """Take a running process off its GPU, into main memory. It stays so until `resume_process`, or ends with it.

    See `migrate_process` for arguments and errors.
    """
    trip = _Trip.of_running(host, pid, source, force, None)
    with trip.returning():
        trip.run("lock", lambda: host.driver.lock(pid, patience))
        trip.checkpoint()
        trip.write_down()
    return Carried(pid, trip.source, None, trip.seconds, trip.freed)


def resume_process(pid: int, host: ProcessHost, *, to: int | None = None, source: int | None = None) -> Carried:
    """Let a suspended process go on, on the GPU that it was on or on another.

    It also frees a process that was left locked or suspended when the one that moved it was killed.

    Args:
        to: number of the GPU; the one that it was on, by default.
        source: that of the GPU it was on, where another program than Warpbus suspended it.

    Raises:
        UsageError: it runs, or it is not known where it was.
        DeviceError: there is no room, which leaves it suspended, or a step failed; the message says in which state
            the process is.
    """
    process = host.machine.process(pid)
    state = host.driver.state(pid)
    if state is State.RUNNING:
        host.suspensions.forget(pid)
        raise UsageError(f"process {pid} is not suspended: it runs")
    if state is State.FAILED:
        raise StateError(f"process {pid}: {_AFTER[state]}")
    known = host.suspensions.of(process)
    if state is State.LOCKED:
        gpu = _where(host, process)
        trip = _Trip(host, process, gpu, None)
        with trip.returning():
            trip.run("unlock", lambda: host.driver.unlock(pid))
        return trip.arrived(gpu)
    old = _gpu(host, source) if source is not None else _gpu_of(host, known)
    if old is None:
        raise UsageError(f"process {pid}: Warpbus did not suspend it: give the GPU that it was on with --from")
    target = old if to is None else _gpu(host, to)
    needed = known.memory if known else None
    found = obstacles_to_target(old, target, needed)
    if found:
        raise StateError(f"process {pid} stays suspended: {_listed(found)}")
    trip = _Trip(host, process, old, needed, resumes=True)
    trip.aimed = target
    with trip.returning():
        pairs = {} if target.uuid == old.uuid else _exchange(host, old, target)
        trip.run("restore", lambda: host.driver.restore(pid, pairs))
        trip.run("unlock", lambda: host.driver.unlock(pid))
    return trip.arrived(target)


_AFTER = {
    State.RUNNING: "it goes on, on GPU {gpu}",
    State.LOCKED: "its calls of CUDA wait, on GPU {gpu}: try warpbus pool resume {pid}, or end it",
    State.CHECKPOINTED: (
        "it is suspended in main memory: free GPU {gpu} and give warpbus pool resume {pid}, which may fail for good "
        "after this, or end it"
    ),
    State.FAILED: "the driver has lost its GPU memory, so it cannot go on: end it",
}


class _Trip:
    """One process on its way off a GPU and back.

    Attributes:
        source: the GPU that it was on; `aimed`: that which it is on, or its next restore is for.
        seconds: that each step took.
        freed: bytes that the checkpoint gave back.
        resumes: it was suspended before, and stays so if it cannot be restored.
    """

    def __init__(
        self, host: ProcessHost, process: Process, source: InstalledGpu, needed: int | None, *, resumes: bool = False
    ) -> None:
        self.source = source
        self.aimed = source
        self.seconds: dict[str, float] = {}
        self.freed = 0
        self._resumes = resumes
        self._host = host
        self._process = process
        self._pid = process.pid
        self._needed = needed

    @classmethod
    def of_running(
        cls, host: ProcessHost, pid: int, source: int | None, force: bool, target: InstalledGpu | None
    ) -> "_Trip":
        """Look for all that speaks against it, and write down where the process is."""
        process = host.machine.process(pid)
        found = obstacles(
            process,
            tree=host.machine.tree(pid),
            sockets=host.machine.sockets(pid),
            mps_clients=host.machine.mps_clients(mps_pipes(process)),
        )
        _refuse(pid, found, force)
        state = host.driver.state(pid)
        if state is not State.RUNNING:
            advice = "end it" if state is State.FAILED else f"give warpbus pool resume {pid}"
            raise StateError(f"process {pid} is {state.name.lower()}, not running: {advice}")
        gpu = _gpu(host, source) if source is not None else _where(host, process)
        if target is not None and gpu.uuid == target.uuid:
            raise UsageError(f"process {pid} is on GPU {gpu.index} already: choose another")
        needed = host.machine.memory_on(gpu).get(pid)
        found = obstacles_to_target(gpu, target or gpu, needed if target else None)
        room = host.machine.main_memory()
        if needed is not None and room is not None and needed > room:
            what = f"its {gigabytes(needed)} have to go through main memory, where {gigabytes(room)} are free"
            found.append(Obstacle("main memory", what))
        _refuse(pid, found, force)
        trip = cls(host, process, gpu, needed)
        trip.write_down()
        return trip

    def write_down(self) -> None:
        """Leave what somebody needs to know to resume the process."""
        memory = max(self._needed or 0, self.freed) or None
        self._host.suspensions.save(Suspension(self._pid, self._process.started, self.source.uuid, memory, time.time()))

    def run(self, name: str, step: Callable[[], None]) -> None:
        """Do a step and time it."""
        before = time.perf_counter()
        try:
            step()
        except (DeviceError, PoolError) as error:
            raise DeviceError(f"{name} failed ({error})") from error
        self.seconds[name] = time.perf_counter() - before

    def checkpoint(self) -> None:
        """Take it off its GPU, and see how much becomes free there: the driver does not always say what it had."""
        free = _gpu(self._host, self.source.index).free
        self.run("checkpoint", lambda: self._host.driver.checkpoint(self._pid))
        self.freed = max(0, _gpu(self._host, self.source.index).free - free)

    def check_room(self, target: InstalledGpu) -> None:
        """See that the target has the memory: after a restore without it the driver may not try another."""
        needed = max(self._needed or 0, self.freed)
        free = _gpu(self._host, target.index).free
        if needed > free:
            raise DeviceError(f"it takes {gigabytes(needed)}, GPU {target.index} has {gigabytes(free)} free")

    def arrived(self, target: InstalledGpu) -> Carried:
        """It runs."""
        self._host.suspensions.forget(self._pid)
        return Carried(self._pid, self.source, target, self.seconds, self.freed)

    @contextmanager
    def returning(self) -> Iterator[None]:
        """If the block fails or is interrupted, let the process go on where it was; the error says how that went."""
        try:
            yield
        except WarpbusError as error:
            raise DeviceError(f"process {self._pid}: {error}: {self._brought_back()}") from error
        except BaseException:
            self._brought_back()
            raise

    def _brought_back(self) -> str:
        driver, gpu = self._host.driver, self.aimed
        trouble = ""
        try:
            state = driver.state(self._pid)
            if state is State.CHECKPOINTED and self._resumes:
                return f"it stays suspended: warpbus pool resume {self._pid} can be tried again, but may fail for good"
            if state is State.CHECKPOINTED:
                gpu = self.source
                self.check_room(gpu)
                driver.restore(self._pid, {})
            if state in (State.CHECKPOINTED, State.LOCKED):
                driver.unlock(self._pid)
        except (DeviceError, PoolError) as error:
            trouble = f"bringing it back failed too: {error}: "
        if self._ended():
            self._host.suspensions.forget(self._pid)
            return "it has ended meanwhile"
        try:
            state = driver.state(self._pid)
        except (DeviceError, PoolError) as error:
            return f"{trouble}its state is not known ({error}): try warpbus pool resume {self._pid}, or end it"
        if state is State.RUNNING:
            self._host.suspensions.forget(self._pid)
        return trouble + _AFTER[state].format(gpu=gpu.index, pid=self._pid)

    def _ended(self) -> bool:
        try:
            return self._host.machine.process(self._pid).started != self._process.started
        except PoolError:
            return True


def _gpu(host: ProcessHost, index: int) -> InstalledGpu:
    gpus = host.machine.gpus()
    if not 0 <= index < len(gpus):
        raise UsageError(f"GPU {index}: this machine has {len(gpus)} GPU(s), numbered from 0: choose one of them")
    return gpus[index]


def _gpu_of(host: ProcessHost, suspension: Suspension | None) -> InstalledGpu | None:
    uuid = suspension and suspension.gpu
    return next((gpu for gpu in host.machine.gpus() if gpu.uuid == uuid), None)


def _where(host: ProcessHost, process: Process) -> InstalledGpu:
    """The one GPU that a process is on: whose registers it has mapped, or which the driver names."""
    gpus = host.machine.gpus()
    mapped = [gpu for gpu in gpus if gpu.minor in process.minors]
    if len(mapped) == 1:
        return mapped[0]
    named = [gpu for gpu in gpus if process.pid in host.machine.memory_on(gpu)]
    if len(named) == 1:
        return named[0]
    several = named or mapped
    if several:
        numbers = ", ".join(str(gpu.index) for gpu in several)
        raise StateError(
            f"process {process.pid} uses GPUs {numbers}: one that uses a single GPU can be carried; if it is, give it "
            "with --from"
        )
    raise StateError(f"process {process.pid}: it cannot be seen which GPU it is on: give it with --from")


def _exchange(host: ProcessHost, old: InstalledGpu, new: InstalledGpu) -> dict[str, str]:
    """The map of a move: every GPU of the machine, of which the two are exchanged."""
    swapped = {old.uuid: new.uuid, new.uuid: old.uuid}
    return {gpu.uuid: swapped.get(gpu.uuid, gpu.uuid) for gpu in host.machine.gpus()}


def _refuse(pid: int, found: list[Obstacle], force: bool) -> None:
    against = [each for each in found if each.certain or not force]
    if against:
        advice = "" if any(each.certain for each in against) else " (this is not certain: --force tries it)"
        raise StateError(f"process {pid} stays as it is, it cannot be carried: {_listed(against)}{advice}")


def _listed(found: list[Obstacle]) -> str:
    return "; ".join(str(each) for each in found)

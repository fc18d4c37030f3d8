"""A machine with GPUs and one process, whose driver can fail at any step in any way."""

from dataclasses import replace

from warpbus.cuda.checkpoint import State
from warpbus.cuda.inventory import InstalledGpu
from warpbus.errors import DeviceError, StateError
from warpbus.pool.processes.proc import Process

GB = 10**9
PID = 4242


def gpu(index, *, free=80 * GB, memory=80 * GB, name="H200", mig=False):
    return InstalledGpu(index, f"GPU-{index}", name, index, memory, free, mig)


def cuda_process(pid=PID, **changes):
    """A process that computes on GPU 0."""
    usual = Process(
        pid=pid,
        started=77,
        name="python",
        parent=1,
        command=("python", "train.py"),
        mapped={"/usr/lib/libcuda.so.580.95": 2**25, "/dev/nvidia0": 2**16, "/dev/nvidia-uvm": 2**22},
        threads=frozenset({"python", "cuda-EvtHandlr", "cuda00001400006"}),
    )
    return replace(usual, **changes)


class FakeMachine:
    """`taken` is what the driver says that the process has on GPU 0; `has` is what it takes in truth."""

    def __init__(self, *gpus, taken=3 * GB, has=3 * GB):
        self._gpus = {each.uuid: each for each in gpus or (gpu(0, free=77 * GB), gpu(1), gpu(2))}
        self.taken, self.has = taken, has
        self.living = {PID: cuda_process()}
        self.children = []
        self.sockets_by_inode = {}
        self.clients = frozenset()
        self.main = 500 * GB

    def gpus(self):
        return list(self._gpus.values())

    def memory_on(self, gpu):
        return {PID: self.taken} if gpu.index == 0 and self.taken is not None and PID in self.living else {}

    def process(self, pid):
        if pid not in self.living:
            raise StateError(f"process {pid} does not exist: give the process id of a program that runs")
        return self.living[pid]

    def processes(self):
        return [*self.living.values(), *self.children]

    def tree(self, pid):
        return self.children

    def sockets(self, pid):
        return self.sockets_by_inode

    def mps_clients(self, pipes):
        return self.clients

    def main_memory(self):
        return self.main

    def change(self, uuid, size):
        """Free `size` bytes of a GPU."""
        self._gpus[uuid] = replace(self._gpus[uuid], free=self._gpus[uuid].free + size)


class FakeDriver:
    """The driver, which holds the truth of the process: its state and the GPU it is on.

    Args:
        failures: of steps, by their number among all: "before" (nothing was done), "after" (it was, but an error
            comes), "broken" (the memory is lost), "dies" (the process ends), "stopped" (Ctrl-C, once it is done).
    """

    def __init__(self, machine, failures=()):
        self.machine = machine
        self.failures = dict(failures)
        self.states = State.RUNNING
        self.on = "GPU-0"
        self.calls = []

    def state(self, pid):
        self.machine.process(pid)
        return self.states

    def lock(self, pid, seconds):
        self._step("lock", pid, State.RUNNING, State.LOCKED)

    def checkpoint(self, pid):
        self._step("checkpoint", pid, State.LOCKED, State.CHECKPOINTED)

    def restore(self, pid, gpus):
        if gpus:
            assert set(gpus) == set(gpus.values()) == {each.uuid for each in self.machine.gpus()}
        self._step("restore", pid, State.CHECKPOINTED, State.LOCKED, gpus)

    def unlock(self, pid):
        self._step("unlock", pid, State.LOCKED, State.RUNNING)

    def _step(self, name, pid, wanted, then, gpus=None):
        self.machine.process(pid)
        failure = self.failures.pop(len(self.calls), None)
        self.calls.append(name)
        if failure == "before":
            raise DeviceError("CUDA_ERROR_NOT_READY (600), device not ready")
        if failure == "broken":
            self.states = State.FAILED
            raise DeviceError("CUDA_ERROR_UNKNOWN (999), unknown error")
        if failure == "dies":
            del self.machine.living[pid]
            raise DeviceError("CUDA_ERROR_INVALID_VALUE (1), invalid argument")
        if self.states is not wanted:
            raise DeviceError("CUDA_ERROR_ILLEGAL_STATE (401), the operation cannot be performed in the present state")
        self.states = then
        if name == "checkpoint":
            self.machine.change(self.on, self.machine.has)
        if name == "restore":
            self.on = (gpus or {}).get(self.on, self.on)
            self.machine.change(self.on, -self.machine.has)
        if failure == "after":
            raise DeviceError("CUDA_ERROR_UNKNOWN (999), unknown error")
        if failure == "stopped":
            raise KeyboardInterrupt

"""Starts the Python interpreters of a job's worker processes.

They are started directly, not by `multiprocessing`, which would run the main module of the parent process again in each
of them: a user's script would need an `if __name__ == "__main__"` guard, and the command line would be imported.

Importing torch takes seconds, in the parent and in each worker. A caller that knows that it will need workers calls
`start_early` before it imports torch itself, so that all import it at the same time. This module does not import torch.
"""

import atexit
import ctypes
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import NoReturn

from warpbus.dist.worker_pipe import WorkerPipe
from warpbus.errors import DeviceError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_DEVICE_FILES = Path("/dev")


@dataclass(frozen=True)
class WorkerSpec:
    """The first message to a worker. The job's function, its arguments and messages to the job follow.

    Attributes:
        rank: of the worker, from 0.
        world: number of workers.
        device: of the worker, such as "cuda:0" or "cpu".
        meeting: see `join`.
        key: the parent's `multiprocessing` authentication key, needed to share tensors among the arguments.
    """

    rank: int
    world: int
    device: str
    meeting: str
    key: bytes


@dataclass(frozen=True)
class Interpreter:
    """A worker as the parent process sees it.

    Attributes:
        spec: the spec that was sent to it.
        process: its process.
        connection: the pipe to it.
    """

    spec: WorkerSpec
    process: subprocess.Popen[bytes]
    connection: Connection


@dataclass(frozen=True)
class ProcessPool:
    """The workers of a job.

    Attributes:
        members: in rank order.
        directory: holds the rendezvous file; to be removed when the workers have ended.
    """

    members: list[Interpreter]
    directory: Path

    @classmethod
    def start(cls, devices: Sequence[str], module: str, environment: Mapping[str, str]) -> "ProcessPool":
        """Start one worker per device; arguments as `start_early`.

        Raises:
            DeviceError: the system cannot create a temporary directory, a pipe or a process.
        """
        try:
            pool = cls([], Path(tempfile.mkdtemp(prefix="warpbus-")))  # of this user alone
        except OSError as error:
            raise _cannot_start(error) from error
        try:
            key = bytes(multiprocessing.current_process().authkey)
            for rank, device in enumerate(devices):
                spec = WorkerSpec(rank, len(devices), device, f"file://{pool.directory}/meeting", key)
                pool.members.append(_start(spec, module, environment))
        except OSError as error:
            pool.end()
            raise _cannot_start(error) from error
        except BaseException:
            pool.end()
            raise
        return pool

    def end(self) -> None:
        """Kill all workers."""
        for each in self.members:
            each.process.kill()
        for each in self.members:
            each.process.wait()
            each.connection.close()
        shutil.rmtree(self.directory, ignore_errors=True)


_early: list[ProcessPool] = []


def start_early(
    devices: Sequence[str],
    module: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    *,
    apart: bool = False,
) -> None:
    """Start the workers of a later job on these devices; `process_pool` returns them.

    They end with this process at the latest. A single device needs no worker unless `apart` is set, as of `Processes`;
    if it is a GPU, it is initialized.

    Args:
        devices: in rank order.
        module: imported by the workers before they receive the job, see `worker.main`.
        environment: environment variables of the workers; variables of this process take precedence.
    """
    if len(devices) == 1 and not apart:
        open_device(devices[0])
        return
    atexit.register(end_early)
    _early.append(ProcessPool.start(devices, module, environment))


def process_pool(devices: Sequence[str], module: str, environment: Mapping[str, str]) -> ProcessPool:
    """The workers of a job on these devices: those that `start_early` started for the same devices, or new ones.

    Args:
        devices: in rank order.
        module: imported by new workers before they receive the job.
        environment: of new workers.
    """
    if [[each.spec.device for each in pool.members] for pool in _early] == [list(devices)]:
        return _early.pop()
    end_early()
    return ProcessPool.start(devices, module, environment)


def count_gpus() -> int:
    """The number of GPUs that this process can use (see CUDA_VISIBLE_DEVICES).

    Counts device files if CUDA_VISIBLE_DEVICES has plain numbers or is not set: initializing the driver takes up to a
    second on machines with many GPUs.
    """
    there = len([file for file in _DEVICE_FILES.glob("nvidia*") if file.name[6:].isdecimal()])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(there)))).split(",")
    if there and len(set(visible)) == len(visible) and all(each.isdecimal() and int(each) < there for each in visible):
        return len(visible)
    count = ctypes.c_int(0)
    with suppress(OSError):  # there is no driver
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def open_device(device: str) -> None:
    """Create a GPU's context in a background thread: the driver takes long and does not hold the interpreter lock."""
    kind, _, index = device.partition(":")
    if kind == "cuda":
        threading.Thread(target=_open, args=(int(index),), name="open", daemon=True).start()


def load(module: str) -> ModuleType:
    """Import a module that is known by its name, within `permanent_objects`."""
    with permanent_objects():
        return importlib.import_module(module)


@contextmanager
def permanent_objects() -> Iterator[None]:
    """For the imports of modules that load torch: garbage collection is off meanwhile, and later skips all objects that
    exist after the imports.

    Collecting would find nothing among the objects of torch. It would take a tenth of the import time, and at the end
    of the process longer than everything else. If nothing was imported, later collections skip nothing.
    """
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        gc.enable()


def main(descriptor: int, parent: int, device: str, module: str) -> NoReturn:
    """The main function of a worker's interpreter, see `worker.main`.

    Args:
        descriptor: file descriptor of the pipe to the parent.
        parent: process id of the parent; this process ends when the parent does.
        device: of this process.
        module: see `start_early`.
    """
    os.set_inheritable(descriptor, False)
    end_with(parent)
    open_device(device)
    pipe = WorkerPipe(Connection(descriptor), on_cpu=device == "cpu")
    pipe.pulse.start()  # before torch is imported, which may take long
    load("warpbus.dist.worker").main(pipe, module)
    raise AssertionError("a worker ends by itself")


def _start(spec: WorkerSpec, module: str, environment: Mapping[str, str]) -> Interpreter:
    mine, other = Pipe()
    threads = max(1, (os.cpu_count() or 1) // spec.world)
    own = {"OMP_NUM_THREADS": str(threads), **environment, **os.environ}
    own.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo listens on no other interface
    program = (
        f"import sys; sys.path = {sys.path!r}; from warpbus.dist.interpreters import main; "
        f"main({other.fileno()}, {os.getpid()}, {spec.device!r}, {module!r})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        pass_fds=[other.fileno()],
        env=own,
        process_group=0,
    )
    other.close()
    with suppress(ConnectionError):  # it has died: reading its messages will report that
        mine.send(spec)
    return Interpreter(spec, process, mine)


def _cannot_start(error: OSError) -> DeviceError:
    return DeviceError(
        f"a process cannot be started ({error}): check that the temporary directory (TMPDIR) exists and has free "
        "space, and that memory, processes and open files are below their limits"
    )


def end_early() -> None:
    """End the workers of `start_early` that no job has used."""
    while _early:
        _early.pop().end()


def _open(index: int) -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with suppress(OSError):  # there is no driver; torch reports that later
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            # The primary context, which the CUDA runtime and so torch use in this process.
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def end_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)

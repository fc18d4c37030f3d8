"""The interpreters that become a job's processes.

They are plain ones and not started by `multiprocessing`, which would run the main module of the starting process once
more in each: a user's script would need a guard against that, and the command line would be loaded.

Loading torch takes each of them seconds, and the starting process too. Who knows that it is going to need them calls
`start_early` before it loads torch itself, so that all load it at the same time, and the processes find each other
while the starting one loads the rest. Nothing in this file loads torch by itself.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
    """Where a process belongs. It gets this first, then the job's function, then the arguments when they are there, and
    then what the job is told.

    Attributes:
        rank: its number, of `world`.
        world: how many processes the job has.
        device: its own, such as "cuda:0" or "cpu".
        meeting: as in `join`.
        key: the starting process's for sharing memory, which tensors among the arguments are passed in.
    """

    rank: int
    world: int
    device: str
    meeting: str
    key: bytes


@dataclass(frozen=True)
class Interpreter:
    """One of them as the starting process sees it.

    Attributes:
        place: of its process, which has been sent.
        process, connection: itself, and the pipe to it.
    """

    place: WorkerSpec
    process: subprocess.Popen[bytes]
    connection: Connection


@dataclass(frozen=True)
class ProcessPool:
    """All of a job.

    Attributes:
        members: in rank order.
        directory: where they meet; to be removed when they have ended.
    """

    members: list[Interpreter]
    directory: Path

    @classmethod
    def start(cls, devices: Sequence[str], module: str, environment: Mapping[str, str]) -> "ProcessPool":
        """Start one for each device; arguments as of `start_early`.

        Raises:
            DeviceError: the system refuses a folder for temporary files, a pipe or a process.
        """
        try:
            crew = cls([], Path(tempfile.mkdtemp(prefix="warpbus-")))  # of this user alone
        except OSError as error:
            raise _cannot_start(error) from error
        try:
            key = bytes(multiprocessing.current_process().authkey)
            for rank, device in enumerate(devices):
                place = WorkerSpec(rank, len(devices), device, f"file://{crew.directory}/meeting", key)
                crew.members.append(_start(place, module, environment))
        except OSError as error:
            crew.end()
            raise _cannot_start(error) from error
        except BaseException:
            crew.end()
            raise
        return crew

    def end(self) -> None:
        """End all at once, whatever they do."""
        for each in self.members:
            each.process.kill()
        for each in self.members:
            each.process.wait()
            each.connection.close()
        shutil.rmtree(self.directory, ignore_errors=True)


_early: list[ProcessPool] = []


def start_early(devices: Sequence[str], module: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Start the interpreters of a job on these devices, which `process_pool` hands out.

    They end with this process at the latest. A single device needs none; if it is a GPU, it is opened.

    Args:
        devices: in rank order.
        module: what they load before they are told of the job, see `worker.main`.
        environment: variables that they get where this process has none of that name.
    """
    if len(devices) == 1:
        open_device(devices[0])
        return
    atexit.register(_end_early)
    _early.append(ProcessPool.start(devices, module, environment))


def process_pool(devices: Sequence[str], module: str, environment: Mapping[str, str]) -> ProcessPool:
    """The interpreters of a job on these devices: those that were started early for just these, or new ones.

    Args:
        devices: in rank order.
        module: what new ones load before they are told of the job.
        environment: of new ones.
    """
    if [[each.place.device for each in crew.members] for crew in _early] == [list(devices)]:
        return _early.pop()
    _end_early()
    return ProcessPool.start(devices, module, environment)


def count_gpus() -> int:
    """How many GPUs the driver shows this process (CUDA_VISIBLE_DEVICES says which).

    By their files, where numbers say which of them: the driver takes longer to say it the more there are, up to a second.
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
    """Have a GPU opened in the background: the driver takes long to make a context, and needs no Python for it."""
    kind, _, index = device.partition(":")
    if kind == "cuda":
        threading.Thread(target=_open, args=(int(index),), name="open", daemon=True).start()


def load(module: str) -> ModuleType:
    """Import a module that loads torch.

    What torch makes on the way stays. To look for garbage among it takes a tenth of the time to load it, and longer
    than all else at the end of the process: it is not done.
    """
    if module in sys.modules:
        return sys.modules[module]
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def main(descriptor: int, parent: int, device: str, module: str) -> NoReturn:
    """What an interpreter does, see `worker.main`.

    Args:
        descriptor: of the pipe to the process `parent`.
        parent: with it this process ends, however it ends.
        device: of this process.
        module: see `start_early`.
    """
    os.set_inheritable(descriptor, False)
    end_with(parent)
    open_device(device)
    line = WorkerPipe(Connection(descriptor), on_cpu=device == "cpu")
    line.pulse.start()  # before torch is loaded, which may take long
    load("warpbus.dist.worker").main(line, module)
    raise AssertionError("a worker ends by itself")


def _start(place: WorkerSpec, module: str, environment: Mapping[str, str]) -> Interpreter:
    mine, other = Pipe()
    threads = max(1, (os.cpu_count() or 1) // place.world)
    own = {"OMP_NUM_THREADS": str(threads), **environment, **os.environ}
    own.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo listens on no other interface
    program = (
        f"import sys; sys.path = {sys.path!r}; from warpbus.dist.interpreters import main; "
        f"main({other.fileno()}, {os.getpid()}, {place.device!r}, {module!r})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        pass_fds=[other.fileno()],
        env=own,
        process_group=0,
    )
    other.close()
    with suppress(ConnectionError):  # it has died: who reads what it says finds out
        mine.send(place)
    return Interpreter(place, process, mine)


def _cannot_start(error: OSError) -> DeviceError:
    return DeviceError(
        f"a process cannot be started ({error}): see that the folder for temporary files is there (TMPDIR) and has room, "
        "and that memory, processes and open files are not used up"
    )


def _end_early() -> None:
    while _early:
        _early.pop().end()


def _open(index: int) -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with suppress(OSError):  # there is no driver, which torch finds out too
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            # The one that CUDA's runtime, and so torch, uses in this process.
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, also by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)

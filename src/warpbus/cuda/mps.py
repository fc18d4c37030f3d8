"""NVIDIA's Multi-Process Service (MPS): processes that compute on one GPU at the same time, each within limits.

A control daemon of this user and of one GPU starts a server when the first client comes. A client's share of the
multiprocessors and the most memory that it gets are in its environment when it makes its first context; no program has
to be changed. docs/gpu_sharing.md says what MPS isolates and what not. Source: NVIDIA's "Multi-Process Service" guide.
"""

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from warpbus.cuda.inventory import InstalledGpu, Inventory
from warpbus.cuda.runtime_directory import runtime_directory
from warpbus.errors import DeviceError, UsageError

BINARY = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
"""Where a daemon that was started without a pipe directory has its pipes."""

_LOGS = "CUDA_MPS_LOG_DIRECTORY"
_SECONDS = 30.0  # a daemon that has not answered by then will not
_MIB = 2**20


def available() -> str | None:
    """Why there can be no MPS here: one line, or `None` if nothing speaks against it."""
    if shutil.which(BINARY) is None:
        return f"{BINARY} is not installed (it comes with NVIDIA's driver, in Debian as nvidia-cuda-mps)"
    try:
        return None if Inventory().gpus() else "this machine has no NVIDIA GPU"
    except DeviceError as error:
        return str(error)


def limits(memory: int, share: float) -> dict[str, str]:
    """The environment of a client that gets at most `memory` bytes and a `share` of the multiprocessors.

    The driver rounds the share to what the GPU can divide, and the memory is rounded down to MiB.

    Raises:
        UsageError: not a MiB of memory.
    """
    if memory < _MIB:
        raise UsageError(f"memory is {memory} bytes: a client of MPS needs 1 MiB at least")
    # A daemon has one GPU, which is its clients' device 0.
    return {THREADS: f"{share * 100:g}", MEMORY: f"0={memory // _MIB}M"}


class ControlDaemon:
    """The control daemon of a GPU, which may run or not.

    Args:
        directory: with its pipes and its logs; only this user may enter it.
        uuid: of the GPU; `None` for a daemon that others started with any GPUs.
    """

    def __init__(self, pipes: Path, logs: Path, uuid: str | None = None) -> None:
        self.pipes = pipes
        self.logs = logs
        self.uuid = uuid

    @classmethod
    def of_gpu(cls, gpu: InstalledGpu) -> "ControlDaemon":
        """The MPS daemon that Warpbus starts for a GPU.

        Raises:
            StorageError: its directory cannot be made.
        """
        return cls(runtime_directory("mps", gpu.uuid, "pipes"), runtime_directory("mps", gpu.uuid, "logs"), gpu.uuid)

    def environment(self) -> dict[str, str]:
        """The environment that makes a program a client, besides `limits`."""
        # By its UUID a GPU has the same name for the daemon, which renumbers GPUs, and for the client.
        return {PIPES: str(self.pipes)} | ({"CUDA_VISIBLE_DEVICES": self.uuid} if self.uuid else {})

    def ask(self, question: str) -> str:
        """The daemon's answer to one of its commands, such as get_server_list.

        Raises:
            DeviceError: it does not run or does not answer.
        """
        return self._run([BINARY], question + "\n")

    @property
    def running(self) -> bool:
        """Whether it answers."""
        if not (self.pipes / "control").exists():
            return False
        try:
            self.ask("get_server_list")
        except DeviceError:
            return False
        return True

    def clients(self) -> frozenset[int]:
        """Process ids of the programs that are connected now.

        Raises:
            DeviceError: the daemon does not answer.
        """
        servers = _numbers(self.ask("get_server_list"))
        return frozenset(pid for server in servers for pid in _numbers(self.ask(f"get_client_list {server}")))

    def start(self) -> None:
        """Start it.

        Raises:
            DeviceError: it does not start; the message has what it said.
        """
        self._run([BINARY, "-d"], "")
        self._wait_until(running=True)

    def stop(self) -> None:
        """End it and its server. It waits for clients that are connected, for some seconds.

        Raises:
            DeviceError: it does not answer, or has clients still.
        """
        self.ask("quit")
        self._wait_until(running=False)

    @contextmanager
    def client(self) -> Iterator[int]:
        """Keep the daemon running, started if need be, while the block runs or any process has the file that it yields.

        The last to leave stops it. Give the file's descriptor to the client, which so keeps the daemon when the
        process that started it is killed.

        Raises:
            DeviceError: it does not start.
        """
        with (self.logs.parent / "users").open("a") as users:
            with self._alone():
                if not self.running:
                    self.start()
                fcntl.flock(users, fcntl.LOCK_SH)
            try:
                yield users.fileno()
            finally:
                with self._alone():
                    users.close()
                    self._stop_if_unused()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else starts or stops the daemon meanwhile."""
        with (self.logs.parent / "starting").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _stop_if_unused(self) -> None:
        with (self.logs.parent / "users").open("a") as users:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            with suppress(DeviceError):  # it may have ended by itself; the program's result is not to be lost for it
                self.stop()

    def _run(self, command: list[str], text: str) -> str:
        environment = {**os.environ, PIPES: str(self.pipes), _LOGS: str(self.logs)}
        if self.uuid:
            environment["CUDA_VISIBLE_DEVICES"] = self.uuid
        # Files, not pipes: the daemon has them too, and the end of a pipe would come with its own.
        with TemporaryFile("w+") as answer, TemporaryFile("w+") as trouble:
            try:
                code = subprocess.run(
                    command,
                    input=text,
                    stdout=answer,
                    stderr=trouble,
                    text=True,
                    env=environment,
                    timeout=_SECONDS,
                    check=False,
                ).returncode
            except FileNotFoundError:
                raise DeviceError(f"{BINARY} is not installed: it comes with NVIDIA's driver") from None
            except subprocess.TimeoutExpired:
                raise DeviceError(f"MPS in {self.pipes}: no answer within {_SECONDS:g} s: see {self.logs}") from None
            for file in (answer, trouble):
                file.seek(0)
            found = answer.read()
            if code:
                said = " ".join((trouble.read() + found).split()) or f"exit code {code}"
                raise DeviceError(f"MPS in {self.pipes}: {said}: see {self.logs}")
        return found

    def _wait_until(self, running: bool) -> None:
        deadline = time.monotonic() + _SECONDS
        while self.running != running:
            if time.monotonic() > deadline:
                what = "answer" if running else "end"
                raise DeviceError(f"MPS in {self.pipes}: does not {what} within {_SECONDS:g} s: see {self.logs}")
            time.sleep(0.02)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdigit()]

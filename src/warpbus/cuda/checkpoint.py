"""The driver's checkpoint of another process: its GPU memory goes to main memory, its GPUs are free, and back.

A process goes from RUNNING by lock to LOCKED, by checkpoint to CHECKPOINTED, by restore to LOCKED and by unlock to
RUNNING. While it is not RUNNING its calls of CUDA wait; the rest of it runs. What cannot be carried is listed in
docs/gpu_migration.md.

Source: the CUDA driver API reference, "CUDA checkpointing". GPUs can be changed with drivers of version 580 and later.
"""

import ctypes
import threading
import uuid
from collections.abc import Mapping
from enum import IntEnum

from warpbus.cuda import driver
from warpbus.errors import DeviceError

CALL_SECONDS = 600.0
"""After this long a call of the driver counts as hung, as it does for a process that shares memory by multicast."""


class State(IntEnum):
    """CUprocessState."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


class _Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class _Pair(ctypes.Structure):
    """CUcheckpointGpuPair."""

    _fields_ = (("old", _Uuid), ("new", _Uuid))


class _LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs."""

    _fields_ = (("milliseconds", ctypes.c_uint), ("reserved", ctypes.c_ubyte * 60))


class _RestoreArguments(ctypes.Structure):
    """CUcheckpointRestoreArgs."""

    _fields_ = (
        ("pairs", ctypes.POINTER(_Pair)),
        ("count", ctypes.c_uint),
        ("reserved", ctypes.c_ubyte * 52),
    )


class CudaCheckpoint:
    """The driver's functions, by process id. One process may do this for another of the same user.

    Args:
        seconds: after which a call counts as hung. The thread that makes it is left behind.

    Raises:
        DeviceError: the driver is not there or too old; and by every method whose call it rejects or does not finish.
    """

    def __init__(self, *, seconds: float = CALL_SECONDS) -> None:
        self._seconds = seconds
        self._driver = driver.library()
        if not hasattr(self._driver, "cuCheckpointProcessLock"):
            raise DeviceError("this NVIDIA driver cannot checkpoint processes: install version 580 or later")
        driver.check(self._driver.cuInit(0), "starting CUDA")  # restoring needs it

    def state(self, pid: int) -> State:
        """Where a process is. The driver rejects one that does not use CUDA."""
        state = ctypes.c_int()
        self._call("cuCheckpointProcessGetState", pid, ctypes.byref(state))
        return State(state.value)

    def lock(self, pid: int, seconds: float) -> None:
        """Let a process's next calls of CUDA wait. It is RUNNING still if that has not worked after `seconds`."""
        arguments = _LockArguments(milliseconds=max(1, round(seconds * 1000)))
        self._call("cuCheckpointProcessLock", pid, ctypes.byref(arguments))

    def checkpoint(self, pid: int) -> None:
        """Wait for what a LOCKED process has launched, copy its GPU memory to main memory and free its GPUs."""
        self._call("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        """Put a CHECKPOINTED process on GPUs again; it is LOCKED then.

        Args:
            gpus: the UUID of the new GPU by that of the old one. Either empty, for the GPUs that it was on, or with
                every GPU of the machine, and new ones of the model of the old. After an attempt without enough memory
                the driver (580) may never restore the process again.
        """
        pairs = (_Pair * max(1, len(gpus)))()
        for pair, (old, new) in zip(pairs, gpus.items(), strict=False):
            pair.old, pair.new = _uuid(old), _uuid(new)
        arguments = _RestoreArguments(pairs=pairs, count=len(gpus))
        self._call("cuCheckpointProcessRestore", pid, ctypes.byref(arguments) if gpus else None)

    def unlock(self, pid: int) -> None:
        """Let a LOCKED process go on."""
        self._call("cuCheckpointProcessUnlock", pid, None)

    def _call(self, name: str, pid: int, argument: object) -> None:
        status: list[int] = []
        ended = threading.Event()  # join() of a thread, once interrupted, does not wait again

        def call() -> None:
            status.append(getattr(self._driver, name)(ctypes.c_int(pid), argument))
            ended.set()

        thread = threading.Thread(target=call, name=name, daemon=True)
        try:
            thread.start()
            ended.wait(self._seconds)
        except BaseException:
            if thread.ident is not None:
                ended.wait(self._seconds)  # the driver does not stop halfway: what to undo is known at its end
            raise
        if not status:
            raise DeviceError(f"process {pid}: {name} has not returned within {self._seconds:g} s and may never do so")
        driver.check(status[0], f"process {pid}: {name}")


def _uuid(text: str) -> _Uuid:
    """The driver's form of `GPU-2a0b5c1e-...`."""
    return _Uuid.from_buffer_copy(uuid.UUID(text.removeprefix("GPU-")).bytes)

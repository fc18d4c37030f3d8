"""What the driver is asked when processes are checkpointed, and how its answers are reported."""

import ctypes
import signal
import threading
import uuid

import pytest

from warpbus.cuda import driver
from warpbus.cuda.checkpoint import CudaCheckpoint, State
from warpbus.errors import DeviceError

OLD, NEW = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"


class FakeDriver:
    """A library that writes down its calls.

    Attributes:
        status: what the next calls return.
        hangs: a checkpoint ends once it is set.
        entered: called when a checkpoint begins.
    """

    def __init__(self):
        self.calls = []
        self.status = 0
        self.hangs = threading.Event()
        self.hangs.set()
        self.entered = lambda: None

    def cuInit(self, flags):  # noqa: N802
        return 0

    def cuCheckpointProcessGetState(self, pid, state):  # noqa: N802
        state._obj.value = 2
        return self.status

    def cuCheckpointProcessLock(self, pid, arguments):  # noqa: N802
        raw = bytes(arguments._obj)
        return self._done("lock", pid, len(raw), int.from_bytes(raw[:4], "little"), any(raw[4:]))

    def cuCheckpointProcessCheckpoint(self, pid, arguments):  # noqa: N802
        self.entered()
        self.hangs.wait(5)
        return self._done("checkpoint", pid, arguments)

    def cuCheckpointProcessRestore(self, pid, arguments):  # noqa: N802
        if arguments is None:
            return self._done("restore", pid, None)
        raw = bytes(arguments._obj)
        count = int.from_bytes(raw[8:12], "little")
        pairs = ctypes.string_at(int.from_bytes(raw[:8], "little"), 32 * count)
        return self._done("restore", pid, len(raw), pairs, any(raw[12:]))

    def cuCheckpointProcessUnlock(self, pid, arguments):  # noqa: N802
        return self._done("unlock", pid, arguments)

    def cuGetErrorName(self, status, name):  # noqa: N802
        name._obj.value = b"CUDA_ERROR_NOT_READY"
        return 0

    def cuGetErrorString(self, status, text):  # noqa: N802
        text._obj.value = b"device not ready"
        return 0

    def _done(self, name, pid, *rest):
        self.calls.append((name, pid.value, *rest))
        return self.status


@pytest.fixture
def library(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    return fake


def test_the_structures_are_those_of_the_driver(library):
    checkpoint = CudaCheckpoint()
    checkpoint.lock(7, 2.5)
    checkpoint.checkpoint(7)
    checkpoint.restore(7, {OLD: NEW, NEW: OLD})
    checkpoint.unlock(7)
    old, new = (uuid.UUID(name.removeprefix("GPU-")).bytes for name in (OLD, NEW))
    assert library.calls == [
        ("lock", 7, 64, 2500, False),
        ("checkpoint", 7, None),
        ("restore", 7, 64, old + new + new + old, False),
        ("unlock", 7, None),
    ]


def test_restoring_to_the_same_gpus_passes_no_map(library):
    CudaCheckpoint().restore(7, {})
    assert library.calls == [("restore", 7, None)]


def test_the_state(library):
    assert CudaCheckpoint().state(7) is State.CHECKPOINTED


def test_an_error_names_the_process_and_the_call(library):
    library.status = 600
    with pytest.raises(
        DeviceError, match=r"process 7: cuCheckpointProcessLock: CUDA_ERROR_NOT_READY \(600\), device not ready"
    ):
        CudaCheckpoint().lock(7, 1)


def test_a_lock_always_has_an_end(library):
    CudaCheckpoint().lock(7, 0)  # 0 would be no limit for the driver
    assert library.calls == [("lock", 7, 64, 1, False)]


def test_a_call_that_hangs_is_left(library):
    library.hangs.clear()
    with pytest.raises(DeviceError, match=r"process 7: cuCheckpointProcessCheckpoint has not returned within 0\.05 s"):
        CudaCheckpoint(seconds=0.05).checkpoint(7)
    library.hangs.set()


def test_an_interrupt_waits_for_the_end_of_the_call(library):
    """The driver goes on with it in any case; what to undo is known only once it has ended."""
    library.hangs.clear()
    here = threading.get_ident()

    def interrupt():
        signal.pthread_kill(here, signal.SIGINT)
        threading.Timer(0.2, library.hangs.set).start()

    library.entered = interrupt
    with pytest.raises(KeyboardInterrupt):
        CudaCheckpoint().checkpoint(7)
    assert library.calls == [("checkpoint", 7, None)]


def test_an_old_driver(monkeypatch):
    monkeypatch.setattr(driver, "library", lambda: object())
    with pytest.raises(DeviceError, match="install version 580"):
        CudaCheckpoint()

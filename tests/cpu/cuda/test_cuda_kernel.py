"""What can be known of a kernel without a GPU."""

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from warpbus.cuda import driver
from warpbus.cuda import kernel as module
from warpbus.cuda.kernel import Kernel, Unit, runs_on
from warpbus.cuda.parameters import Parameters
from warpbus.errors import DeviceError

UNIT = Unit(Path("/source/x.cu"), Path("/source"))


@pytest.mark.parametrize(
    ("arch", "needs", "expected"),
    [
        ("sm_80", "sm_80", True),
        ("sm_86", "sm_80", True),
        ("sm_120a", "sm_89", True),
        ("sm_80", "sm_89", False),
        ("sm_90a", "sm_90a", True),
        ("sm_100a", "sm_90a", False),
        ("sm_89", "sm_90a", False),
    ],
)
def test_what_runs_on_which_architecture(arch, needs, expected):
    assert runs_on(arch, needs) is expected


def test_label_names_file_and_macros():
    assert Unit(Path("/source/gemm/x.cu"), Path("/source"), (("TILE", "64"),)).label == "gemm/x.cu TILE=64"


def test_two_threads_leave_a_kernel_the_larger_shared_memory(monkeypatch):
    """The one that asks for more is held up within the driver, where Python runs other threads."""
    asks, other_asks = threading.Event(), threading.Event()
    allowed = []

    def allow(handle, size, index, label):
        allowed.append(size)
        if size == 200_000:
            asks.set()
            other_asks.wait(0.2)  # without a lock the other one comes meanwhile

    monkeypatch.setattr(driver, "allow_shared_memory", allow)
    monkeypatch.setattr(module, "enter_context", lambda: None)
    kernel = Kernel(UNIT, "x", Parameters("float* x"))
    kernel._handles[0] = object()

    def ask_for_less():
        asks.wait()
        kernel._prepare(0, 120_000)
        other_asks.set()

    threads = [threading.Thread(target=kernel._prepare, args=(0, 200_000)), threading.Thread(target=ask_for_less)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert allowed[-1] == max(allowed) == 200_000
    kernel._prepare(0, 200_000)
    assert len(allowed) == 1


def test_kernels_are_loaded_in_relaxed_capture_mode(monkeypatch):
    mode = [1]  # thread-local: what a capture of this thread has
    loaded = []

    def exchange(given):
        pointer = ctypes.cast(given, ctypes.POINTER(ctypes.c_int))
        mode[0], pointer[0] = pointer[0], mode[0]
        return 0

    def load(code, label):
        loaded.append(("code", mode[0]))

    def kernel(code, name, label):
        loaded.append(("kernel", mode[0]))
        raise ValueError("no such kernel")

    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange))
    monkeypatch.setattr(driver, "load", load)
    monkeypatch.setattr(driver, "kernel", kernel)
    monkeypatch.setattr(module, "enter_context", lambda: None)
    monkeypatch.setattr(module, "architecture", lambda index: "sm_90a")
    monkeypatch.setattr(Unit, "compile", lambda unit, arch: SimpleNamespace(code=b""))
    with pytest.raises(ValueError, match="no such kernel"):
        Kernel(UNIT, "x", Parameters("float* x"))._prepare(0, 0)
    assert loaded == [("code", driver._RELAXED), ("kernel", driver._RELAXED)]
    assert mode == [1]


class LaidOut:
    """A driver's answers about the parameters of one kernel."""

    def __init__(self, *layout):
        self.layout = layout

    def cuKernelGetParamInfo(self, handle, index, offset, size):  # noqa: N802
        if index.value >= len(self.layout):
            return 1
        for pointer, value in zip((offset, size), self.layout[index.value], strict=True):
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_size_t))[0] = value
        return 0


@pytest.fixture
def loaded(monkeypatch):
    """`loaded(driver library, kernel)` prepares a kernel whose code this driver has loaded."""
    monkeypatch.setattr(module, "enter_context", lambda: None)
    monkeypatch.setattr(module, "architecture", lambda index: "sm_90a")
    monkeypatch.setattr(driver, "load", lambda code, label: object())
    monkeypatch.setattr(driver, "kernel", lambda code, name, label: object())
    monkeypatch.setattr(Unit, "compile", lambda unit, arch: SimpleNamespace(code=b""))

    def prepare(library, kernel):
        library.cuThreadExchangeStreamCaptureMode = lambda mode: 0
        monkeypatch.setattr(driver, "library", lambda: library)
        return kernel._prepare(0, 0)

    return prepare


def test_parameters_are_compared_with_the_compiled_kernel(loaded):
    parameters = Parameters("float* x, int n, long long size")
    assert loaded(LaidOut((0, 8), (8, 4), (16, 8)), Kernel(UNIT, "x", parameters))
    for layout in (((0, 8), (8, 4)), ((0, 8), (8, 4), (12, 4)), ((0, 8), (8, 4), (16, 8), (24, 4))):
        with pytest.raises(DeviceError, match=r"x\.cu: x: the declared parameters lie at .*: declare them"):
            loaded(LaidOut(*layout), Kernel(UNIT, "x", parameters))


def test_an_old_driver_compares_nothing(loaded):
    assert loaded(SimpleNamespace(), Kernel(UNIT, "x", Parameters("float* x")))


def test_a_kernel_is_declared_once():
    unit = Unit(Path("/source/x.cu"), Path("/source"))
    parameters = Parameters("float* x")
    assert unit.kernel("x", parameters) is unit.kernel("x", parameters)
    with pytest.raises(DeviceError, match=r"x\.cu: x is declared twice"):
        unit.kernel("x", Parameters("float* x"))


def test_arguments_that_do_not_fit_name_the_kernel():
    with pytest.raises(DeviceError, match=r"x\.cu: x: missing arguments: x, unknown ones: y"):
        Kernel(UNIT, "x", Parameters("float* x"))(1, 1, y=None)


def test_tensors_on_the_cpu_are_refused():
    with pytest.raises(DeviceError, match=r"x\.cu: x: a kernel runs on a GPU, and its tensors are on the CPU"):
        Kernel(UNIT, "x", Parameters("float* x"))(1, 1, x=torch.zeros(1))

"""What can be known of a kernel without a GPU: where its parameters lie."""

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from warpbus.cuda import driver
from warpbus.cuda import kernel as module
from warpbus.cuda.kernel import Kernel, Unit, runs_on


@pytest.mark.parametrize(
    ("parameters", "offsets"),
    [
        ("P", (0,)),
        ("PiPf", (0, 8, 16, 24)),
        ("iqi", (0, 8, 16)),
        ("128s128sPii", (0, 128, 256, 264, 268)),
    ],
)
def test_parameters_lie_where_c_puts_them(parameters, offsets):
    kernel = Unit(Path("/source/x.cu"), Path("/source")).kernel("x", parameters)
    assert kernel._offsets == offsets


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
    kernel = Kernel(Unit(Path("/source/x.cu"), Path("/source")), "x", "P")
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
        Kernel(Unit(Path("/source/x.cu"), Path("/source")), "x", "P")._prepare(0, 0)
    assert loaded == [("code", driver._RELAXED), ("kernel", driver._RELAXED)]
    assert mode == [1]

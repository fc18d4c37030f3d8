"""Programs that are started on a part of a GPU: their environment, their end, signals."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from pool_processes_machine import GB, gpu

from warpbus.cuda import mps
from warpbus.errors import DeviceError, UsageError
from warpbus.pool.processes import virtual
from warpbus.pool.processes.virtual import run, whole_gpu_environment
from warpbus.pool.quota import Quota

SHOW = "import os, json, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"


@pytest.fixture
def _runtime(monkeypatch, tmp_path):
    def directory(*names):
        path = tmp_path.joinpath(*names)
        path.mkdir(parents=True, exist_ok=True)
        return path

    for module in (virtual, mps):
        monkeypatch.setattr(module, "runtime_directory", directory)


@pytest.mark.usefixtures("_runtime")
def test_a_whole_gpu(tmp_path):
    assert run([sys.executable, "-c", SHOW, str(tmp_path / "seen")], gpu(1), None, "alice") == 0
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert seen["WARPBUS_TENANT"] == "alice"
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in seen
    assert not (tmp_path / "mps" / "none" / "control").exists()
    assert seen["CUDA_MPS_PIPE_DIRECTORY"] == whole_gpu_environment(gpu(1), "")["CUDA_MPS_PIPE_DIRECTORY"]


@pytest.mark.usefixtures("_runtime")
def test_a_part_of_a_gpu(tmp_path, monkeypatch):
    events = []

    class Daemon(mps.ControlDaemon):
        running = property(lambda self: "started" in events)

        def start(self):
            events.append("started")

        def stop(self):
            events.append("stopped")

    monkeypatch.setattr(mps, "ControlDaemon", Daemon)
    monkeypatch.setattr(mps, "available", lambda: None)
    assert run([sys.executable, "-c", SHOW, str(tmp_path / "seen")], gpu(1), Quota(8 * 2**30, 0.25), "bob") == 0
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert seen["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "mps" / "GPU-1" / "pipes")
    assert seen["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert seen["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"
    assert events == ["started", "stopped"]


def test_without_mps_there_are_no_parts(monkeypatch, tmp_path):
    monkeypatch.setattr(mps, "available", lambda: "nvidia-cuda-mps-control is not installed")
    with pytest.raises(DeviceError, match="memory of a program cannot be limited: nvidia-cuda-mps-control is not"):
        run([sys.executable, "-c", SHOW, str(tmp_path / "seen")], gpu(0), Quota(8 * GB, 0.25), "bob")
    assert not (tmp_path / "seen").exists()


def test_what_cannot_be_run():
    with pytest.raises(UsageError, match="no program: give one after --"):
        run([], gpu(0), None, "bob")
    with pytest.raises(UsageError, match="GPU 0 has 80,000,000,000: give that"):
        run(["true"], gpu(0), Quota(81 * GB, 0.25), "bob")
    with pytest.raises(DeviceError, match=r"cut into instances \(MIG\)"):
        run(["true"], gpu(0, mig=True), Quota(8 * GB, 0.25), "bob")


@pytest.mark.usefixtures("_runtime")
def test_a_program_that_does_not_exist():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(UsageError, match="no-such-program cannot be started: No such file"):
        run(["no-such-program"], gpu(0), None, "bob")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.usefixtures("_runtime")
@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137), ("import os; os.abort()", 134)],
)
def test_its_end_is_passed_on(code, expected):
    assert run([sys.executable, "-c", code], gpu(0), None, "bob") == expected


@pytest.mark.usefixtures("_runtime")
def test_the_program_gets_signals_as_usual():
    """Neither blocked, as they are here, nor ignored, as Python has SIGPIPE."""
    code = (
        "import signal, sys; blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "status = open('/proc/self/status').read()\n"
        "sys.exit(3 if blocked else 0)"
    )
    assert run([sys.executable, "-c", code], gpu(0), None, "bob") == 0
    shell = "head -c 1 /dev/zero >/dev/null; grep SigIgn /proc/self/status | grep -q '[13579bdf]...$' && exit 5; exit 0"
    assert run(["sh", "-c", shell], gpu(0), None, "bob") == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_forwarded(number, tmp_path):
    """Sent to `pool run` alone they reach the program, whose exit code comes back."""
    program = (
        "import signal, sys, time, pathlib\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(40))\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(30)\n"
    )
    starter = (
        "import sys, pathlib\n"
        "from warpbus.cuda.inventory import InstalledGpu\n"
        "from warpbus.pool.processes import virtual\n"
        f"virtual.runtime_directory = lambda *names: pathlib.Path({str(tmp_path)!r})\n"
        f"sys.exit(virtual.run([sys.executable, '-c', {program!r}], InstalledGpu(0, 'GPU-0', 'H', 0, 1, 1), None, 'x'))"
    )
    with subprocess.Popen([sys.executable, "-c", starter]) as process:
        deadline = time.monotonic() + 90
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, number)
        assert process.wait(90) == 40

"""The control daemon of MPS, played by a script that keeps its state in files."""

import os
import subprocess
import sys

import pytest

from warpbus.cuda import mps
from warpbus.cuda.inventory import InstalledGpu
from warpbus.cuda.mps import ControlDaemon, available, limits
from warpbus.errors import DeviceError, UsageError

GPU = InstalledGpu(0, "GPU-1", "H100", 0, 80 * 10**9, 80 * 10**9)

# "control" is the pipe: the daemon runs while it is there. "clients" are two servers' and their process ids.
SCRIPT = """\
#!{python}
import os, subprocess, sys, pathlib
pipes = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
with (pipes.parent / "calls").open("a") as file:
    print(*sys.argv[1:], os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["CUDA_MPS_LOG_DIRECTORY"], file=file)
control, clients = pipes / "control", pipes / "clients"
if sys.argv[1:] == ["-d"]:
    if control.exists():
        sys.exit("An instance of this daemon is already running")
    subprocess.Popen(["sleep", "2"])  # as the daemon does, it has the files of the one that started it
    control.touch()
    sys.exit(0)
if not control.exists():
    sys.exit("Cannot find MPS control daemon process")
question = sys.stdin.read().split()
lines = [line.split(":") for line in clients.read_text().splitlines()] if clients.exists() else []
if question == ["get_server_list"]:
    print(*[server for server, _ in lines], sep="\\n")
elif question[0] == "get_client_list":
    print(*[pid for server, pids in lines if server == question[1] for pid in pids.split()], sep="\\n")
elif question == ["quit"]:
    control.unlink()
"""


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    """A daemon whose program is the script."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / mps.BINARY).write_text(SCRIPT.format(python=sys.executable))
    (programs / mps.BINARY).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for name in ("pipes", "logs"):
        (tmp_path / name).mkdir()
    return ControlDaemon(tmp_path / "pipes", tmp_path / "logs", GPU.uuid)


def test_it_is_started_asked_and_stopped(daemon, tmp_path):
    assert not daemon.running
    daemon.start()
    assert daemon.running
    assert daemon.clients() == frozenset()
    (daemon.pipes / "clients").write_text("100: 11 12\n200: 21\n")
    assert daemon.clients() == {11, 12, 21}
    daemon.stop()
    assert not daemon.running
    # It has the one GPU that it was made for, whatever this process sees.
    assert (tmp_path / "calls").read_text().splitlines()[0] == f"-d GPU-1 {tmp_path / 'logs'}"


def test_what_the_daemon_says_is_reported(daemon):
    with pytest.raises(DeviceError, match=r"Cannot find MPS control daemon process: see .*logs"):
        daemon.ask("get_server_list")
    daemon.start()
    with pytest.raises(DeviceError, match="already running"):
        daemon.start()


def test_the_last_client_stops_it(daemon):
    with daemon.client():
        with daemon.client():
            assert daemon.running
        assert daemon.running
    assert not daemon.running


def test_a_program_that_outlives_the_one_that_started_it_keeps_it(daemon):
    with daemon.client() as lock:
        program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    assert daemon.running
    program.communicate(b"\n")
    with daemon.client():
        pass
    assert not daemon.running


def test_a_daemon_that_died_is_started_again(daemon):
    with daemon.client():
        (daemon.pipes / "control").unlink()
        with daemon.client():
            assert daemon.running


def test_a_client_that_fails_leaves_nothing_behind(daemon):
    with pytest.raises(RuntimeError), daemon.client():
        raise RuntimeError
    assert not daemon.running


def test_what_makes_a_program_a_client(daemon):
    assert daemon.environment() == {"CUDA_MPS_PIPE_DIRECTORY": str(daemon.pipes), "CUDA_VISIBLE_DEVICES": "GPU-1"}
    assert limits(4 * 2**30, 0.25) == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4096M",
    }
    assert limits(8 * 10**9, 0.333)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "33.3"
    assert limits(8 * 10**9, 1)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=7629M"
    with pytest.raises(UsageError, match="needs 1 MiB at least"):
        limits(1000, 1)


def test_why_there_is_none(monkeypatch, tmp_path, daemon):
    class Machine:
        def gpus(self):
            return [GPU] * count

    monkeypatch.setattr(mps, "Inventory", Machine)
    count = 1
    assert available() is None
    count = 0
    assert available() == "this machine has no NVIDIA GPU"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvidia-cuda-mps-control is not installed" in available()


def test_a_machine_without_a_driver(monkeypatch, daemon):
    def nothing():
        raise DeviceError("no NVIDIA driver was found")

    monkeypatch.setattr(mps, "Inventory", nothing)
    assert available() == "no NVIDIA driver was found"

"""A server that a benchmark starts goes when the benchmark goes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from warpbus.bench.servers import serving
from warpbus.errors import DeviceError

PATIENCE = 300.0
BENCHMARK = """
import sys, time
from warpbus.bench.servers import serving
sys.executable = sys.argv[1]
with serving(["serve"], r"ready: (\\S+)", "no server") as pid:
    print(pid, flush=True)
    time.sleep(1000)
"""


def executable(path: Path, *lines: str) -> str:
    """A program in the place of Python, which says what a server would say."""
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_it_goes_when_the_benchmark_is_terminated(tmp_path):
    server = executable(tmp_path / "server", 'echo "loading" >&2', 'echo "ready: $$" >&2', "exec sleep 1000")
    benchmark = subprocess.Popen([sys.executable, "-c", BENCHMARK, server], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(benchmark.stdout.readline())
        assert is_there(pid)
        assert os.getsid(pid) == pid  # Ctrl-C is for the benchmark alone
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(PATIENCE) == 128 + signal.SIGTERM
        until = time.monotonic() + PATIENCE
        while is_there(pid):
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        benchmark.kill()
        benchmark.communicate()


def test_one_that_does_not_start_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", executable(tmp_path / "server", 'echo "no such model" >&2', "exit 1"))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(DeviceError, match=r"^no server: no such model$"), serving(["serve"], "ready (.*)", "no server"):
        pass
    assert signal.getsignal(signal.SIGTERM) == before

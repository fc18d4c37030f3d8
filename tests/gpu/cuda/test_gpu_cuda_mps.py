"""Clients of a real MPS daemon: the multiprocessors that they see, the memory that they get, their neighbours."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from warpbus.cuda import mps
from warpbus.cuda.inventory import Inventory
from warpbus.cuda.mps import ControlDaemon, limits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(torch.cuda.is_available() and mps.available() is not None, reason=f"no MPS: {mps.available()}"),
]

GiB = 2**30
MULTIPROCESSORS = """
import json, torch
print(json.dumps(torch.cuda.get_device_properties(0).multi_processor_count))
"""
# Answers each line with what became of an allocation of so many bytes, which it keeps.
ALLOCATE = """
import json, sys, torch
torch.zeros(1, device="cuda")
kept = []
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    try:
        kept.append(torch.full((int(line),), 7, dtype=torch.uint8, device="cuda"))
        print(json.dumps(int(kept[-1][-1])), flush=True)
    except torch.OutOfMemoryError:
        print(json.dumps("out of memory"), flush=True)
"""


@pytest.fixture
def daemon():
    """A daemon of its own, in a directory with a short name: its sockets have no room for long ones."""
    directory = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))
    for name in ("pipes", "logs"):
        (directory / name).mkdir()
    yield ControlDaemon(directory / "pipes", directory / "logs", Inventory().gpu(0).uuid)
    shutil.rmtree(directory)


def client(daemon, code, memory, share):
    environment = {**os.environ, **daemon.environment(), **limits(memory, share)}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def ask(process, size):
    process.stdin.write(f"{size}\n")
    process.stdin.flush()
    return answer(process)


def answer(process):
    return json.loads(process.stdout.readline())


def test_a_client_sees_its_share_of_the_multiprocessors(daemon):
    total = torch.cuda.get_device_properties(0).multi_processor_count
    with daemon.client():
        found = {}
        for share in (0.25, 0.5):
            with client(daemon, MULTIPROCESSORS, 8 * GiB, share) as process:
                found[share] = answer(process) / total
    assert abs(found[0.25] - 0.25) < 0.05
    assert abs(found[0.5] - 0.5) < 0.05
    assert not daemon.running


def test_memory_has_a_limit_of_which_the_neighbour_notices_nothing(daemon):
    with (
        daemon.client(),
        client(daemon, ALLOCATE, 4 * GiB, 0.5) as large,
        client(daemon, ALLOCATE, GiB, 0.25) as small,
    ):
        assert (answer(large), answer(small)) == ("ready", "ready")
        assert daemon.clients() == {large.pid, small.pid}
        assert ask(small, 2 * GiB) == "out of memory"
        assert ask(large, 2 * GiB) == 7
        assert ask(large, 4 * GiB) == "out of memory"
        # Both go on after that.
        assert ask(small, GiB // 4) == 7
        assert ask(large, GiB // 4) == 7
        for process in (large, small):
            process.stdin.close()
            assert process.wait(60) == 0
    assert not daemon.running


def test_pool_run(tmp_path):
    total = torch.cuda.get_device_properties(0).multi_processor_count
    command = [sys.executable, "-m", "warpbus", "pool", "run", "--memory", "1GiB", "--share", "0.25", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", MULTIPROCESSORS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert abs(json.loads(done.stdout) / total - 0.25) < 0.05
    code = "import torch; torch.empty(2 * 2**30, dtype=torch.uint8, device='cuda')"
    failed = subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "OutOfMemoryError" in failed.stderr
    assert not ControlDaemon.of_gpu(Inventory().gpu(0)).running

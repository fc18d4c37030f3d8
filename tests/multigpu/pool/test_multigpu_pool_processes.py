"""An unmodified training program moves from GPU to GPU, and computes to the bit what it does undisturbed."""

import os
import subprocess
import sys
import time

import pytest
import torch

from warpbus.cuda.checkpoint import CudaCheckpoint, State
from warpbus.errors import DeviceError, StateError
from warpbus.pool.processes.machine import ThisMachine
from warpbus.pool.processes.processes import ProcessHost, migrate_process, resume_process, suspend_process
from warpbus.pool.processes.suspensions import Suspensions

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

STEPS = 600
# A plain program: no Warpbus in it. Dropout and Adam make every step depend on random numbers and on all before.
TRAINING = f"""
import hashlib, os, sys, time, torch
torch.manual_seed(0)
network = torch.nn.Sequential(
    torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(1024, 256)
).cuda()
optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
ballast = torch.randint(256, (2**28,), dtype=torch.uint8, device="cuda")
out = open(sys.argv[1], "w", buffering=1)
print(os.getpid(), file=out)
for step in range({STEPS}):
    x = torch.randn(128, 256, device="cuda")
    loss = (network(x) - x.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), file=out)
    time.sleep(0.01)
result = hashlib.sha256()
for tensor in [ballast, *network.parameters()]:
    result.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
print(result.hexdigest(), file=out)
"""


class Training:
    """The program as it runs; `log` is what it has written."""

    def __init__(self, path, *starter):
        self._log = path
        self.process = subprocess.Popen([*starter, sys.executable, "-c", TRAINING, str(path)])

    @property
    def log(self):
        return self._log.read_text().split("\n")[:-1] if self._log.exists() else []

    @property
    def pid(self):
        return int(self.log[0])

    def reach(self, steps):
        """Wait until it has done so many steps more."""
        wanted, deadline = len(self.log) + steps, time.monotonic() + 120
        while len(self.log) < max(2, wanted):
            assert self.process.poll() is None, "it has ended"
            assert time.monotonic() < deadline, "it does not go on"
            time.sleep(0.01)

    def result(self):
        """The losses and the hash of all weights, once it has ended."""
        assert self.process.wait(180) == 0
        assert len(self.log) == STEPS + 2
        return self.log[1:]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What the program computes on GPU 0 alone."""
    return Training(tmp_path_factory.mktemp("undisturbed") / "log").result()


POOL_RUN = (sys.executable, "-m", "warpbus", "pool", "run", "--gpu", "0", "--")


@pytest.fixture(params=[POOL_RUN, ()], ids=["pool run", "by itself"])
def training(request, tmp_path):
    """The program, some steps on: by `pool run`, which shows it one GPU, and by itself, seeing all."""
    program = Training(tmp_path / "log", *request.param)
    program.reach(30)
    yield program
    if program.process.poll() is None:
        if program.log:
            os.kill(program.pid, 9)
        program.process.kill()
        program.process.wait()


@pytest.fixture
def host(tmp_path):
    (tmp_path / "suspended").mkdir()
    return ProcessHost(ThisMachine(), CudaCheckpoint(), Suspensions(tmp_path / "suspended"))


def on(host, pid):
    """The GPUs that the driver says it is on; in a container it may not say, and what is mapped tells."""
    gpus = host.machine.gpus()
    named = [gpu.index for gpu in gpus if pid in host.machine.memory_on(gpu)]
    return named or [gpu.index for gpu in gpus if gpu.minor in host.machine.process(pid).minors]


def test_it_moves_there_and_back(host, training, undisturbed):
    assert on(host, training.pid) == [0]
    carried = migrate_process(training.pid, 1, host)
    assert on(host, training.pid) == [1]
    assert carried.freed > 2**28
    training.reach(30)
    migrate_process(training.pid, 0, host)
    assert on(host, training.pid) == [0]
    training.reach(10)
    assert training.result() == undisturbed
    assert host.suspensions.all() == []


def test_it_is_suspended_and_goes_on_elsewhere(host, training, undisturbed):
    free = host.machine.gpus()[0].free
    carried = suspend_process(training.pid, host)
    assert host.driver.state(training.pid) is State.CHECKPOINTED
    assert host.machine.gpus()[0].free >= free + carried.freed
    steps = len(training.log)
    time.sleep(0.5)
    assert len(training.log) <= steps + 1
    with pytest.raises(StateError, match="is checkpointed, not running"):
        migrate_process(training.pid, 1, host)
    resume_process(training.pid, host, to=1)
    assert on(host, training.pid) == [1]
    training.reach(10)
    assert training.result() == undisturbed


def test_it_goes_on_where_it_was_when_it_cannot_be_restored(host, training, undisturbed):
    class Astray:
        """The driver, but that it is sent to GPUs that do not exist."""

        def __init__(self, real):
            self._real = real

        def __getattr__(self, name):
            return getattr(self._real, name)

        def restore(self, pid, gpus):
            nowhere = (f"GPU-{number:08x}-0000-0000-0000-000000000000" for number in range(len(gpus)))
            self._real.restore(pid, dict(zip(gpus, nowhere, strict=True)))

    astray = ProcessHost(host.machine, Astray(host.driver), host.suspensions)
    with pytest.raises(DeviceError, match=r"restore failed \(.*\): it goes on, on GPU 0"):
        migrate_process(training.pid, 1, astray)
    assert on(host, training.pid) == [0]
    assert host.suspensions.all() == []
    training.reach(10)
    assert training.result() == undisturbed


def test_it_is_not_touched_where_there_is_no_room(host, training, undisturbed):
    free = torch.cuda.mem_get_info(1)[0]
    taken = torch.empty(free - 2**28, dtype=torch.uint8, device="cuda:1")
    with pytest.raises(StateError, match=r"it takes .* GB, GPU 1 has .* GB free"):
        migrate_process(training.pid, 1, host)
    assert on(host, training.pid) == [0]
    del taken
    torch.cuda.empty_cache()
    training.reach(10)
    assert training.result() == undisturbed


def test_the_command(training, undisturbed):
    command = [sys.executable, "-m", "warpbus", "pool"]
    listed = subprocess.run([*command, "processes"], capture_output=True, text=True, check=True)
    assert str(training.pid) in listed.stdout
    moved = subprocess.run(
        [*command, "move", str(training.pid), "--to", "1"], capture_output=True, text=True, check=False
    )
    assert moved.returncode == 0, moved.stderr
    assert f"process {training.pid} runs on GPU 1 (lock " in moved.stdout
    assert training.result() == undisturbed

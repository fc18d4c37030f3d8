"""Leases of an oversubscribed GPU: their memory goes to host memory and back, and they compute on as if it had not."""

import subprocess
import sys

import pytest
import torch

from warpbus.pool.protocol.address import address
from warpbus.pool.protocol.control_channel import ControlChannel
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.suspension import suspend_to_memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MEGABYTE = 1 << 20
PROGRAM = """
import sys, torch, warpbus
gpu = warpbus.pool.connect(sys.argv[1], memory=int(sys.argv[2]), share=0.7, priority=int(sys.argv[3]), on="mill/0")
layer = torch.nn.Linear(1024, 1024).to(gpu.device)
x = torch.ones(64, 1024, device=gpu.device)
ballast = torch.full((int(sys.argv[2]) // 2,), 7, dtype=torch.uint8, device=gpu.device)
with torch.no_grad():
    expected = layer(x).cpu()
    print("ready", flush=True)
    for line in sys.stdin:
        assert torch.equal(layer(x).cpu(), expected)
        assert int(ballast[::4096].max()) == int(ballast[::4096].min()) == 7
        print("swaps", gpu.swaps.out, gpu.swaps.back, flush=True)
gpu.close()
"""


def test_an_executor_frees_the_gpu_and_comes_back_bit_for_bit() -> None:
    device = torch.device("cuda")
    executor = Executor(device, Quota(512 * MEGABYTE, 1.0))
    executor.storages.create(1, 256 * MEGABYTE)
    executor.storages.raw(1).random_()
    before = executor.storages.raw(1).cpu()
    torch.cuda.synchronize()
    full = torch.cuda.memory_reserved()
    saved = suspend_to_memory(executor, 1 << 30)
    executor.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= full - 256 * MEGABYTE
    saved.resume(executor)
    saved.close()
    assert torch.equal(executor.storages.raw(1).cpu(), before)


@pytest.fixture
def pool(tmp_path):
    """The address of a daemon whose GPUs have room for one large lease each, and its bytes."""
    command = [sys.executable, "-m", "warpbus", "pool", "serve", "--port", "0", "--name", "mill", "--spare", "2"]
    command += ["--oversubscribe", "1.5", "--swap-time-slice", "0.5", "--directory", str(tmp_path / "mill")]
    command += ["--gpu-memory-reserve", "90%"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        where = next(line.split()[-1] for line in process.stderr if line.startswith("ready: "))
        with ControlChannel(address(where), None) as control:
            yield where, int(0.7 * control.ask("status")["gpus"][0]["memory"])
        process.terminate()
        assert process.wait(90) == 0


def test_two_leases_that_do_not_fit_together_take_turns(pool) -> None:
    where, memory = pool
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, where, str(memory), priority],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for priority in ("0", "1")
    ]
    try:
        for process in both:
            assert process.stdout.readline() == "ready\n"
        for _ in range(3):
            for process in both:
                process.stdin.write("go\n")
                process.stdin.flush()
                said = process.stdout.readline().split()
                assert said[0] == "swaps"
        assert int(said[1]) >= 1
    finally:
        for process in both:
            process.stdin.close()
            assert process.wait(90) == 0

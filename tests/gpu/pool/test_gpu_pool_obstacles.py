"""What real programs show of themselves: ordinary ones can be carried, others are seen."""

import os
import subprocess
import sys

import pytest
import torch

from warpbus.pool.processes.machine import ThisMachine
from warpbus.pool.processes.obstacles import mps_pipes, obstacles

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ORDINARY = "x = torch.randn(512, 512, device='cuda'); (x @ x).sum().item()"
WORKERS = """
import torch.utils.data
data = torch.utils.data.DataLoader(torch.arange(1000), num_workers=2, persistent_workers=True)
kept = iter(data)
next(kept).cuda()
"""
NCCL = """
import torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(8, device="cuda"))
torch.cuda.synchronize()
"""
MANAGED = """
import ctypes
address = ctypes.c_uint64()
driver = ctypes.CDLL("libcuda.so.1")
assert not driver.cuMemAllocManaged(ctypes.byref(address), ctypes.c_size_t(256 * 2**20), ctypes.c_uint(1))
ctypes.memset(address.value, 1, 256 * 2**20)
"""


@pytest.fixture
def found():
    """`found(code)`: the names of what speaks against carrying a program that has run the code and waits."""

    def look(code):
        program = f"import torch\ntorch.zeros(1, device='cuda')\n{code}\nprint('ready', flush=True)\ninput()"
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}  # a program opens all GPUs that it sees
        with subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout.readline() == "ready\n"
            machine = ThisMachine()
            seen = machine.process(process.pid)
            assert seen.uses_cuda, sorted(seen.threads)
            assert [gpu.index for gpu in machine.gpus() if gpu.minor in seen.minors] == [0], sorted(seen.mapped)
            result = obstacles(
                seen,
                tree=machine.tree(process.pid),
                sockets=machine.sockets(process.pid),
                mps_clients=machine.mps_clients(mps_pipes(seen)),
            )
            process.communicate("\n")
        return [each.name for each in result]

    return look


@pytest.mark.parametrize("code", [ORDINARY, WORKERS], ids=["ordinary", "data loader"])
def test_nothing_speaks_against_an_ordinary_program(found, code):
    assert found(code) == []


def test_nccl_is_seen(found):
    assert found(NCCL) == ["NCCL"]


def test_managed_memory_is_seen(found):
    assert found(MANAGED) == ["managed memory"]

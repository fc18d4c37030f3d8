"""Several GPUs sum and gather over NCCL what one does, bit for bit, and a process that is killed ends the job."""

import hashlib
import os
import signal

import psutil
import pytest
import torch

from warpbus.dist import SHARES, Group, Send, TreeSum, launch
from warpbus.errors import DeviceError

pytestmark = pytest.mark.multigpu

DTYPES = [
    *(torch.uint8, torch.int8, torch.int32, torch.bool),
    *(torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32),
]


def devices(count: int) -> list[torch.device]:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    return [torch.device("cuda", index) for index in range(count)]


def leaf(share: int, size: int) -> torch.Tensor:
    """Floats of very different size, so that their sum depends on the order.

    They are put together from integers: to which digit torch computes a power on the CPU depends on how many threads
    share the elements, and so on the number of processes.
    """
    generator = torch.Generator().manual_seed(share)
    exponents, fractions, signs = (
        torch.randint(low, high, (size, size), generator=generator, dtype=torch.int32)
        for low, high in ((127 - 24, 127 + 24), (0, 2**23), (0, 2))
    )
    return (exponents << 23 | fractions).view(torch.float32) * (1 - 2 * signs)


def job(group: Group, send: Send, sizes: list[int]) -> None:
    sums = []
    for size in sizes:
        for skipped in (None, 1, SHARES - 1):
            total = TreeSum(group, (size, size))
            for share in group.shares():
                if share != skipped:
                    total.add(share, leaf(share, size).to(group.device))
            sums.append(hashlib.sha256(total.total().cpu().numpy().tobytes()).hexdigest())
    gathered = []
    for dtype in DTYPES:
        lines = torch.arange(3 * SHARES, device=group.device).reshape(SHARES, 3)
        mine = lines[[share for share in group.shares() if share > 0]].to(dtype)
        for lengths in (None, [len([s for s in group.shares(rank) if s > 0]) for rank in range(group.world)]):
            everything = group.gather(mine, lengths)
            assert everything.dtype == dtype
            assert everything.device == group.device
            gathered.append(everything.float().tolist())
    send((sums, gathered))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_bits_are_those_of_one_gpu(count: int) -> None:
    got: list[object] = []
    launch(job, ([1, 5, 1000],), devices=devices(count), receive=got.append)
    alone: list[object] = []
    launch(job, ([1, 5, 1000],), devices=devices(1), receive=alone.append)
    assert got == alone * count


def end(group: Group, send: Send) -> None:
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.gather(torch.zeros(1, device=group.device))
    torch.cuda.synchronize()


def test_a_killed_process_ends_the_job() -> None:
    with pytest.raises(DeviceError, match=r"^process 1 on cuda:1 was killed by signal 9"):
        launch(end, (), devices=devices(2), receive=print)
    assert psutil.Process().children() == []

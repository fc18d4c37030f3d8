"""Processes that work together: what each is, what they add up, and how they are started."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from warpbus.dist import Group, joined_group
from warpbus.dist import group as module
from warpbus.dist.group import join
from warpbus.errors import DeviceError, UsageError

PROGRAM = """
import sys, torch
from warpbus.dist import joined_group
with joined_group("cpu") as group:
    tensor = torch.tensor([group.rank + 1.0, 10.0])
    group.sum(tensor)
    group.barrier()
    with open(f"{sys.argv[1]}/{group.rank}", "w") as file:
        file.write(f"{group.world} {group.device} {group.is_first} {tensor.tolist()} {group.alike()}")
        torch.backends.cpu.get_cpu_capability = lambda: str(group.rank // 2)
        file.write(f" {group.alike()}")
"""


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined_group("auto" if not torch.cuda.is_available() else "cpu") as group:
        assert (group.rank, group.world, group.device, group.is_first) == (0, 1, torch.device("cpu"), True)
        tensor = torch.tensor([3.0])
        assert group.sum(tensor) is tensor
        assert tensor.item() == 3.0
        group.barrier()
        assert group.alike()


def test_three_processes(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(program), str(tmp_path)], env=environment, capture_output=True, check=True)
    said = [(tmp_path / str(rank)).read_text(encoding="utf-8") for rank in range(3)]
    assert said == [f"3 cpu {rank == 0} [6.0, 30.0] True False" for rank in range(3)]


def test_each_process_takes_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, joined = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", joined.append)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: joined.append("left"))
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with joined_group("auto") as group:
        assert (group.rank, group.world, group.device) == (3, 4, torch.device("cuda", 1))
    assert taken == [torch.device("cuda", 1)]
    assert joined == ["nccl", "left"]
    with pytest.raises(UsageError, match="device cuda:0: 4 processes cannot share one GPU"), joined_group("cuda:0"):
        pass
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(DeviceError, match=r"cuda:2: this machine has 2 GPU"), joined_group("cuda"):
        pass


@pytest.mark.parametrize(
    "exchange",
    [
        lambda group: group.sum(torch.zeros(1)),
        lambda group: group.all_reduce(torch.zeros(1)),
        lambda group: group.all_gather(torch.zeros(1)),
        lambda group: group.broadcast(torch.zeros(1)),
        lambda group: group.gather(torch.zeros(1)),
        lambda group: group.gather(torch.zeros(1), [1, 1]),
        lambda group: group.smallest(3),
        lambda group: group.barrier(),
        lambda group: group.alike(),
        lambda group: group.meet(),
    ],
)
def test_who_exchanges_something_hears_why_nobody_came(exchange: Callable[[Group], object]) -> None:
    meeting: Future[None] = Future()
    meeting.set_exception(TimeoutError("nobody came"))
    with pytest.raises(TimeoutError, match="nobody came"):
        exchange(Group(0, 2, torch.device("cpu"), meeting=meeting))


def test_a_process_works_before_the_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    come, asked = threading.Event(), []

    def find(*arguments: object) -> None:
        asked.append(arguments)
        assert come.wait(60)

    monkeypatch.setattr(module, "_find_others", find)
    group = join("file:///nowhere", 1, 2, torch.device("cpu"))
    assert (group.rank, group.world) == (1, 2)
    assert group.meeting is not None
    assert not group.meeting.done()
    come.set()
    group.meet()
    assert asked == [("file:///nowhere", 1, 2, torch.device("cpu"))]

"""The processes of one job on `torch.distributed`: NCCL between GPUs, gloo between CPUs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed


@dataclass(frozen=True)
class Group:
    """One process's place among those of its job.

    Attributes:
        rank: 0 .. world - 1.
        world: how many processes there are.
        device: this process's own device.
    """

    rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True in the one process that reports and writes files."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` up over the processes, in place."""
        if self.world > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.world > 1:
            torch.distributed.barrier()


@contextmanager
def joined_group(device_type: str) -> Iterator[Group]:
    """Join the job that `RANK`, `WORLD_SIZE` and `LOCAL_RANK` describe (torchrun sets them), or be alone.

    Args:
        device_type: "cuda" or "cpu".
    """
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world == 1:
        yield Group(0, 1, device)
        return
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Group(rank, world, device)
    finally:
        torch.distributed.destroy_process_group()

"""The processes of one job on `torch.distributed`: NCCL between GPUs, gloo between CPUs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed

from warpbus.cuda.devices import resolve_device
from warpbus.errors import UsageError


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
def joined_group(device: str) -> Iterator[Group]:
    """Join the job that `RANK`, `WORLD_SIZE` and `LOCAL_RANK` describe (torchrun sets them), or be alone.

    Args:
        device: as in `resolve_device`; in a job of several processes each takes the GPU of its local rank.

    Raises:
        UsageError: a device that is no name, or one GPU for several processes.
        DeviceError: a GPU that is not there.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    own = resolve_device(device)
    if world > 1 and own.type == "cuda":
        if ":" in device:
            raise UsageError(f"device {device}: {world} processes cannot share one GPU: give cuda or auto")
        own = resolve_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    if own.type == "cuda":
        torch.cuda.set_device(own)
    if world == 1:
        yield Group(0, 1, own)
        return
    torch.distributed.init_process_group("nccl" if own.type == "cuda" else "gloo")
    try:
        yield Group(rank, world, own)
    finally:
        torch.distributed.destroy_process_group()

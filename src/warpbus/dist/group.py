"""The processes of one job on `torch.distributed`: NCCL between GPUs, gloo between CPUs."""

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from hashlib import sha256

import torch
import torch.distributed

from warpbus.cuda.devices import resolve_device
from warpbus.dist.peers import Peers
from warpbus.dist.shares import SHARES
from warpbus.errors import UsageError

# How long a process waits for the others, at their start and in an exchange by gloo or NCCL, before the job ends:
# longer than any honest wait, as for the one that checks what an earlier run has written.
_PATIENCE = timedelta(minutes=30)

# torch 2.13 renamed it.
_all_gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor


@dataclass(frozen=True)
class Group:
    """One process's place among those of its job.

    Attributes:
        rank: 0 .. world - 1.
        world: how many processes there are.
        device: this process's own device.
        peers: what exchanges small tensors of GPUs, and otherwise why nothing does; see `linked`.
        meeting: done once the processes have found each other, see `meet`; `None` where they have.
    """

    rank: int
    world: int
    device: torch.device
    peers: Peers | str | None = None
    meeting: Future[None] | None = field(default=None, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        """True in the one process that reports and writes files."""
        return self.rank == 0

    def meet(self) -> None:
        """Wait until the processes have found each other.

        The first exchange does so by itself; who calls `torch.distributed` calls this before. It raises what kept them
        from it.
        """
        if self.meeting is not None:
            self.meeting.result()

    def linked(self) -> "Group":
        """The same group with the quickest `all_reduce` and `all_gather` of its devices; every process calls it.

        GPUs of one machine that reach each other's memory exchange small tensors through it (`Peers`), and all others
        by NCCL. `describe` tells which.
        """
        if self.world == 1 or self.device.type != "cuda" or self.peers is not None:
            return self
        self.meet()
        return replace(self, peers=Peers.open(self.rank, self.world, self.device), meeting=None)

    def describe(self) -> str:
        """How it exchanges tensors: "4 GPUs: up to 512 KiB through each other's memory, others by NCCL"."""
        if self.device.type != "cuda":
            return f"{self.world} CPU process{'es' if self.world > 1 else ''}"
        if self.world == 1:
            return "1 GPU"
        if isinstance(self.peers, Peers):
            size = Peers.most_bytes // 1024
            return f"{self.world} GPUs: up to {size} KiB through each other's memory, others by NCCL"
        return f"{self.world} GPUs: all by NCCL" + (f" ({self.peers})" if self.peers else "")

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` up over the processes, in place."""
        if self.world > 1:
            self.meet()
            torch.distributed.all_reduce(tensor)
        return tensor

    def all_reduce(self, tensor: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of the processes' tensors, plus `residual`, on every process.

        Args:
            tensor: floating, of one shape and dtype on all processes; its content is lost.
            residual: alike, the same on all processes.

        Returns:
            the same bits on every process and at every run. Added in float32 in the order of ranks and rounded once
            where the sum is taken by `Peers` (see `linked`) or on the CPU; NCCL adds in the tensors' dtype. It can be
            captured in a CUDA graph.
        """
        if self.world == 1:
            return tensor if residual is None else residual + tensor
        if tensor.device.type == "cpu":
            total = self.all_gather(tensor).float().cumsum(0)[-1]
            return (total if residual is None else residual.float() + total).to(tensor.dtype)
        if isinstance(self.peers, Peers) and self.peers.takes(tensor):
            return self.peers.sum(tensor, residual)
        self.meet()
        tensor = tensor.contiguous()
        torch.distributed.all_reduce(tensor)
        return tensor if residual is None else tensor.add_(residual)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all processes, `[world, ...]`, in rank order; they have one shape and dtype."""
        if isinstance(self.peers, Peers) and self.peers.takes(tensor):
            return self.peers.gather(tensor)
        tensor = tensor.contiguous()
        gathered = tensor.new_empty(self.world, *tensor.shape)
        if self.world == 1:
            return gathered.copy_(tensor[None])
        self.meet()
        # As bytes: the transports do not know every dtype.
        into, own = (part.view(-1).view(torch.uint8) for part in (gathered, tensor))
        _all_gather(into, own)
        return gathered

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill `tensor` with that of rank 0, in place; contiguous, of one shape and dtype on all processes."""
        if self.world > 1:
            self.meet()
            torch.distributed.broadcast(tensor.view(-1).view(torch.uint8), 0)
        return tensor

    def smallest(self, value: int) -> int:
        """The smallest of the processes' values, on every process: of what they have room for, for instance."""
        if self.world == 1:
            return value
        self.meet()
        least = torch.tensor([value], dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        return int(least)

    def alike(self) -> bool:
        """Whether the processes' devices are of one kind, on which the same work gives the same bits; all call it."""
        of_cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        kind = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else of_cpu
        digest = sha256(f"{kind}, torch {torch.__version__}".encode()).digest()[:16]
        kinds = self.all_gather(torch.tensor(list(digest), dtype=torch.uint8, device=self.device))
        return bool((kinds == kinds[0]).all())

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.world > 1:
            self.meet()
            torch.distributed.barrier()

    def shares(self, rank: int | None = None) -> range:
        """The shares of `SHARES` that a rank does, this process's own if none is given.

        Raises:
            UsageError: if there are more processes than shares.
        """
        if self.world > SHARES:
            raise UsageError(
                f"{self.world} processes: the work is cut into {SHARES} shares: use at most {SHARES} processes"
            )
        rank = self.rank if rank is None else rank
        return range(SHARES * rank // self.world, SHARES * (rank + 1) // self.world)

    def gather(self, tensor: torch.Tensor, lengths: Sequence[int] | None = None) -> torch.Tensor:
        """Concatenate the processes' tensors along axis 0 in rank order, on every process.

        Args:
            tensor: [n, ...] of any dtype; n may differ between processes, dtype and the other axes may not.
            lengths: n of each rank, where the caller knows them; it saves a wait for the device.
        """
        if self.world == 1:
            return tensor
        lengths = self._lengths(len(tensor)) if lengths is None else lengths
        gathered = tensor.new_empty((sum(lengths), *tensor.shape[1:]))
        parts = list(gathered.split(list(lengths)))
        parts[self.rank].copy_(tensor)
        others = [rank for rank in range(self.world) if rank != self.rank]
        self.exchange([(rank, parts[self.rank]) for rank in others], [(rank, parts[rank]) for rank in others])
        return gathered

    def exchange(self, sent: Iterable[tuple[int, torch.Tensor]], received: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Send tensors to ranks and fill tensors from ranks, all at once; every process of the group calls it.

        Tensors are contiguous, of any dtype, and not empty on one side only. Those from one rank to another are matched
        in their order.
        """
        self.meet()
        distributed = torch.distributed
        operations = [
            # As bytes: the transports do not know every dtype.
            distributed.P2POp(operation, tensor.view(-1).view(torch.uint8), rank)
            for operation, messages in ((distributed.isend, sent), (distributed.irecv, received))
            for rank, tensor in messages
            if tensor.numel()
        ]
        # In a batch NCCL uses the communicator of the whole group instead of opening one for each pair.
        for work in distributed.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def _lengths(self, own: int) -> list[int]:
        lengths = torch.zeros(self.world, dtype=torch.int64, device=self.device)
        lengths[self.rank] = own
        return self.sum(lengths).tolist()


def join(meeting: str, rank: int, world: int, device: torch.device) -> Group:
    """Take this process's place among those of a job; `device` is its own.

    It returns at once: to find each other takes GPUs seconds, in which a process can prepare what is its own (see
    `Group.meet`). When they have met, all are there and have exchanged something, so that the job's first exchange is
    a quick one: a GPU has its context, and NCCL its communicator, which it makes at once because it is told the device.

    A process that waits for another one for half an hour, here or in an exchange, gives up, and so ends the job: gloo
    raises an exception, NCCL's watchdog kills the process, and a GPU that waits in an exchange of `Peers` stops with an
    error that names the other (`lost_peer`). A process that dies ends the job at once, and one that stands still after
    `Patience.limit`, see `Processes`.

    Args:
        meeting: where the processes find each other: `file:///PATH` of a new file, or `tcp://HOST:PORT`, free on the
            machine of rank 0.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world == 1:
        return Group(rank, world, device)
    background = ThreadPoolExecutor(1, "meeting")
    found = background.submit(_find_others, meeting, rank, world, device)
    background.shutdown(wait=False)
    return Group(rank, world, device, meeting=found)


def _find_others(meeting: str, rank: int, world: int, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has its own
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=meeting,
        rank=rank,
        world_size=world,
        timeout=_PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )
    Group(rank, world, device).gather(torch.zeros(1, device=device), [1] * world)


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

"""The process group of a job, on `torch.distributed`: NCCL between GPUs, gloo between CPUs."""

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

# Timeout of the rendezvous and of gloo and NCCL collectives: longer than any legitimate wait, such as for a process
# that checks the files of an earlier run.
_PATIENCE = timedelta(minutes=30)

# torch 2.13 renamed it.
_all_gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor


@dataclass(frozen=True)
class Group:
    """The process group of a job, as one of its processes sees it.

    Attributes:
        rank: 0 .. world - 1.
        world: number of processes.
        device: this process's device.
        peers: exchanges small GPU tensors, or the reason why there is no peer memory; see `linked`.
        meeting: completes when the processes are connected, see `meet`; None if they are.
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
        """Wait until the processes are connected; raises the error if that failed.

        The methods of this class call it. Call it before using `torch.distributed` directly.
        """
        if self.meeting is not None:
            self.meeting.result()

    def linked(self) -> "Group":
        """The same group with the fastest `all_reduce` and `all_gather` of its devices; every process calls it.

        GPUs of one machine with peer access exchange small tensors through peer memory (`Peers`) and others by NCCL.
        `describe` tells which is used.
        """
        if self.world == 1 or self.device.type != "cuda" or self.peers is not None:
            return self
        self.meet()
        return replace(self, peers=Peers.open(self.rank, self.world, self.device), meeting=None)

    def describe(self) -> str:
        """How tensors are exchanged: "4 GPUs: up to 512 KiB through each other's memory, others by NCCL"."""
        if self.device.type != "cuda":
            return f"{self.world} CPU process{'es' if self.world > 1 else ''}"
        if self.world == 1:
            return "1 GPU"
        if isinstance(self.peers, Peers):
            size = Peers.most_bytes // 1024
            return f"{self.world} GPUs: up to {size} KiB through each other's memory, others by NCCL"
        return f"{self.world} GPUs: all by NCCL" + (f" ({self.peers})" if self.peers else "")

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce `tensor` over the processes, in place."""
        if self.world > 1:
            self.meet()
            torch.distributed.all_reduce(tensor)
        return tensor

    def all_reduce(self, tensor: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of the processes' tensors, plus `residual`, on every process.

        Args:
            tensor: floating point, of the same shape and dtype on all processes; its content is overwritten.
            residual: same shape and dtype, equal on all processes.

        Returns:
            the sum, bit-identical on every process and in every run. `Peers` (see `linked`) and the CPU add in float32
            in rank order and round once; NCCL adds in the tensors' dtype. Can be captured in a CUDA graph.
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
        """The tensors of all processes, `[world, ...]`, in rank order; all have the same shape and dtype."""
        if isinstance(self.peers, Peers) and self.peers.takes(tensor):
            return self.peers.gather(tensor)
        tensor = tensor.contiguous()
        gathered = tensor.new_empty(self.world, *tensor.shape)
        if self.world == 1:
            return gathered.copy_(tensor[None])
        self.meet()
        # As bytes: the transports do not support every dtype.
        into, own = (part.view(-1).view(torch.uint8) for part in (gathered, tensor))
        _all_gather(into, own)
        return gathered

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the tensor of rank 0 into `tensor`; contiguous, of the same shape and dtype on all processes."""
        if self.world > 1:
            self.meet()
            torch.distributed.broadcast(tensor.view(-1).view(torch.uint8), 0)
        return tensor

    def smallest(self, value: int) -> int:
        """The minimum of the processes' values, on every process."""
        if self.world == 1:
            return value
        self.meet()
        least = torch.tensor([value], dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        return int(least)

    def alike(self) -> bool:
        """Whether all devices are one model, so that equal work has bit-identical results; every process calls it."""
        of_cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        kind = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else of_cpu
        digest = sha256(f"{kind}, torch {torch.__version__}".encode()).digest()[:16]
        kinds = self.all_gather(torch.tensor(list(digest), dtype=torch.uint8, device=self.device))
        return bool((kinds == kinds[0]).all())

    def barrier(self) -> None:
        """Wait until every process has called this."""
        if self.world > 1:
            self.meet()
            torch.distributed.barrier()

    def shares(self, rank: int | None = None) -> range:
        """The shares, of `SHARES`, that a rank processes; by default this process's.

        Raises:
            UsageError: there are more processes than shares.
        """
        if self.world > SHARES:
            raise UsageError(f"{self.world} processes: the work has {SHARES} shares: use at most {SHARES} processes")
        rank = self.rank if rank is None else rank
        return range(SHARES * rank // self.world, SHARES * (rank + 1) // self.world)

    def gather(self, tensor: torch.Tensor, lengths: Sequence[int] | None = None) -> torch.Tensor:
        """Concatenate the processes' tensors along axis 0 in rank order, on every process.

        Args:
            tensor: `[n, ...]` of any dtype; only n may differ between processes.
            lengths: n of each rank, if the caller knows them; this saves a synchronization.
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

    def gather_each(self, tensors: Sequence[torch.Tensor], lengths: Sequence[int] | None = None) -> list[torch.Tensor]:
        """As `gather`, of several tensors of one shape and dtype, in one message."""
        if self.world == 1:
            return list(tensors)
        if len(tensors) == 1:
            return [self.gather(tensors[0], lengths)]
        return [each.contiguous() for each in self.gather(torch.stack(list(tensors), 1), lengths).unbind(1)]

    def exchange(self, sent: Iterable[tuple[int, torch.Tensor]], received: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Send tensors to ranks and receive tensors from ranks, all at once; every process of the group calls it.

        Tensors are contiguous, of any dtype, and empty on both sides or on none. Tensors from one rank to another are
        matched in order.
        """
        self.meet()
        distributed = torch.distributed
        operations = [
            # As bytes: the transports do not support every dtype.
            distributed.P2POp(operation, tensor.view(-1).view(torch.uint8), rank)
            for operation, messages in ((distributed.isend, sent), (distributed.irecv, received))
            for rank, tensor in messages
            if tensor.numel()
        ]
        # In a batch NCCL uses the communicator of the whole group instead of creating one per pair.
        for work in distributed.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def _lengths(self, own: int) -> list[int]:
        lengths = torch.zeros(self.world, dtype=torch.int64, device=self.device)
        lengths[self.rank] = own
        return self.sum(lengths).tolist()


def join(meeting: str, rank: int, world: int, device: torch.device) -> Group:
    """Join the process group of a job with this process and its device.

    Returns immediately: connecting takes seconds on GPUs, in which a process can do local work (see `Group.meet`). Once
    connected, contexts and communicators exist and one exchange has run, so that the job's first exchange is fast.

    A process that waits for another one for half an hour, here or in a collective, ends the job: gloo raises an
    exception, NCCL's watchdog kills the process, and a kernel of `Peers` aborts with an error that names the other GPU
    (`lost_peer`). A process that dies ends the job immediately; a stalled one after `Patience.limit`, see `Processes`.

    Args:
        meeting: the rendezvous address: `file:///PATH` of a new file, or `tcp://HOST:PORT` with a free port on the
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
        torch.cuda.set_device(device)  # the current device is per thread
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
    """Join the job described by `RANK`, `WORLD_SIZE` and `LOCAL_RANK` (set by torchrun), or a group of one process.

    Args:
        device: as `resolve_device`; in a job of several processes each uses the GPU of its local rank.

    Raises:
        UsageError: the device name is invalid, or several processes would share one GPU.
        DeviceError: the GPU does not exist.
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

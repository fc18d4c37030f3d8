"""Low-latency collectives through peer-to-peer memory of the GPUs of one machine."""

import os
import socket
import weakref
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from warpbus.errors import DeviceError
from warpbus.kernels.ops.peers import (
    MOST_BYTES,
    MOST_RANKS,
    PATIENCE,
    buffer_bytes,
    fits,
    new_epochs,
    peer_gather,
    peer_sum,
)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# Reasons against peer memory; the processes agree on the last one that any of them found.
_REASONS = (
    "",
    f"more than {MOST_RANKS} GPUs",
    "processes on several machines",
    "a process does not see the others' GPUs",
    "GPUs that do not reach each other's memory",
    "torch could not share the GPUs' memory",
)


class Peers:
    """Exchanges tensors of up to `MOST_BYTES` through the GPUs' memory (`warpbus.kernels.ops.peers`).

    The exchanges of a group have to run in the same order on all GPUs, one after the other: on one stream, or on
    streams that wait for each other. They can be captured in CUDA graphs.

    A kernel that waits for another GPU for more than `PATIENCE` seconds aborts: the next CUDA call fails, and
    `lost_peer` returns the reason.
    """

    most_bytes = MOST_BYTES

    def __init__(self, memory: Tensor, addresses: list[int], rank: int) -> None:
        self._memory = memory  # keeps the memory allocated
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        self._epochs = new_epochs(memory.device)
        self._rank = rank
        self._missing = torch.zeros(1, dtype=torch.int32, pin_memory=memory.is_cuda)
        _opened.add(self)

    @classmethod
    def open(cls, rank: int, world: int, device: torch.device) -> "Peers | str":
        """Set up peer memory; every process of the job calls this with its own GPU.

        Returns:
            the `Peers`, or the reason why there is no peer memory.
        """
        if reason := _agreed(_obstacle(rank, world, device), device):
            return reason
        # Multicast is not used, and its setup can fail.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        found: Peers | None = None
        try:
            memory = symmetric_memory.empty(buffer_bytes(world), dtype=torch.uint8, device=device)
            memory.zero_()
            torch.cuda.synchronize(device)
            everyone = torch.distributed.group.WORLD
            assert everyone is not None
            handle = symmetric_memory.rendezvous(memory, everyone.group_name)
            addresses = [int(address) for address in handle.buffer_ptrs]
            if addresses[rank] == memory.data_ptr():
                found = cls(memory, addresses, rank)
        except RuntimeError:
            found = None
        # This also waits until the memory of all other processes is zero.
        reason = _agreed(0 if found is not None else len(_REASONS) - 1, device)
        torch.cuda.synchronize(device)
        return reason or found or ""

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is small enough; depends only on its size, so that all GPUs agree."""
        return fits(tensor)

    def sum(self, tensor: Tensor, residual: Tensor | None) -> Tensor:
        """See `peer_sum`.

        Raises:
            DeviceError: another GPU did not take part in an earlier exchange.
        """
        self._check()
        return peer_sum(tensor, residual, self._addresses, self._epochs, self._rank, self._missing)

    def gather(self, tensor: Tensor) -> Tensor:
        """See `peer_gather`.

        Raises:
            DeviceError: another GPU did not take part in an earlier exchange.
        """
        self._check()
        return peer_gather(tensor, self._addresses, self._epochs, self._rank, self._missing)

    def failure(self) -> DeviceError | None:
        """The error of an exchange that another GPU did not take part in, or None. It reads host memory only."""
        missing = int(self._missing)
        if not missing:
            return None
        return DeviceError(
            f"GPU {self._rank} waited {PATIENCE:g} s for GPU {missing - 1} in an exchange: the process of GPU "
            f"{missing - 1} is stuck or runs different code; see its output, and start the job again"
        )

    def _check(self) -> None:
        if error := self.failure():
            raise error


_opened: weakref.WeakSet[Peers] = weakref.WeakSet()


def lost_peer() -> DeviceError | None:
    """The first `Peers.failure` of this process, which explains CUDA's "unspecified launch failure"; None if none."""
    return next((error for peers in _opened if (error := peers.failure())), None)


def _obstacle(rank: int, world: int, device: torch.device) -> int:
    """The index in `_REASONS` that this process finds; 0 if nothing prevents peer memory."""
    machine = sha256(socket.gethostname().encode())
    if _BOOT_ID.is_file():
        machine.update(_BOOT_ID.read_bytes())
    own = machine.digest()[:16] + _uuid(device.index)
    cards = torch.zeros(world, len(own), dtype=torch.int32, device=device)
    cards[rank] = torch.tensor(list(own), dtype=torch.int32)
    torch.distributed.all_reduce(cards)
    all_cards = [bytes(card) for card in cards.tolist()]
    if world > MOST_RANKS:
        return 1
    if any(card[:16] != own[:16] for card in all_cards):
        return 2
    visible = {_uuid(index): index for index in range(torch.cuda.device_count())}
    others = [card[16:] for other, card in enumerate(all_cards) if other != rank]
    if any(uuid not in visible for uuid in others):
        return 3
    reached = (torch.cuda.can_device_access_peer(device.index, visible[uuid]) for uuid in others)
    return 0 if all(reached) else 4


def _uuid(index: int) -> bytes:
    return bytes.fromhex(str(torch.cuda.get_device_properties(index).uuid).replace("-", ""))


def _agreed(reason: int, device: torch.device) -> str:
    """The reason with the highest index that any process found, the same on all processes."""
    gravest = torch.tensor([reason], device=device)
    torch.distributed.all_reduce(gravest, torch.distributed.ReduceOp.MAX)
    return _REASONS[int(gravest)]

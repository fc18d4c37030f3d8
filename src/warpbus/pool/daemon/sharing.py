"""The GPUs that a machine offers to its pool, and the environment that shows a tenant's process its part of one.

A machine without a GPU offers its CPU as if it were one.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from warpbus.cuda import mps
from warpbus.cuda.cpu import cpu_model
from warpbus.cuda.devices import free_memory
from warpbus.cuda.inventory import InstalledGpu, Inventory
from warpbus.cuda.memory_size import parse_memory, short_size
from warpbus.errors import DeviceError, UsageError
from warpbus.pool.broker.leases import PoolGpu
from warpbus.pool.daemon.options import PoolOptions
from warpbus.pool.tenant.storages import allowance

# The memory that libraries and CUDA itself take on a GPU per process, besides PyTorch's. MPS has to allow it.
_CONTEXT = 1 << 30
# The daemon has a descriptor of each 32 MiB.
_MOST_LINK_MEMORY = 8 << 30


class SharedGpus:
    """This machine's GPUs. As a context manager it keeps the MPS daemons running by which they are shared.

    Attributes:
        gpus: in the form for the broker.
        device: the device type that a process uses for its GPU: "cuda" or "cpu".
        mps: whether MPS shares them; otherwise time slices do.
        swap_limit: bytes of host memory for leases that are swapped out.
        link_memory_limit: bytes of host memory that leases may share in groups, see `LinkMemories`.

    Raises:
        UsageError: amounts of memory are not possible, or MPS is requested where it cannot run.
        DeviceError: CUDA_VISIBLE_DEVICES names none of the GPUs; on entering, MPS does not start.
    """

    def __init__(self, options: PoolOptions) -> None:
        self._installed = _visible() if torch.cuda.is_available() else []
        self._stack = ExitStack()
        self._daemons: list[mps.ControlDaemon] = []
        self._queues = options.home / "queues"
        why = mps.available() if self._installed else "this machine has no NVIDIA GPU"
        if options.sharing == "mps" and why is not None:
            raise UsageError(f"--sharing mps: {why}; give slices")
        self.mps = why is None and options.sharing != "slices"
        if self._installed:
            self.device = "cuda"
            self.gpus = [_offered(options, self._installed, index) for index in range(len(self._installed))]
        else:
            self.device = "cpu"
            memory = parse_memory(options.cpu_memory, free_memory(torch.device("cpu")), what="--cpu-memory")
            model = f"CPU ({cpu_model()})"
            self.gpus = [
                PoolGpu(f"{options.name}/0", options.name, 0, model, memory, oversubscribe=options.oversubscribe)
            ]
        self.swap_limit = self._swap_limit(options) if options.oversubscribe > 1 else 0
        self.link_memory_limit = min(_MOST_LINK_MEMORY, (free_memory(torch.device("cpu")) or 0) // 8)

    def _swap_limit(self, options: PoolOptions) -> int:
        offered = sum(gpu.memory for gpu in self.gpus)
        free = free_memory(torch.device("cpu")) or 0
        left = free if self._installed else max(0, free - offered)
        limit = parse_memory(options.swap_memory, left, what="--swap-memory")
        least = sum(gpu.promised for gpu in self.gpus) - offered
        if limit < least:
            raise UsageError(
                f"--oversubscribe {options.oversubscribe:g} promises {short_size(least)} more than there is, and "
                f"--swap-memory {options.swap_memory} is {short_size(limit)} of host memory: promise less, or give more"
            )
        return limit

    def __enter__(self) -> Self:
        if self._installed and not self.mps:
            self._queues.mkdir(mode=0o700, exist_ok=True)
        if self.mps:
            self._daemons = [mps.ControlDaemon.of_gpu(gpu) for gpu in self._installed]
            with ExitStack() as stack:
                for daemon in self._daemons:
                    stack.enter_context(daemon.client())
                self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def queue_file(self, gpu: str) -> str | None:
        """The queue file of a GPU that tenants share by time slices (`warpbus.pool.tenant.time_slices`), else None."""
        if self.mps or not self._installed:
            return None
        path = self._queues / gpu.partition("/")[2]
        path.touch(mode=0o600)
        return str(path)

    def directories(self) -> list[Path]:
        """The directories that tenants' processes share: the queues of time slices, and the pipes to MPS."""
        return [*([self._queues] if self._queues.exists() else ()), *(each.pipes for each in self._daemons)]

    def environment(self, gpu: str, memory: int, share: float) -> dict[str, str]:
        """The environment variables that show a process one GPU and, with MPS, only the part of its lease."""
        if not self._installed:
            return {}
        index = next(each.index for each in self.gpus if each.name == gpu)
        if self._daemons:
            return self._daemons[index].environment() | mps.limits(memory + allowance(memory) + _CONTEXT, share)
        return {"CUDA_VISIBLE_DEVICES": self._installed[index].uuid}

    def threads(self, share: float) -> int:
        """CPU threads of a tenant's process."""
        cores = len(os.sched_getaffinity(0))
        if self._installed:
            return max(1, cores // (4 * len(self._installed)))
        return max(1, round(cores * share))

    def measured(self) -> dict[str, InstalledGpu]:
        """The current measurements of the driver by GPU; empty if it has none."""
        if not self._installed:
            return {}
        try:
            now = {gpu.uuid: gpu for gpu in Inventory().gpus()}
        except DeviceError:
            return {}
        return {
            gpu.name: found
            for gpu, installed in zip(self.gpus, self._installed, strict=True)
            if (found := now.get(installed.uuid)) is not None
        }


def _visible() -> list[InstalledGpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order."""
    found = Inventory().gpus()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return found
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    chosen = [gpu for name in names for gpu in found if name == str(gpu.index) or gpu.uuid.startswith(name)]
    if not chosen:
        raise DeviceError(f"CUDA_VISIBLE_DEVICES is {wanted!r}: none of this machine's {len(found)} GPUs: change it")
    return chosen


def _offered(options: PoolOptions, installed: list[InstalledGpu], index: int) -> PoolGpu:
    gpu, inventory = installed[index], Inventory()
    memory = gpu.memory - parse_memory(options.gpu_memory_reserve, gpu.memory, what="--gpu-memory-reserve")
    if memory <= 0:
        raise UsageError(f"--gpu-memory-reserve {options.gpu_memory_reserve}: nothing is left of {gpu.name}: give less")
    links = tuple(
        f"{options.name}/{number}"
        for number, other in enumerate(installed)
        if number != index and inventory.linked(gpu, other)
    )
    return PoolGpu(f"{options.name}/{index}", options.name, index, gpu.name, memory, links, options.oversubscribe)

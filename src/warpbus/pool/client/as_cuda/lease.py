"""The lease of a process under `warpbus pool run --remote`: asked for when the program first uses the device."""

import atexit
import os
import sys
import threading
from pathlib import Path

import torch

from warpbus.errors import UsageError
from warpbus.pool.client.gpu import Gpu, connect
from warpbus.pool.client.session import Session, current

REMOTE = torch.device("privateuseone", 0)
"""The leased device, by the name that it has in PyTorch's dispatcher."""

CUDA = torch.device("cuda", 0)
"""The same, by the name that programs see."""

_lock = threading.Lock()
_gpu: Gpu | None = None
_seed: int | None = None


def lease() -> Gpu:
    """The leased GPU. The first call asks the pool for it, and waits as long as the pool has no room.

    Raises:
        WarpbusError: as `connect`.
    """
    global _gpu
    if _gpu is None:
        with _lock:
            if _gpu is None:
                _gpu = _connected()
    return _gpu


def session() -> Session:
    """The session of the lease.

    Raises:
        StateError: the program has ended the lease, or this process is a forked child of the one that has it.
        WarpbusError: as `connect`.
    """
    lease()
    return current()


def is_leased() -> bool:
    """Whether the lease has been requested."""
    return _gpu is not None


def seed(number: int) -> None:
    """Seed the generator of the device now, or when there is a lease."""
    global _seed
    _seed = number % (1 << 64)
    if _gpu is not None:
        current().seed(_seed)


def initial_seed() -> int:
    """The number that the generator was seeded with last; PyTorch's default if it never was."""
    return torch.default_generator.initial_seed() if _seed is None else _seed


def _connected() -> Gpu:
    given = os.environ
    address, memory = given.get("WARPBUS_POOL"), given.get("WARPBUS_POOL_MEMORY")
    if not address or not memory:
        raise UsageError(
            "WARPBUS_POOL and WARPBUS_POOL_MEMORY are not set: start the program by warpbus pool run --remote"
        )
    share = given.get("WARPBUS_POOL_SHARE", "1.0")
    try:
        part = float(share)
    except ValueError:
        raise UsageError(f"WARPBUS_POOL_SHARE is {share!r}: give a number above 0 and at most 1") from None
    gpu = connect(address, memory=memory, share=part, on=given.get("WARPBUS_POOL_ON"), queued=_say)
    atexit.register(gpu.close)
    if listed := given.get("WARPBUS_POOL_LEASES"):
        with Path(listed).open("a") as file:  # `pool run` releases what a killed process leaves behind
            file.write(f"{gpu.lease}\n")
    if _seed is not None:
        current().seed(_seed)
    return gpu


def _say(place: int, why: str) -> None:
    print(f"warpbus pool: place {place} in the queue: {why}", file=sys.stderr, flush=True)

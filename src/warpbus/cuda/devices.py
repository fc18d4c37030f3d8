"""The meaning of the flags `--device` and `--dtype`, and the context and the stream in which a thread launches."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from warpbus.cuda.dtype_names import DTYPE_NAMES, dtype_name
from warpbus.cuda.remote import REMOTE, is_gpu, remote_backend
from warpbus.errors import DeviceError, UsageError

_in_thread = threading.local()

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


def resolve_device(device: str | torch.device) -> torch.device:
    """The device that a flag means; "auto" is the first GPU, or the CPU where there is none.

    Raises:
        UsageError: not a name that Warpbus knows.
        DeviceError: a GPU that is not there, or a remote one that is not connected.
    """
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if str(device).partition(":")[0] == REMOTE:
        return _resolve_remote(device, found)
    if found.type not in ("cpu", "cuda"):
        raise UsageError(
            f"device is {str(device)!r}: give auto, cpu, cuda or cuda:N, or {REMOTE} where a remote GPU is connected"
        )
    if found.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = found.index or 0
    if count == 0:
        raise DeviceError(f"device {device}: torch sees no GPU: use --device cpu, or see what warpbus doctor says")
    if index >= count:
        raise DeviceError(f"device {device}: this machine has {count} GPU(s), cuda:0 to cuda:{count - 1}: choose one")
    return torch.device("cuda", index)


def _resolve_remote(device: str | torch.device, found: torch.device) -> torch.device:
    backend = remote_backend(found)
    if backend is None:
        raise DeviceError(
            f"device {device}: no remote GPU is connected: connect first, by "
            "gpu = warpbus.pool.connect('warpbus://host:7700', memory='8GB')"
        )
    if found.index:
        raise DeviceError(f"device {device}: a process has one remote GPU: give {REMOTE} or {REMOTE}:0")
    backend.check()
    return torch.device(REMOTE, 0)


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype that a flag means.

    Raises:
        UsageError: not one of `DTYPE_NAMES`.
    """
    return DTYPES[dtype_name(dtype)]


def default_dtype(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """The dtype in which a checkpoint stored as `stored` is computed: float32 on the CPU, its own 16 bits on a GPU.

    On a remote device it is what is behind that counts.
    """
    return stored if is_gpu(device) and stored in DTYPES.values() else torch.float32


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process can still have on a device; `None` where the system does not say.

    Of main memory it is what the kernel calls available, or what is left up to the limit of a container (cgroup); of a
    remote device, what the lease has left.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    backend = remote_backend(device)
    if backend is not None:
        return backend.free_memory()
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([available, *_left_in_cgroups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def _left_in_cgroups(root: Path, membership: Path) -> list[int]:
    """The bytes left in each group (cgroup v2) that has a limit, from that of this process up to the root."""
    try:
        names = [line.removeprefix("0::/") for line in membership.read_text().splitlines() if line.startswith("0::/")]
    except OSError:
        return []
    left = []
    for group in [place for name in names for place in (root / name, *(root / name).parents)]:
        try:
            limit, used = ((group / f"memory.{what}").read_text().strip() for what in ("max", "current"))
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:  # the root has no limit, and a container does not see what is above it
            continue
        if limit != "max":
            # Pages of files are given back when they are needed.
            files = sum(int(counts.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
            left.append(max(0, int(limit) - int(used) + files))
    return left


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory of a multiprocessor of a GPU, which the blocks that it runs at a time share."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


def enter_context() -> None:
    """Give this thread a CUDA context, which the driver's functions need.

    A thread that has not called CUDA yet has none: those of torch that compute gradients, for one.
    """
    if not getattr(_in_thread, "has_context", False):
        torch.cuda.set_device(torch.cuda.current_device())
        _in_thread.has_context = True


@contextmanager
def running_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Let this thread's torch launch on a stream, behind what it launched before, and ahead of what comes then."""
    before = torch.cuda.current_stream(stream.device)
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)

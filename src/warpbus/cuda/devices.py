"""What the flags `--device` and `--dtype` mean, and the context that the driver wants of each thread."""

import threading

import torch

from warpbus.errors import DeviceError, UsageError

_in_thread = threading.local()

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def resolve_device(device: str | torch.device) -> torch.device:
    """The device that a flag means; "auto" is the first GPU, or the CPU where there is none.

    Raises:
        UsageError: not a name that Warpbus knows.
        DeviceError: a GPU that is not there.
    """
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"device is {str(device)!r}: give auto, cpu, cuda or cuda:N")
    if found.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = found.index or 0
    if count == 0:
        raise DeviceError(f"device {device}: torch sees no GPU: use --device cpu, or see what warpbus doctor says")
    if index >= count:
        raise DeviceError(f"device {device}: this machine has {count} GPU(s), cuda:0 to cuda:{count - 1}: choose one")
    return torch.device("cuda", index)


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype that a flag means.

    Raises:
        UsageError: not one of `DTYPES`.
    """
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise UsageError(f"dtype is {str(dtype)!r}: give auto, {', '.join(DTYPES)}")
    return found


def default_dtype(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """What a checkpoint stored as `stored` is computed in: float32 on the CPU, its own 16 bits on a GPU."""
    return stored if device.type == "cuda" and stored in DTYPES.values() else torch.float32


def enter_context() -> None:
    """Give this thread a CUDA context, which the driver's functions need.

    A thread that has not called CUDA yet has none: those of torch that compute gradients, for one.
    """
    if not getattr(_in_thread, "has_context", False):
        torch.cuda.set_device(torch.cuda.current_device())
        _in_thread.has_context = True

"""The functions of `torch.cuda` for the leased GPU; unsupported ones raise NotImplementedError."""

import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpbus.pool.client.as_cuda import streams
from warpbus.pool.client.as_cuda.lease import initial_seed, is_leased, lease, seed, session
from warpbus.pool.client.as_cuda.translation import check_index
from warpbus.pool.client.session import is_forked


@dataclass(frozen=True)
class DeviceProperties:
    """The result of `torch.cuda.get_device_properties` for a leased GPU.

    Attributes:
        name: the model of the GPU.
        major, minor: its compute capability; 0 and 0 where the pool computes on a CPU.
        total_memory: bytes of the lease, not of the whole GPU.
    """

    name: str
    major: int
    minor: int
    total_memory: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not known of a leased GPU, only name, major, minor and total_memory")


def get_device_properties(device: Any = None) -> DeviceProperties:
    check_index(device)
    major, minor = get_device_capability()
    return DeviceProperties(lease().model, major, minor, lease().quota.memory)


def get_device_name(device: Any = None) -> str:
    check_index(device)
    return lease().model


def get_device_capability(device: Any = None) -> tuple[int, int]:
    check_index(device)
    return session().capability or (0, 0)


def get_arch_list() -> list[str]:
    found = session().capability
    return [] if found is None else [f"sm_{found[0]}{found[1]}"]


def is_available() -> bool:
    """True, if the pool gives the lease.

    Raises:
        WarpbusError: it does not. The program is to use a leased GPU, and does not fall back to the CPU.
    """
    lease()
    return True


def device_count() -> int:
    lease()
    return 1


def is_bf16_supported(including_emulation: bool = True) -> bool:
    found = session().capability
    return found is None or including_emulation or found >= (8, 0)


def is_tf32_supported() -> bool:
    return (session().capability or (0, 0)) >= (8, 0)


def init() -> None:
    lease()


def set_device(device: Any) -> None:
    check_index(device)


def memory_allocated(device: Any = None) -> int:
    """Bytes of all storages on the device, which count against the lease's memory."""
    check_index(device)
    if not is_leased():
        return 0
    used = session()
    used.flush()  # so that freed storages count
    return used.used


def max_memory_allocated(device: Any = None) -> int:
    check_index(device)
    return session().peak if is_leased() else 0


def reset_peak_memory_stats(device: Any = None) -> None:
    used = memory_allocated(device)
    if is_leased():
        session().peak = used


def empty_cache() -> None:
    """Does nothing: freed memory counts as free immediately."""


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes of the lease that are free, and all of them."""
    check_index(device)
    total = lease().quota.memory
    return total - memory_allocated(), total


def memory_stats(device: Any = None) -> dict[str, int]:
    used, peak = memory_allocated(device), max_memory_allocated(device)
    return {
        f"{what}_bytes.all.{when}": value
        for what in ("allocated", "active", "reserved", "requested")
        for when, value in (("current", used), ("peak", peak))
    }


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    used, peak, total = memory_allocated(device), max_memory_allocated(device), lease().quota.memory
    return f"leased GPU: {used:,} of {total:,} bytes in use, at most {peak:,} so far"


def manual_seed(number: int) -> None:
    seed(int(number))


def seed_randomly() -> None:
    seed(secrets.randbits(63))


def get_rng_state(device: Any = "cuda") -> Tensor:
    """The state of the device's generator: uint8 on the CPU. One round trip."""
    check_index(device)
    lease()
    state: Tensor = torch.warpbus.get_rng_state()  # type: ignore[attr-defined]
    return state


def set_rng_state(new_state: Tensor, device: Any = "cuda") -> None:
    check_index(device)
    lease()
    torch.warpbus.set_rng_state(new_state)  # type: ignore[attr-defined]


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state()]


def set_rng_state_all(new_states: Any) -> None:
    for state in new_states:
        set_rng_state(state)


def _nothing(*_: Any, **__: Any) -> None:
    """Has no effect on a leased GPU, and no result."""


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _false(*_: Any, **__: Any) -> bool:
    return False


def _range(msg: str, *_: Any, **__: Any) -> AbstractContextManager[None]:
    return nullcontext()


_FUNCTIONS: dict[str, Any] = {
    "_is_in_bad_fork": is_forked,
    "_lazy_init": init,
    "can_device_access_peer": _false,
    "current_device": _zero,
    "current_stream": streams.current_stream,
    "default_stream": streams.current_stream,
    "device": streams.DeviceContext,
    "device_count": device_count,
    "device_of": streams.DeviceContext,
    "empty_cache": empty_cache,
    "get_arch_list": get_arch_list,
    "get_device_capability": get_device_capability,
    "get_device_name": get_device_name,
    "get_device_properties": get_device_properties,
    "init": init,
    "initial_seed": initial_seed,
    "ipc_collect": _nothing,
    "is_available": is_available,
    "is_bf16_supported": is_bf16_supported,
    "is_current_stream_capturing": _false,
    "is_initialized": is_leased,
    "is_tf32_supported": is_tf32_supported,
    "set_device": set_device,
    "set_stream": streams.set_stream,
    "stream": streams.StreamContext,
    "synchronize": streams.synchronize,
    "Event": streams.RemoteEvent,
    "Stream": streams.RemoteStream,
    "StreamContext": streams.StreamContext,
}

_MEMORY: dict[str, Any] = {
    "empty_cache": empty_cache,
    "max_memory_allocated": max_memory_allocated,
    "max_memory_cached": max_memory_allocated,
    "max_memory_reserved": max_memory_allocated,
    "mem_get_info": mem_get_info,
    "memory_allocated": memory_allocated,
    "memory_cached": memory_allocated,
    "memory_reserved": memory_allocated,
    "memory_stats": memory_stats,
    "memory_summary": memory_summary,
    "reset_accumulated_memory_stats": _nothing,
    "reset_max_memory_allocated": reset_peak_memory_stats,
    "reset_max_memory_cached": reset_peak_memory_stats,
    "reset_peak_memory_stats": reset_peak_memory_stats,
}

_RANDOM: dict[str, Any] = {
    "get_rng_state": get_rng_state,
    "get_rng_state_all": get_rng_state_all,
    "initial_seed": initial_seed,
    "manual_seed": manual_seed,
    "manual_seed_all": manual_seed,
    "seed": seed_randomly,
    "seed_all": seed_randomly,
    "set_rng_state": set_rng_state,
    "set_rng_state_all": set_rng_state_all,
}

_NVTX: dict[str, Any] = {"mark": _nothing, "range": _range, "range_pop": _zero, "range_push": _zero}

_KEPT = frozenset({"CudaError", "DeferredCudaCallError", "check_error", "cudaStatus", "has_half", "has_magma"})
"""Of `torch.cuda`'s public names, those that need no GPU."""

_REPLACED = frozenset({*_FUNCTIONS, *_MEMORY, *_RANDOM})


def replace() -> None:
    """Replace the functions of `torch.cuda` and `torch.accelerator`."""
    cuda = torch.cuda
    _give(cuda, {**_FUNCTIONS, **_MEMORY, **_RANDOM})
    _give(cuda.memory, _MEMORY)
    _give(cuda.random, _RANDOM)
    _give(cuda.nvtx, _NVTX)
    _give(cuda.streams, {"Event": streams.RemoteEvent, "Stream": streams.RemoteStream})
    cuda._initialized = True
    for module in (cuda, cuda.memory):
        for name in module.__all__:
            value = getattr(module, name, None)
            if _needs_gpu(name, value):
                refusal = _refusal(f"torch.cuda.{name}")
                # A class stays one, because programs ask whether something is an instance of it.
                setattr(module, name, type(name, (), {"__new__": refusal}) if isinstance(value, type) else refusal)
    _give(torch.accelerator, _accelerator())
    torch.backends.cudnn.is_acceptable = _false


def _accelerator() -> dict[str, Any]:
    return {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": _zero,
        "current_device_idx": _zero,
        "current_stream": streams.current_stream,
        "get_memory_info": mem_get_info,
        "set_device_idx": set_device,
        "set_device_index": set_device,
        "set_stream": streams.set_stream,
        "synchronize": streams.synchronize,
        **{name: each for name, each in _MEMORY.items() if hasattr(torch.accelerator, name)},
    }


def _needs_gpu(name: str, value: Any) -> bool:
    """Whether it is a function or class of `torch.cuda` that has not been replaced and would look for a GPU here."""
    if name in _KEPT or name in _REPLACED or name.endswith(("Tensor", "Storage")):
        return False
    return callable(value) and str(getattr(value, "__module__", "")).startswith("torch.cuda")


def _give(module: Any, functions: Mapping[str, Any]) -> None:
    for name, function in functions.items():
        setattr(module, name, function)


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{name} is not available on a leased GPU: docs/pool.md lists what of torch.cuda a lease has"
        )

    return refuse

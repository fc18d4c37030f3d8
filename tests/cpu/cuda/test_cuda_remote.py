"""Devices that stand for something elsewhere; PyTorch's meta device in their place."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from warpbus.cuda import remote
from warpbus.cuda.devices import default_dtype, free_memory, resolve_device
from warpbus.cuda.jit import architecture
from warpbus.cuda.vmm import Arena
from warpbus.errors import DeviceError, UsageError
from warpbus.kernels.ops.arguments import gpu_has_kernels, has_kernels
from warpbus.kernels.ops.attention import has_kernel

HERE = torch.device("meta")


class Behind:
    def __init__(self, capability: tuple[int, int] | None) -> None:
        self._capability = capability

    def check(self) -> None: ...

    def capability(self) -> tuple[int, int] | None:
        return self._capability

    def free_memory(self) -> int:
        return 12_345

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor

    def record(self) -> AbstractContextManager[Any]:
        return nullcontext()


@pytest.fixture
def make_remote(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int] | None], None]:
    return lambda capability: monkeypatch.setitem(remote._backends, "meta", Behind(capability))


def test_a_device_is_itself_unless_it_is_remote(make_remote: Callable[..., None]) -> None:
    assert remote.remote_backend(HERE) is None
    assert not remote.is_gpu(HERE)
    assert remote.is_gpu(torch.device("cuda"))
    assert not remote.is_gpu(torch.device("cpu"))
    make_remote((8, 0))
    assert remote.remote_backend(HERE) is not None
    assert remote.is_gpu(HERE)
    assert free_memory(HERE) == 12_345


@pytest.mark.parametrize(
    ("capability", "kernels", "name"),
    [(None, False, None), ((7, 5), False, "sm_75"), ((8, 6), True, "sm_86"), ((9, 0), True, "sm_90a")],
)
def test_what_is_behind_decides(
    capability: tuple[int, int] | None, kernels: bool, name: str | None, make_remote: Callable[..., None]
) -> None:
    make_remote(capability)
    assert default_dtype(HERE, torch.bfloat16) == (torch.float32 if capability is None else torch.bfloat16)
    assert gpu_has_kernels(HERE) == kernels
    assert has_kernel(torch.float16, 64, HERE) == kernels
    with torch.no_grad():
        assert has_kernels(torch.empty(1, dtype=torch.float16, device=HERE)) == kernels
    if name is not None:
        assert architecture(HERE) == name


def test_an_arena_has_all_its_memory_at_once(make_remote: Callable[..., None]) -> None:
    make_remote((9, 0))
    arena = Arena(1000, HERE)
    assert (arena.mapped, arena.reserved, arena.page) == (1000, 1000, 1)
    assert arena.tensor((3, 5), torch.int32, 8).storage_offset() == 2
    arena.resize(100)
    assert arena.mapped == 1000
    with pytest.raises(DeviceError, match="not exported"):
        arena.export()
    arena.close()
    assert arena.mapped == 0
    with pytest.raises(UsageError, match="closed"):
        arena.resize(1)


@pytest.mark.parametrize("device", ["warpbus", "warpbus:0", "warpbus:3"])
def test_a_remote_gpu_has_to_be_connected(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_backends", {})  # other tests of the process may have connected one
    with pytest.raises(DeviceError, match=r"no remote GPU is connected|a process has one remote GPU"):
        resolve_device(device)

"""What --device and --dtype mean, on machines without a GPU, with one and with several."""

from pathlib import Path

import pytest
import torch

from warpbus.cuda import devices
from warpbus.cuda.devices import default_dtype, free_memory, resolve_device, resolve_dtype
from warpbus.errors import DeviceError, UsageError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)


@pytest.mark.parametrize(
    ("gpus", "device", "expected"),
    [
        (0, "auto", "cpu"),
        (0, "cpu", "cpu"),
        (0, torch.device("cpu"), "cpu"),
        (0, "cpu:0", "cpu"),
        (2, "auto", "cuda:0"),
        (2, "cuda", "cuda:0"),
        (2, "cuda:1", "cuda:1"),
        (2, torch.device("cuda", 1), "cuda:1"),
        (2, "cpu", "cpu"),
    ],
    indirect=["gpus"],
)
def test_a_device_that_is_there(gpus: None, device: str | torch.device, expected: str) -> None:
    assert resolve_device(device) == torch.device(expected)


@pytest.mark.parametrize(
    ("gpus", "device", "said"),
    [
        (0, "cuda", "device cuda: torch sees no GPU: use --device cpu, or see what warpbus doctor says"),
        (0, "cuda:3", "device cuda:3: torch sees no GPU"),
        (2, "cuda:2", r"device cuda:2: this machine has 2 GPU\(s\), cuda:0 to cuda:1: choose one"),
    ],
    indirect=["gpus"],
)
def test_a_device_that_is_not_there(gpus: None, device: str, said: str) -> None:
    with pytest.raises(DeviceError, match=f"^{said}"):
        resolve_device(device)


@pytest.mark.parametrize("device", ["", "gpu", "meta", "cuda:x", "cuda:-1", "mps", 3.5])
def test_a_device_that_is_no_name(device: str) -> None:
    with pytest.raises(UsageError, match="give auto, cpu, cuda or cuda:N"):
        resolve_device(device)


def test_dtypes() -> None:
    assert resolve_dtype("float16") == resolve_dtype(torch.float16) == torch.float16
    assert resolve_dtype("bfloat16") == torch.bfloat16
    for name in ("int8", "auto", "float64", torch.int8):
        with pytest.raises(UsageError, match=r"dtype is .*: give auto, float32, float16, bfloat16"):
            resolve_dtype(name)


def test_the_default_is_float32_on_the_cpu_and_the_files_own_on_a_gpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert default_dtype(cpu, torch.bfloat16) == torch.float32
    assert default_dtype(gpu, torch.bfloat16) == torch.bfloat16
    assert default_dtype(gpu, torch.float16) == torch.float16
    assert default_dtype(gpu, torch.float64) == torch.float32


def test_free_memory_of_the_host(tmp_path: Path) -> None:
    free = free_memory(torch.device("cpu"))
    assert free is None or 0 < free < 2**60


def test_limits_of_control_groups(tmp_path: Path) -> None:
    """Each group up to the root may have a limit; pages of files count as free."""
    for name, limit, current in (("", "max", 0), ("user", "5000", 4000), ("user/job", "3000", 3500)):
        group = tmp_path / "cgroup" / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{current}\n")
        (group / "memory.stat").write_text("anon 7\nactive_file 100\ninactive_file 20\n")
    membership = tmp_path / "own"
    membership.write_text("0::/user/job\n")
    assert devices._left_in_cgroups(tmp_path / "cgroup", membership) == [0, 1120]
    membership.write_text("0::/../outside\n")  # what a container may see of a group above its own
    assert devices._left_in_cgroups(tmp_path / "cgroup", membership) == []
    assert devices._left_in_cgroups(tmp_path / "cgroup", tmp_path / "none") == []

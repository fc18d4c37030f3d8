"""The meter of energy, on GPUs that answer as these say."""

import ctypes
import time

import pytest
import torch

from warpbus.cuda.energy import EnergyMeter
from warpbus.cuda.inventory import Inventory
from warpbus.errors import DeviceError

GPUS = [torch.device("cuda", index) for index in range(2)]


class Counters:
    """GPUs that count: each reading finds one more watt-hour. `broken` ones neither count nor tell their power."""

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.read: list[str] = []

    def energy(self, uuid: str) -> float | None:
        self.read.append(uuid)
        return None if uuid in self.broken else 1e9 + 3600.0 * self.read.count(uuid)

    def power(self, uuid: str) -> float | None:
        return None


class Powers:
    """GPUs that tell their power alone, for `answers` readings."""

    def __init__(self, watts: float, answers: float = float("inf")) -> None:
        self.watts, self.answers = watts, answers

    def energy(self, uuid: str) -> float | None:
        return None

    def power(self, uuid: str) -> float | None:
        self.answers -= 1
        return self.watts if self.answers >= 0 else None


def name(device: torch.device) -> str:
    # As under CUDA_VISIBLE_DEVICES=7,3
    return f"GPU-{(7, 3)[device.index or 0]}"


def test_a_counter_is_read_before_and_after() -> None:
    sensors = Counters()
    with EnergyMeter(GPUS, sensors=sensors, uuid=name) as meter:
        assert sensors.read == ["GPU-7", "GPU-3"]
        assert meter.joules == {GPUS[0]: None, GPUS[1]: None}
    assert sensors.read == ["GPU-7", "GPU-3"] * 2
    assert meter.joules == {GPUS[0]: 3600.0, GPUS[1]: 3600.0}
    assert meter.total == 7200.0


def test_what_is_not_measured_is_not_guessed() -> None:
    with EnergyMeter(GPUS, sensors=Counters("GPU-3"), uuid=name) as meter:
        pass
    assert meter.joules == {GPUS[0]: 3600.0, GPUS[1]: None}
    assert meter.total is None
    with EnergyMeter([torch.device("cpu")], sensors=Counters(), uuid=name) as meter:
        pass
    assert (meter.joules, meter.total) == ({}, None)


def test_a_block_that_fails_is_measured_too() -> None:
    meter = EnergyMeter(GPUS[:1], sensors=Counters(), uuid=name)
    with pytest.raises(KeyError), meter:
        raise KeyError
    assert meter.total == 3600.0


def test_power_is_integrated_where_there_is_no_counter() -> None:
    outer = time.perf_counter()
    with EnergyMeter(GPUS, sensors=Powers(200.0), uuid=name) as meter:
        inner = time.perf_counter()
        time.sleep(0.2)
        inner = time.perf_counter() - inner
    outer = time.perf_counter() - outer
    for joules in meter.joules.values():
        assert joules is not None
        # The thread may have begun a little after the block did.
        assert 200.0 * inner * 0.5 <= joules <= 200.0 * outer


def test_a_gpu_that_stops_answering_was_not_measured() -> None:
    with EnergyMeter(GPUS[:1], sensors=Powers(200.0, answers=2), uuid=name) as meter:
        time.sleep(0.2)
    assert meter.total is None


class Library:
    """What Warpbus calls of NVML; one GPU that counts and tells its power, and one that does neither."""

    def __init__(self, started: int = 0) -> None:
        self.started = started

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return self.started

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: "ctypes._Pointer[ctypes.c_void_p]") -> int:  # noqa: N802
        known = {b"GPU-new": 1, b"GPU-old": 2}
        device._obj.value = known.get(uuid)  # type: ignore[attr-defined]
        return 0 if uuid in known else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, device: ctypes.c_void_p, value: object) -> int:  # noqa: N802
        value._obj.value = 2**40  # type: ignore[attr-defined]
        return 0 if device.value == 1 else 3

    def nvmlDeviceGetPowerUsage(self, device: ctypes.c_void_p, value: object) -> int:  # noqa: N802
        value._obj.value = 350_500  # type: ignore[attr-defined]
        return 0 if device.value == 1 else 3


def test_nvml_counts_in_thousandths() -> None:
    sensors = Inventory(Library())
    assert sensors.energy("GPU-new") == 2**40 / 1000
    assert sensors.power("GPU-new") == 350.5
    for uuid in ("GPU-old", "GPU-none"):
        assert sensors.energy(uuid) is None
        assert sensors.power(uuid) is None


def test_nvml_that_does_not_start() -> None:
    with pytest.raises(DeviceError, match="nvmlInit"):
        Inventory(Library(started=9))
